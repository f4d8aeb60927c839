"""A training step: order, learning rates, accumulation, the start contract, the rehearsal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import chain
from math import cos, pi
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader, skip_first_batches
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from torch.optim import AdamW, Muon
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, RandomSampler
from transformers import PreTrainedModel, get_scheduler
from trl.trainer import utils as trl_trainer

from stages.core.errors import UserError
from stages.core.params.schema import CheckpointParams, DeviceParams, LrSchedule, PartsParams, ScheduleOptions
from stages.models.adapters import apply_recipe, count_trainable, part_of
from stages.models.load import check_placement, load_model
from stages.planning.ladder import rungs
from stages.planning.plan import Plan
from stages.training.batches import IGNORED
from stages.training.checkpoints import kept_checkpoints
from stages.training.muon import MuonWithAdamW
from stages.training.records import LOSS, TrainingSummary
from stages.training.resume import train_to_the_end
from stages.training.trainer import (
    MAX_OVERFLOWS,
    ContractBreach,
    LineProgress,
    RecipeTrainer,
    SortedInSteps,
    StartContract,
    check_gradients,
    check_start,
    training_arguments,
)
from tests.plans import changed
from tests.training.small import PARAMS, log_of, plan_for, validation, weights

Build = Callable[..., RecipeTrainer]


def test_training_changes_what_is_trained_and_nothing_else(build: Build) -> None:
    plan = plan_for("r4-joint")
    trainer = build(plan)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == plan.schedule.num_steps == 4
    for name, parameter in trainer.model.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(before[name], parameter), name
        elif "lora_B" in name:
            assert not torch.equal(before[name], parameter), name


def test_the_time_left_counts_no_rehearsal(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step takes 100 s, as it has the rehearsal, and the others 2 s each."""
    caplog.set_level("INFO", logger="stages")
    progress, clock = LineProgress(), iter([0.0, 100.0, 102.0, 104.0])
    monkeypatch.setattr("stages.training.trainer.time", SimpleNamespace(monotonic=lambda: next(clock)))
    arguments: Any = None
    for step in range(3):
        state: Any = SimpleNamespace(global_step=step, max_steps=10, is_world_process_zero=True)
        progress.on_step_begin(arguments, state, arguments)
        state.global_step += 1
        progress.on_log(arguments, state, arguments, logs={"loss": 1.0})
    assert [record.message for record in caplog.records] == [
        "step 1/10  loss 1.0000",
        "step 2/10  loss 1.0000  0.50 steps/s  0:16 left",
        "step 3/10  loss 1.0000  0.50 steps/s  0:14 left",
    ]


