import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedConfig, Qwen2Config, Qwen2MoeConfig

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.core.params.schema import DeviceParams, Params, ScheduleOptions, ValidationParams
from stages.models.load import load_config
from stages.planning.plan import Plan, Validation, read_plan
from stages.planning.resolve import resolve_plan, without_padding
from tests import ROOT
from tests.plans import changed

PARAMS = load_params(ROOT / "params.yaml")


def with_changes(recipe: dict[str, Any] | None = None, **memory: Any) -> Params:
    """The shipped parameters, with changes to r1-llm-only and to the memory settings of the tiny profile."""
    profile = PARAMS.active
    return replace(
        PARAMS,
        recipes={**PARAMS.recipes, "r1-llm-only": replace(PARAMS.recipe("r1-llm-only"), **(recipe or {}))},
        profiles={**PARAMS.profiles, "tiny": replace(profile, memory=replace(profile.memory, **memory))},
    )


@pytest.mark.parametrize("profile", PARAMS.profiles)
def test_every_recipe_resolves_on_every_profile_and_survives_the_file(profile: str, tmp_path: Path) -> None:
    for recipe in PARAMS.recipes:
        plan = resolve_plan(PARAMS.on(profile), recipe, train_samples=1083)
        plan.write(tmp_path / recipe / "plan.yaml")
        assert read_plan(recipe, runs_dir=tmp_path) == plan


def test_the_7b_profile_has_the_original_experiments_schedule() -> None:
    plan = resolve_plan(PARAMS.on("qwen2-vl-7b"), "r1-llm-only", train_samples=1083)
    schedule = plan.schedule
    assert (plan.memory.micro_batch, schedule.grad_accumulation, plan.recipe.effective_batch) == (2, 8, 16)
    assert schedule.num_steps == 3 * 68
    assert schedule.learning_rates == {"llm": 1e-4}
    assert plan.quantization == "nf4"
    assert plan.images is not None
    assert (plan.images.min_pixels, plan.images.max_pixels) == (256 * 28 * 28, 1280 * 28 * 28)


def test_the_tiny_profile_scales_rates_and_quantizes_as_the_recipe_says() -> None:
    plan = resolve_plan(PARAMS, "r1-llm-only", train_samples=320)
    assert plan.schedule.learning_rates == {"llm": 1e-4 * PARAMS.active.learning_rate_scale}
    assert (plan.quantization, plan.may_quantize) == ("nf4", False)
    unquantized = resolve_plan(with_changes(quantization="none"), "r1-llm-only", train_samples=320)
    assert (unquantized.quantization, unquantized.may_quantize) == ("none", True)


def test_validations_are_a_share_of_the_steps_and_no_more_than_the_profile_allows() -> None:
    def validation(params: Params, train_samples: int = 320) -> Validation:
        found = resolve_plan(params, "r1-llm-only", train_samples=train_samples).validation
        assert found is not None
        return found

    assert [validation(PARAMS, samples).every_steps for samples in (1, 320, 3200)] == [1, 15, 150]
    assert (validation(PARAMS).samples, validation(PARAMS).score_samples) == (32, 8)
    assert (validation(PARAMS.on("qwen2-vl-7b")).samples, validation(PARAMS).split) == (64, "val")
    set_aside = resolve_plan(PARAMS, "r1-llm-only", train_samples=320, has_selection=True).validation
    assert set_aside is not None
    assert set_aside.split == "selection"
    wanted = ValidationParams(every_steps=50, samples=10, score_samples=0)
    found = validation(with_changes({"validation": wanted}))
    assert (found.every_steps, found.samples, found.score_samples) == (50, 10, 0)
    fewer = validation(with_changes({"validation": ValidationParams(samples=5)}))
    assert (fewer.samples, fewer.score_samples) == (5, 5)
    assert resolve_plan(with_changes({"validation": None}), "r1-llm-only", train_samples=320).validation is None


@pytest.mark.parametrize("placement", ["ddp", "sharded"])
def test_devices_share_the_effective_batch_where_each_has_a_process(placement: Any) -> None:
    device = replace(PARAMS.active.device, count=4)
    spread = replace(with_changes(micro_batch=2, placement=placement).active, device=device)
    schedule = resolve_plan(replace(PARAMS, profiles={"tiny": spread}), "r1-llm-only", train_samples=10).schedule
    assert schedule.grad_accumulation == 2
    two_gpus = replace(PARAMS.on("qwen2-vl-7b"), gpu=48, gpus=2)
    profile = two_gpus.profiles["qwen2-vl-7b"]
    layers_spread = replace(profile, memory=replace(profile.memory, placement="balanced"))
    balanced = replace(two_gpus, profiles={"qwen2-vl-7b": layers_spread})
    for params, accumulation in ((two_gpus, 4), (balanced, 8)):
        assert resolve_plan(params, "r1-llm-only", train_samples=10).schedule.grad_accumulation == accumulation


@given(
    samples=st.integers(1, 5000),
    micro=st.sampled_from([1, 2, 4, 8, 16]),
    accumulation=st.integers(1, 8),
    epochs=st.integers(1, 5),
    max_steps=st.none() | st.integers(1, 100),
)
def test_the_effective_batch_is_kept_and_every_sample_is_seen(
    samples: int, micro: int, accumulation: int, epochs: int, max_steps: int | None
) -> None:
    effective = micro * accumulation
    params = with_changes({"effective_batch": effective, "epochs": epochs, "max_steps": max_steps}, micro_batch=micro)
    plan = resolve_plan(params, "r1-llm-only", train_samples=samples)
    schedule = plan.schedule
    assert plan.samples_per_step == effective
    assert (schedule.steps_per_epoch - 1) * effective < samples <= schedule.steps_per_epoch * effective
    assert schedule.num_steps <= (max_steps or schedule.num_steps)
    assert 0 <= schedule.warmup_steps <= schedule.num_steps


