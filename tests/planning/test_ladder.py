"""The ladder keeps what a recipe promises, goes down with each rung, and ends."""

import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.params import load_params
from stages.core.params.schema import OPTIMIZERS, DeviceParams
from stages.planning.ladder import (
    MAX_BATCH_SIZE,
    batch_size_changes,
    lowered,
    lowered_batch_size,
    rung_changes,
    rungs,
)
from stages.planning.plan import Plan
from stages.planning.resolve import resolve_plan
from tests import ROOT
from tests.plans import changed

PARAMS = load_params(ROOT / "params.yaml")
PLANNED = resolve_plan(PARAMS, "r1-llm-only", train_samples=320)
VISION_ONLY = resolve_plan(PARAMS, "r2-vision-only", train_samples=320)
LARGEST_FIRST = tuple(OPTIMIZERS)
LOWERED: dict[str, Callable[[Any], int]] = {
    "micro_batch": operator.neg,
    "gradient_checkpointing": (False, True).index,
    "placement": lambda placement: int(placement == "sharded"),
    "optimizer": LARGEST_FIRST.index,
    "quantization": ("none", "nf4").index,
}
"""Settings that rungs change, each with its value's place from the most memory down."""


def plan_with(micro_batch: int, accumulation: int, *, replicas: int = 1, kind: Any = "cuda", **changes: Any) -> Plan:
    return changed(
        PLANNED,
        micro_batch=micro_batch,
        grad_accumulation=accumulation,
        effective_batch=micro_batch * accumulation * replicas,
        device=DeviceParams(kind=kind, count=replicas),
        placement="ddp" if replicas > 1 else "single",
        **{"quantization": "none", **changes},
    )


plans = st.builds(
    plan_with,
    st.integers(1, 64),
    st.integers(1, 12),
    replicas=st.integers(1, 8),
    kind=st.sampled_from(["cpu", "cuda"]),
    gradient_checkpointing=st.booleans(),
    optimizer=st.sampled_from(LARGEST_FIRST),
    may_quantize=st.booleans(),
    padding_free=st.booleans(),
    fused_kernels=st.booleans(),
    parts=st.sampled_from([PLANNED.recipe.parts, VISION_ONLY.recipe.parts]),
    dataloader_workers=st.integers(0, 8),
)


def depth(plan: Plan) -> list[int]:
    """Position of each setting on the ladder."""
    return [place(getattr(plan.memory, name, plan.quantization)) for name, place in LOWERED.items()]


def same_states(above: Plan, below: Plan) -> bool:
    one, other = OPTIMIZERS[above.memory.optimizer], OPTIMIZERS[below.memory.optimizer]
    return (one.bits, one.paged) == (other.bits, other.paged)


@given(plans)
def test_every_rung_keeps_the_effective_batch_and_all_but_the_ladders_settings(plan: Plan) -> None:
    for rung in rungs(plan):
        assert rung.samples_per_step * plan.device.count == plan.recipe.effective_batch
        lowered_settings = {name: getattr(plan.memory, name, plan.quantization) for name in LOWERED}
        as_planned = {"grad_accumulation": plan.schedule.grad_accumulation, "features_bytes": plan.features_bytes}
        assert changed(rung, **lowered_settings, **as_planned) == plan


@given(plans)
def test_every_rung_goes_down_by_one_setting_until_nothing_is_left(plan: Plan) -> None:
    """Arithmetic changes only once nothing else is left, and frozen weights come last of all."""
    ladder = list(rungs(plan))
    assert ladder[0] == plan
    for above, below in pairwise(ladder):
        steps = [new - old for old, new in zip(depth(above), depth(below), strict=True)]
        assert min(steps) == 0 < max(steps)
        assert sum(step > 0 for step in steps) == 1
        if above.quantization != below.quantization or not same_states(above, below):
            assert below.memory.micro_batch == 1
            assert below.memory.gradient_checkpointing
        if above.quantization != below.quantization:
            assert below.device.kind == "cpu" or OPTIMIZERS[below.memory.optimizer].smaller is None
    assert ladder[-1].memory.micro_batch == 1
    assert ladder[-1].memory.gradient_checkpointing
    assert [lowered(plan, attempt) for attempt in range(len(ladder) + 1)] == [*ladder, None]


@given(plans)
def test_a_setting_changes_only_where_the_recipe_and_the_device_allow_it(plan: Plan) -> None:
    ladder = list(rungs(plan))
    assert any(rung.quantization == "nf4" for rung in ladder) == plan.may_quantize
    # Replicas of ddp are sharded; not where that would rule out nf4, nor with what cannot be sharded.
    sharded = [rung for rung in ladder if rung.memory.placement == "sharded"]
    allowed = plan.memory.placement == "ddp" and not plan.may_quantize and OPTIMIZERS[plan.memory.optimizer].shardable
    assert bool(sharded) == allowed
    assert all(below.quantization == "none" and OPTIMIZERS[below.memory.optimizer].shardable for below in sharded)
    if plan.device.kind == "cpu":
        assert {rung.memory.optimizer for rung in ladder} == {plan.memory.optimizer}


def test_changes_are_in_the_plans_words() -> None:
    plan = plan_with(2, 8, optimizer="adamw_torch", may_quantize=True)
    assert rung_changes(plan) == [
        "optimizer adamw_torch -> adamw_torch_fused",
        "micro_batch 2 -> 1, grad_accumulation 8 -> 16",
        "gradient_checkpointing off -> on",
        "optimizer adamw_torch_fused -> adamw_8bit",
        "optimizer adamw_8bit -> paged_adamw_8bit",
        "quantization none -> nf4",
    ]
    replicated = plan_with(1, 8, replicas=2, optimizer="adamw_torch_fused", gradient_checkpointing=True)
    assert "placement ddp over 2 -> sharded over 2" in rung_changes(replicated)


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "steps"),
    [(12, 1, [6, 3, 1]), (5, 6, [2, 1]), (7, 1, [1])],
)
def test_the_micro_batch_takes_every_divisor_on_its_way(micro_batch: int, accumulation: int, steps: list[int]) -> None:
    plan = plan_with(micro_batch, accumulation, kind="cpu", gradient_checkpointing=True)
    assert [*dict.fromkeys(rung.memory.micro_batch for rung in rungs(plan))] == [micro_batch, *steps]


@given(st.integers(1, 200))
def test_an_evaluation_halves_its_batch_down_to_one(batch_size: int) -> None:
    changes = batch_size_changes(batch_size)
    sizes = [lowered_batch_size(batch_size, attempt) for attempt in range(len(changes) + 2)]
    assert sizes[0] == batch_size
    assert sizes[-2:] == [1, None]
    assert changes == [f"batch_size {sizes[rung]} -> {sizes[rung + 1]}" for rung in range(len(changes))]


def test_a_batch_size_by_prediction_can_be_halved_until_the_largest_there_is_would_be_one() -> None:
    changes = batch_size_changes("auto")
    assert (changes[0], changes[-1]) == ("batch_size auto / 2", f"batch_size auto / {MAX_BATCH_SIZE}")
    assert lowered_batch_size(MAX_BATCH_SIZE, len(changes)) == 1