def test_what_a_gpu_did_is_in_the_record(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(plan_for("r4-joint"))
    trainer.train()
    assert trainer.gpu_use.totals() == {}, "a CPU has nothing to say"
    found = {"gpu_utilization": 0.5, "gpu_watts": 300.0, "gpu_kwh": 0.25}
    monkeypatch.setattr(trainer.gpu_use, "totals", lambda: found)
    trainer.kept_step = trainer.state.global_step
    assert found.items() <= asdict(TrainingSummary.of(trainer, attempt=0)).items()


def test_each_part_has_its_own_learning_rate(build: Build) -> None:
    trainer = build(plan_for("r4-joint", part_learning_rates={"vision": 3e-5}))
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    rates = {
        part_of(names[id(parameter)]): group["lr"]
        for group in trainer.create_optimizer().param_groups
        for parameter in group["params"]
    }
    scale = PARAMS.active.learning_rate_scale
    assert rates == {"vision": pytest.approx(3e-5 * scale), "llm": pytest.approx(1e-4 * scale)}


def test_the_rates_of_loraplus_are_those_of_peft(build: Build) -> None:
    lora = PARAMS.recipe("r4-joint").lora
    assert lora is not None
    trainer = build(plan_for("r4-joint", lora=replace(lora, loraplus_lr_ratio=16.0), weight_decay=0.1))
    rate = 1e-4 * PARAMS.active.learning_rate_scale
    theirs = create_loraplus_optimizer(
        *(trainer.model, torch.optim.AdamW), lr=rate, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.1
    )

    def settings_of(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, tuple[float, float]]:
        return {
            parameter: (group["lr"], group["weight_decay"])
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    assert settings_of(trainer.create_optimizer()) == settings_of(theirs)
    assert {rates for rates, _ in settings_of(theirs).values()} == {rate, rate * 16}


def test_micro_batches_of_an_effective_batch_follow_one_trajectory(build: Build) -> None:
    """The loss is weighted by tokens over the effective batch; 24 samples of unlike lengths are two unequal steps."""
    lora = PARAMS.recipe("r4-joint").lora
    assert lora is not None
    planned = plan_for(
        "r4-joint", micro_batch=16, samples=24, effective_batch=16, epochs=1, lora=replace(lora, dropout=0.0)
    )
    ends, losses = [], []
    for micro_batch in (16, 2):
        plan = next(rung for rung in rungs(planned) if rung.memory.micro_batch == micro_batch)
        trainer = build(plan)
        collator = trainer.data_collator
        collator.records = [collator.records[index * index % 8] for index in range(24)]
        trainer.train()
        ends.append(weights(trainer))
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=0, atol=2e-5)


@pytest.mark.parametrize("recipe", ["r1-llm-only", "r2-vision-only"])
def test_checkpointing_changes_nothing_but_memory(build: Build, recipe: str) -> None:
    """And sends nothing back through a frozen vision tower."""
    ends, needs_gradient = [], set()
    for checkpointing in (False, True):
        trainer = build(changed(plan_for(recipe, epochs=1), gradient_checkpointing=checkpointing))
        base = trainer.model.get_base_model() if recipe == "r1-llm-only" else trainer.model
        base.model.visual.blocks[-1].register_forward_hook(lambda *_: needs_gradient.add(_[-1].requires_grad))
        trainer.train()
        ends.append(weights(trainer))
    assert needs_gradient == {recipe == "r2-vision-only"}
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=0, atol=1e-6)