def test_the_warm_up_is_a_number_of_steps_or_a_share_of_them() -> None:
    def steps(**changes: Any) -> int:
        return resolve_plan(with_changes(changes), "r1-llm-only", train_samples=320).schedule.warmup_steps

    assert [steps(), steps(warmup_ratio=0.0), steps(warmup_ratio=0.5), steps(warmup_steps=7)] == [3, 0, 30, 7]
    # The rate of a warm-up's first step is 0: a training of that step alone would change no weight.
    assert [steps(max_steps=2), steps(max_steps=1), steps(max_steps=1, warmup_ratio=1.0)] == [1, 0, 0]


def test_a_schedule_that_takes_more_steps_than_there_are_is_refused() -> None:
    decaying: dict[str, Any] = {"lr_schedule": "warmup_stable_decay", "epochs": 1, "warmup_steps": 15}
    for changes, problem in (
        ({"warmup_steps": 60}, "r1-llm-only has 60 steps, fewer than a warm-up of 60 and a decay of 1; lower"),
        (
            decaying | {"lr_schedule_options": ScheduleOptions(min_lr_ratio=0.0, decay_ratio=0.26)},
            "r1-llm-only has 20 steps, fewer than a warm-up of 15 and a decay of 6; lower .*decay_ratio",
        ),
    ):
        with pytest.raises(UserError, match=problem):
            resolve_plan(with_changes(changes), "r1-llm-only", train_samples=320)
    fitting = decaying | {"lr_schedule_options": ScheduleOptions(min_lr_ratio=0.0, decay_ratio=0.25)}
    assert resolve_plan(with_changes(fitting), "r1-llm-only", train_samples=320).schedule.num_steps == 20


def test_a_recipes_optimizer_goes_before_the_profiles() -> None:
    def optimizer(wanted: Any) -> str:
        params = with_changes({"optimizer": wanted}, optimizer="adamw_torch")
        return resolve_plan(params, "r1-llm-only", train_samples=320).memory.optimizer

    assert (optimizer(None), optimizer("muon")) == ("adamw_torch", "muon")


def test_a_profile_limits_the_epochs_of_longer_recipes() -> None:
    for name, on_tiny in (("amr-ptr", 8), ("r1-llm-only", 3)):
        schedule = resolve_plan(PARAMS, name, train_samples=32).schedule
        assert (schedule.epochs, schedule.num_steps) == (on_tiny, 2 * on_tiny)
    assert resolve_plan(PARAMS.on("qwen25-7b"), "amr-ptr", train_samples=32).schedule.num_steps == 30


PLAN = resolve_plan(PARAMS, "r1-llm-only", train_samples=10)


@pytest.mark.parametrize(
    ("recipe", "memory"),
    [
        ({}, {"fit": "off", "features_gb": 1.0}),  # of predictions
        ({}, {"kernels": "off", "padding_free": "off"}),  # with_speedups decides what follows from them
        ({"max_steps": 1000}, {}),  # more than there are
        ({"learning_rate": 1.0, "part_learning_rates": {"llm": 1e-4, "vision": 1.0}}, {}),  # vision is not trained
    ],
)
def test_a_setting_that_a_training_does_not_use_leaves_its_plan_as_it_is(
    recipe: dict[str, Any], memory: dict[str, Any]
) -> None:
    assert resolve_plan(with_changes(recipe, **memory), "r1-llm-only", train_samples=10) == PLAN


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": "r2-vision-only"}, "name: this is the plan of 'r2-vision-only'"),
        (
            {"recipe": {**asdict(PLAN.recipe), "max_length": 0}},
            "recipe.max_length: input should be greater than or equal to 1",
        ),
    ],
)
def test_a_plan_with_impossible_values_is_refused(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "r1-llm-only/plan.yaml"
    path.parent.mkdir()
    path.write_text(json.dumps({**asdict(PLAN), **change}))
    with pytest.raises(UserError, match=re.escape(problem)):
        read_plan("r1-llm-only", runs_dir=tmp_path)


GPU = changed(PLAN, device=DeviceParams(kind="cuda"), precision="bf16", attn="auto")
VLM = load_config(ROOT / "data/tiny/qwen2-vl")


@pytest.mark.parametrize(
    ("plan", "wanted", "config", "chosen", "why"),
    [
        (GPU, "auto", VLM, True, "GPU"),
        (changed(GPU, attn="flash_attention_2"), "auto", Qwen2MoeConfig(), True, "GPU"),
        (GPU, "off", VLM, False, "memory.padding_free"),
        (changed(GPU, attn="eager"), "auto", VLM, False, "eager"),
        (changed(GPU, precision="fp16"), "auto", VLM, False, "fp16"),
        (changed(GPU, precision="fp16"), "on", VLM, True, "memory.padding_free"),
        (PLAN, "auto", VLM, False, "CPU"),
        (PLAN, "on", VLM, True, "memory.padding_free"),
        (GPU, "on", Qwen2Config(use_sliding_window=True, max_window_layers=2), False, "sliding_attention"),
    ],
)
def test_padding_is_left_out_where_that_is_faster_and_the_same(
    plan: Plan, wanted: Any, config: PreTrainedConfig, chosen: bool, why: str
) -> None:
    found, reason = without_padding(plan, wanted, config)
    assert (found, why in reason) == (chosen, True)