class Waits(TorchDispatchMode):
    """Counts reads of a tensor's value by Python: each would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def test_a_micro_batch_costs_no_visit_of_every_module_or_parameter(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in trainings of 8 micro-batches and of 4, with as many steps."""
    visits: dict[str, int] = {"train": 0, "num_parameters": 0}

    def count(kind: Any, name: str) -> None:
        whole = getattr(kind, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            visits[name] += 1
            return whole(*args, **kwargs)

        monkeypatch.setattr(kind, name, counted)

    count(nn.Module, "train")
    count(PreTrainedModel, "num_parameters")
    found = []
    for micro_batch in (2, 4):
        trainer = build(plan_for("r1-llm-only", micro_batch=micro_batch))
        assert not trainer.args.ddp_find_unused_parameters
        trainer.remove_callback(trainer.rehearsal)
        visits |= dict.fromkeys(visits, 0)
        with Waits() as waits:
            trainer.train()
        found.append([*visits.values(), waits.count])
    assert found[0][:2] == found[1][:2]
    assert (found[0][2] - found[1][2]) / 4 < 9, "Trainer's filter of losses that are not finite takes two more"


def test_the_fused_loss_scores_the_tokens_of_answers_alone(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    fused = trl_trainer._ChunkedLogProbFunction.apply

    def counted(hidden: torch.Tensor, *rest: Any) -> Any:
        scored.append(len(hidden))
        return fused(hidden, *rest)

    monkeypatch.setattr(trl_trainer, "_ChunkedLogProbFunction", SimpleNamespace(apply=counted))
    trainer = build(plan_for("r1-llm-only", epochs=1, samples=4))
    trainer.remove_callback(trainer.rehearsal)
    batch = next(iter(trainer.get_train_dataloader()))
    answers = int((batch["labels"][:, 1:] != IGNORED).sum())
    trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(answers))
    assert scored == [answers]
    assert answers < batch["labels"].numel() / 2


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Products(TorchDispatchMode):
    """Records the dtypes of the factors of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "gemm_4bit") or "scaled_dot_product" in name:
            factors = [each for each in args if isinstance(each, torch.Tensor)][: 3 if "add" in name else 2]
            self.dtypes.setdefault(name, set()).update(each.dtype for each in factors if each.is_floating_point())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("recipe", "product"), [("r2-vision-only", "addmm"), ("r4-joint", "gemm_4bit")])
def test_products_have_the_plans_precision(build: Build, precision: Any, recipe: str, product: str) -> None:
    trainer = build(changed(plan_for(recipe, epochs=1, samples=4), precision=precision))
    assert (trainer.accelerator.scaler is not None) == (precision == "fp16")
    step, products = trainer.training_step, Products()

    def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        with products:
            return step(*args, **kwargs)

    trainer.training_step = training_step  # type: ignore[method-assign]
    trainer.train()
    assert product in products.dtypes
    assert "convolution" not in products.dtypes
    assert set.union(*products.dtypes.values()) == {DTYPES[precision]}


# The order of the samples.

SAMPLES, MICRO_BATCH, STEP = 22, 2, 8
LENGTHS = [number * number * 7 % 23 for number in range(SAMPLES)]


def drawn(epoch: int) -> list[set[int]]:
    """The samples of each step, as accelerate draws them."""
    sampler = SeedableRandomSampler(range(SAMPLES), data_seed=3)
    sampler.set_epoch(epoch)
    order = list(sampler)
    return [{*order[start : start + STEP]} for start in range(0, SAMPLES, STEP)]


def loader(epoch: int, *, processes: int = 1, process: int = 0, skip: int = 0) -> Any:
    """The loader that the trainer prepares."""
    dataset: Any = list(range(SAMPLES))
    plain: Any = DataLoader(dataset, batch_size=MICRO_BATCH, sampler=RandomSampler(dataset), collate_fn=list)
    prepared: Any = prepare_data_loader(
        plain, num_processes=processes, process_index=process, use_seedable_sampler=True, data_seed=3
    )
    prepared.set_sampler(SortedInSteps(prepared.get_sampler(), LENGTHS, STEP))
    prepared = skip_first_batches(prepared, skip) if skip else prepared
    prepared.set_epoch(epoch)
    return prepared


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_a_step_has_its_drawn_samples_by_length_resumed_or_not(epoch: int) -> None:
    batches = list(loader(epoch))
    order = list(chain(*batches))
    steps = [order[start : start + STEP] for start in range(0, SAMPLES, STEP)]
    assert [{*step} for step in steps] == drawn(epoch)
    for step in steps:
        lengths = [LENGTHS[sample] for sample in step]
        assert lengths == sorted(lengths, reverse=True)
    assert list(loader(epoch, skip=4)) == batches[4:]


def test_two_processes_share_out_each_step() -> None:
    """Samples of like lengths are neighbours, so that neither process waits long for the other."""
    whole = list(loader(1))
    shares = [list(loader(1, processes=2, process=process)) for process in range(2)]
    assert [batch for pair in zip(*shares, strict=True) for batch in pair][: len(whole)] == whole


# The start contract.

Started = Callable[[str], tuple[nn.Module, Plan]]
Spoil = Callable[[nn.Module], object]


@pytest.fixture
def started(tiny_vlm: Path) -> Started:
    """A recipe's model and plan before the first step; every trained weight has a gradient of ones."""

    def start(recipe: str) -> tuple[nn.Module, Plan]:
        plan = plan_for(recipe)
        model = load_model(tiny_vlm, device=DeviceParams(kind="cpu"), precision="fp32")
        model = apply_recipe(model, plan.recipe)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        return model, replace(plan, trainable=count_trainable(model))

    return start


def also_train(name: str) -> Spoil:
    return lambda model: model.get_parameter(f"base_model.model.{name}").requires_grad_(True)


def in_bf16(model: nn.Module, *, trained: bool) -> None:
    parameter = next(each for each in model.parameters() if each.requires_grad is trained)
    parameter.data = parameter.data.to(torch.bfloat16)


def buffer_in_bf16(model: nn.Module) -> None:
    buffer = next(model.buffers())
    buffer.data = buffer.data.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("spoil", "changes", "problem"),
    [
        (also_train("model.language_model.norm.weight"), {}, r"llm trains [\d,]+ parameters, but"),
        (also_train("model.visual.patch_embed.proj.weight"), {}, r"vision trains [\d,]+ parameters, but"),
        (also_train("model.visual.merger.ln_q.weight"), {}, r"projector trains [\d,]+ parameters, but"),
        (lambda model: in_bf16(model, trained=True), {}, r"lora_A.* is to be trained, but is torch.bfloat16"),
        (lambda model: in_bf16(model, trained=False), {"precision": "fp16"}, r"precision is fp16, but .* is bfloat16"),
        (buffer_in_bf16, {"precision": "fp16"}, r"precision is fp16, but .* is bfloat16"),
    ],
)
def test_a_run_unlike_its_plan_does_not_start(
    started: Started, spoil: Spoil, changes: dict[str, Any], problem: str
) -> None:
    model, plan = started("r1-llm-only")
    plan = changed(plan, **changes)
    check_start(model, plan, devices_in_use=1)
    spoil(model)
    with pytest.raises(ContractBreach, match=problem):
        check_start(model, plan, devices_in_use=1)


def test_data_parallel_is_a_breach(started: Started) -> None:
    model, plan = started("r2-vision-only")
    for parallel, devices in ((nn.DataParallel(model), 1), (model, 2)):
        with pytest.raises(ContractBreach, match="DataParallel"):
            check_start(parallel, plan, devices_in_use=devices)


def test_weights_away_from_the_planned_device_are_refused(started: Started) -> None:
    """Offloaded weights can look placed, as accelerate brings them in layer by layer; its map shows them."""
    model, _ = started("r2-vision-only")
    cuda, offloaded = DeviceParams(kind="cuda"), nn.Linear(1, 1)
    offloaded.hf_device_map = {"model.layers.0": 0, "model.layers.1": "disk"}  # type: ignore[assignment]
    for spread, device, problem in ((model, cuda, "on cpu"), (offloaded, cuda, "model.layers.1 on disk")):
        with pytest.raises(UserError, match=rf"offloaded away from cuda: .*{problem}"):
            check_placement(spread, device)
    model.lm_head.to("meta")
    with pytest.raises(UserError, match=r"offloaded away from cpu: lm_head.weight on meta"):
        check_placement(model, DeviceParams(kind="cpu"))


def set_gradient(pattern: str, value: float | None) -> Spoil:
    """For the trained parameters with matching names."""

    def spoil(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if re.search(pattern, name) and (parameter.requires_grad or "lm_head" in pattern):
                parameter.grad = None if value is None else torch.full_like(parameter, value)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (set_gradient(r"visual.*lora_A", None), r"vision is trained, but .*lora_A.* got no gradient"),
        (set_gradient(r"lm_head\.weight", 0.0), r"llm is frozen there, but .*lm_head.weight got a gradient"),
        (set_gradient(r"language_model.*lora_B", float("nan")), r"gradient of .* \(llm\) is not finite"),
        (set_gradient(r"visual", 0.0), r"vision is trained, but all its gradients are zero"),
    ],
)
def test_a_gradient_that_is_missing_misplaced_infinite_or_zero_is_a_breach(
    started: Started, spoil: Spoil, problem: str
) -> None:
    model, plan = started("r4-joint")
    spoil(model)
    with pytest.raises(ContractBreach, match=problem):
        check_gradients(model, plan)


@pytest.mark.parametrize("gradient", [0.0, float("inf"), float("nan")])
def test_the_first_steps_of_fp16_may_overflow_but_not_forever(started: Started, gradient: float) -> None:
    """GradScaler and clipping by an infinite norm leave these gradients of a step that overflowed."""
    model, plan = started("r1-llm-only")
    contract = StartContract(changed(plan, precision="fp16"))
    good = {name: parameter.grad for name, parameter in model.named_parameters()}
    set_gradient("lora", gradient)(model)
    for _ in range(MAX_OVERFLOWS):
        contract.on_pre_optimizer_step(None, None, None, model=model)
    assert not contract.checked
    with pytest.raises(ContractBreach):
        contract.on_pre_optimizer_step(None, None, None, model=model)
    for name, parameter in model.named_parameters():
        parameter.grad = good[name]
    contract.on_pre_optimizer_step(None, None, None, model=model)
    assert contract.checked


def test_the_trainer_keeps_the_contract(build: Build) -> None:
    with pytest.raises(ContractBreach, match="llm trains"):
        build(plan_for("r1-llm-only"), llm=7)
    trainer = build(plan_for("r2-vision-only"))
    trainer.model.model.visual.merger.register_forward_hook(lambda *_: _[-1].detach())
    trainer.model.model.language_model.embed_tokens.register_forward_hook(lambda *_: _[-1].requires_grad_())
    with pytest.raises(ContractBreach, match=r"vision is trained, but .* got no gradient"):
        trainer.train()


# The rehearsal.


def test_a_rehearsed_training_is_the_same_bit_for_bit(build: Build) -> None:
    """r1 draws random numbers, for its dropout."""
    ends, passes = [], [0, 0]
    for index, rehearsed in enumerate((True, False)):
        trainer = build(plan_for("r1-llm-only", micro_batch=2))
        if not rehearsed:
            trainer.remove_callback(trainer.rehearsal)

        def count(*_: Any, index: int = index) -> None:
            passes[index] += 1

        trainer.model.register_forward_pre_hook(count)
        trainer.train()
        ends.append((weights(trainer), log_of(trainer)))
    assert passes == [4 * 2 + 2, 4 * 2]
    assert all(torch.equal(ends[0][0][name], tensor) for name, tensor in ends[1][0].items())
    assert ends[0][1] == ends[1][1]


def test_the_rehearsal_takes_the_largest_samples_with_states_and_gradients_there(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is at its peak then."""
    seen: list[tuple[int, bool, bool]] = []
    trainer = build(plan_for("r2-vision-only", micro_batch=2))
    step = trainer.training_step

    def training_step(model: Any, inputs: Any, count: Any) -> Any:
        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        has_gradients = all(parameter.grad is not None for parameter in trained)
        seen.append((int(inputs["attention_mask"].sum()), bool(trainer.optimizer.state), has_gradients))
        return step(model, inputs, count)

    monkeypatch.setattr(trainer, "training_step", training_step)
    trainer.train()
    largest = sum(sorted(trainer.data_collator.lengths)[-2:])
    # Step 1 has two micro-batches; the rehearsal follows, and step 2 begins without gradients.
    assert seen[2:4] == [(largest, True, False), (largest, True, True)]
    assert not seen[4][2]
    assert trainer.peak_bytes()[0] > 0


def test_the_largest_samples_go_before_the_untrained_model_is_validated(build: Build, tmp_path: Path) -> None:
    """Which may take minutes, on each rung of the ladder."""
    plan = replace(plan_for("r1-llm-only"), validation=validation(every_steps=9, samples=1, score_samples=0))
    seen: list[str] = []
    trainer = build(plan)
    step = trainer.training_step

    def training_step(*args: Any) -> torch.Tensor:
        seen.append("step")
        return step(*args)

    def validate(_: RecipeTrainer) -> dict[str, float]:
        seen.append("validation")
        return {LOSS: 1.0}

    trainer.training_step, trainer.validator = training_step, validate  # type: ignore[method-assign]
    with kept_checkpoints(tmp_path, {}, keep=1) as checkpoints:
        train_to_the_end(trainer, checkpoints, CheckpointParams())
    assert seen[:2] == ["step", "validation"]
    assert seen[-1] == "validation"
    assert seen.count("validation") == 2


def half_cosine(progress: float) -> float:
    return (1.0 + cos(pi * progress)) / 2


SCHEDULES: dict[LrSchedule, tuple[dict[str, float], Callable[[float], float]]] = {
    "constant": ({}, lambda _: 1.0),
    "linear": ({}, lambda progress: 1.0 - progress),
    "cosine": ({}, half_cosine),
    "cosine_with_min_lr": ({"min_lr_ratio": 0.1}, lambda progress: 0.1 + 0.9 * half_cosine(progress)),
    "polynomial": ({"min_lr_ratio": 0.1, "power": 2.0}, lambda progress: 0.1 + 0.9 * (1.0 - progress) ** 2),
    # The last three of the six steps after the warm-up.
    "warmup_stable_decay": (
        {"min_lr_ratio": 0.1, "decay_ratio": 0.3},
        lambda progress: 0.1 + 0.9 * half_cosine(max(0.0, 2.0 * progress - 1.0)),
    ),
}
"""The options of a schedule, and the share of the rate after a share of the steps that follow the warm-up."""


@pytest.mark.parametrize("lr_schedule", get_args(LrSchedule))
def test_every_step_has_the_rate_of_its_schedule(lr_schedule: LrSchedule, tmp_path: Path) -> None:
    (options, share), rates = SCHEDULES[lr_schedule], {"vision": 2.0, "llm": 0.5}
    plan = changed(
        plan_for("r4-joint"),
        lr_schedule=lr_schedule,
        lr_schedule_options=ScheduleOptions(**options),
        num_steps=10,
        warmup_steps=4,
        learning_rates=rates,
    )
    arguments = training_arguments(plan, str(tmp_path))
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates.values()]
    optimizer = torch.optim.SGD(groups, lr=arguments.learning_rate)
    scheduler = get_scheduler(
        *(arguments.lr_scheduler_type, optimizer, arguments.get_warmup_steps(10), 10, arguments.lr_scheduler_kwargs)
    )
    taken = []
    for _ in range(10):
        taken += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    first = options["min_lr_ratio"] if lr_schedule == "warmup_stable_decay" else 0.0  # of the warm-up
    shares = [first + (1 - first) * step / 4 if step < 4 else share((step - 4) / 6) for step in range(10)]
    assert taken == pytest.approx([rate * each for each in shares for rate in rates.values()])


def test_muon_trains_the_matrices_of_hidden_layers_and_adamw_the_rest(build: Build) -> None:
    parts = PartsParams(vision="full", projector="full", llm="full")
    trainer = build(plan_for("r2-vision-only", parts=parts, optimizer="muon", weight_decay=0.1))
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, MuonWithAdamW)
    of: dict[type, set[str]] = {
        type(part): {names[id(weight)] for group in part.param_groups for weight in group["params"]}
        for part in optimizer.parts.values()
    }
    assert of[Muon] | of[AdamW] == {*names.values()}
    matrices = {name for name in of[AdamW] if trainer.model.get_parameter(name).dim() == 2}
    assert matrices == {"model.language_model.embed_tokens.weight", "lm_head.weight"}
    assert {trainer.model.get_parameter(name).dim() for name in of[Muon]} == {2}
    before = weights(trainer)
    trainer.train()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_lion_has_its_own_second_beta(build: Build) -> None:
    for name, betas in (("lion_32bit", (0.9, 0.99)), ("adamw_torch", (0.9, 0.999))):
        optimizer = build(plan_for("r1-llm-only", optimizer=name)).create_optimizer()
        assert {tuple(group["betas"]) for group in optimizer.param_groups} == {betas}
