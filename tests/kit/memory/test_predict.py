"""A prediction is that of the whole model, adds up, and says what each placement does to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig

from stages.core.params.schema import DeviceParams
from stages.kit.memory.calibration import Calibration, load_calibration
from stages.kit.memory.predict import Depth, depth_of, predict, sample_depths, with_depth
from stages.kit.memory.step import pretended_processes, record_step
from stages.kit.models.load import meta_model
from stages.kit.models.processors import Processor
from stages.kit.planning.plan import Plan
from stages.kit.planning.prediction import Prediction
from stages.kit.training.peak import cpu_peak
from tests.kit.memory.small import FULL, R1, R2, R4, batch_of, config_of, peak_bytes, plan_of

CUDA: dict[str, Any] = {"kind": "cuda", "precision": "bf16"}
MIB = 2**20


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return load_calibration()


@pytest.fixture
def text(processors: Mapping[str, Processor], calibration: Calibration) -> Any:
    """Predicts a plan for the text model of two layers."""

    def prediction(plan: Plan) -> Prediction:
        config = config_of("text")
        return predict(plan, config, processors["text"], batch_of(plan, config), calibration)

    return prediction


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("detection", {**R1, "grad_accumulation": 1}),
        ("detection", {**R2, "grad_accumulation": 1}),
        ("detection", {**R4, **CUDA, "grad_accumulation": 1}),
        ("text", {**FULL, "gradient_checkpointing": True}),
        ("moe", {**FULL, "precision": "bf16"}),
    ],
    ids=["r1", "r2", "r4 on cuda", "text", "moe"],
)
def test_a_few_layers_say_what_all_of_them_take(
    model: str, settings: dict[str, Any], processors: Mapping[str, Processor], calibration: Calibration
) -> None:
    plan, config = plan_of(**settings), config_of(model, (6, 5))
    batch = batch_of(plan, config)
    scaled_up = predict(plan, config, processors[model], batch, calibration)
    exact = predict(plan, config, processors[model], batch, calibration, exact=True)
    assert scaled_up.allocated_bytes == pytest.approx(exact.allocated_bytes, rel=0.001)
    assert scaled_up.phases == pytest.approx(exact.phases, rel=0.001)
    assert (scaled_up.peak_phase, scaled_up.budget.keys()) == (exact.peak_phase, exact.budget.keys())
    # Gaps are no matter of layers, and the larger, the smaller a model is.
    assert scaled_up.total_bytes == pytest.approx(exact.total_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("model", "depth", "expected"),
    [
        ("text", (28, 0), [(2, 0), (3, 0)]),
        ("text", (3, 0), [(2, 0), (3, 0)]),
        ("text", (2, 0), [(2, 0)]),
        ("text", (1, 0), [(1, 0)]),
        ("moe", (24, 0), [(2, 0), (3, 0)]),
        ("detection", (28, 32), [(2, 2), (3, 2), (2, 3)]),
        ("detection", (2, 32), [(2, 32)]),
        ("detection", (28, 1), [(28, 1)]),
    ],
)
def test_alike_layers_are_sampled_and_few_ones_are_all_recorded(
    model: str, depth: Depth, expected: list[Depth]
) -> None:
    config = config_of(model, depth)
    assert depth_of(config) == depth
    assert sample_depths(config) == expected


@pytest.mark.parametrize(
    "uneven",
    [
        {"layer_types": ["full_attention", "sliding_attention"] * 3},
        {"mlp_only_layers": [1]},
        {"decoder_sparse_step": 2},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_unlike_layers_are_all_recorded(uneven: dict[str, Any]) -> None:
    config = config_of("moe", (6, 0))
    assert len(sample_depths(config)) == 2
    for name, value in uneven.items():
        setattr(config, name, value)
    assert sample_depths(config) == [(6, 0)]


def test_a_shallower_geometry_is_the_same_otherwise_and_leaves_the_first_alone() -> None:
    config = config_of("detection", (6, 5))
    before = config.to_dict()
    shallow = with_depth(config, (3, 2))
    assert config.to_dict() == before
    assert depth_of(shallow) == (3, 2)
    assert names_of(shallow) < names_of(config)


def names_of(config: PreTrainedConfig) -> set[tuple[str, torch.Size]]:
    return {(name, parameter.shape) for name, parameter in meta_model(config).named_parameters()}


@pytest.mark.parametrize("settings", [R1, FULL, {**FULL, **CUDA}, {**R1, **CUDA, "optimizer": "paged_adamw_8bit"}])
def test_the_budget_adds_up_to_the_total_and_nothing_in_it_is_negative(text: Any, settings: dict[str, Any]) -> None:
    prediction = text(plan_of(**settings))
    assert sum(prediction.budget.values()) == prediction.total_bytes
    assert min(prediction.budget.values()) >= 0
    assert prediction.phases[prediction.peak_phase] == max(prediction.phases.values())


def test_the_budget_names_what_it_is_spent_on(text: Any) -> None:
    """Full training in fp32 on a CPU, by hand: as many gradients as weights, and twice as much optimizer state."""
    trained = sum(parameter.numel() for parameter in meta_model(config_of("text")).parameters()) * 4
    budget = text(plan_of(**FULL)).budget
    assert budget["weights"] == pytest.approx(trained, rel=0.001)
    assert budget["gradients"] == trained
    assert budget["optimizer"] == pytest.approx(2 * trained, rel=0.001)
    assert "adapters" not in budget
    # TRL's loss takes a tile of 16384 logits a token, here in fp32 and several times over.
    assert budget["logits"] >= 2 * 95 * 16384 * 4
    lora = text(plan_of(**R1)).budget
    assert lora["adapters"] == lora["gradients"] == 4 * 2 * 8 * (2 * 128 + 128 + 64)


def test_on_a_gpu_all_micro_batches_of_a_step_are_there_at_once(processors: Mapping[str, Processor]) -> None:
    config = config_of("text")

    def activations(grad_accumulation: int) -> tuple[int, int]:
        plan = plan_of(**FULL, **CUDA, grad_accumulation=grad_accumulation)
        batch = batch_of(plan, config)
        peaks = record_step(plan, config, processors["text"], batch).peaks()
        return peaks["forward"].budget["activations"], sum(tensor.nbytes for tensor in batch.values())

    (two, batch_bytes), (nine, _) = activations(2), activations(9)
    assert nine - two == pytest.approx(7 * batch_bytes, abs=512)


def test_neither_optimizer_nor_batch_is_there_while_weights_load(text: Any) -> None:
    prediction = text(plan_of(**R1))
    assert prediction.phases["load"] == prediction.budget["weights"] + prediction.budget["adapters"]
    assert "optimizer" in prediction.budget


def test_ddp_keeps_its_gradients_twice_and_has_buffers_of_its_own(text: Any, calibration: Calibration) -> None:
    plan = plan_of(**FULL, **CUDA)
    alone = text(plan)
    trainable = {"total": alone.budget["gradients"] // 4}
    shared = text(replace(plan, placement="ddp", device=DeviceParams(kind="cuda", count=2), trainable=trainable))
    assert shared.budget["gradients"] == pytest.approx(2 * alone.budget["gradients"])
    assert shared.total_bytes - alone.total_bytes == pytest.approx(
        calibration.nccl_buffers_mib.num_bytes + alone.budget["gradients"], rel=0.01
    )


@pytest.mark.parametrize("replicated", [True, False])
def test_torchs_ddp_takes_what_its_rule_says(replicated: bool) -> None:
    """A copy of all gradients, and nothing else. The processes are pretended, so the hook answers for them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def answered(bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket)
        return future

    with pretended_processes(2), cpu_peak(model.parameters()) as peak:
        trained: torch.nn.Module = model
        if replicated:
            trained = DistributedDataParallel(model)
            trained.register_comm_hook(None, lambda _, bucket: answered(bucket.buffer()))
        for _ in range(3):
            trained(torch.ones(1, 64)).sum().backward()
            model.zero_grad()
    assert peak.size_bytes == pytest.approx((3 if replicated else 2) * size_bytes, rel=0.05)


def test_expandable_segments_change_what_is_reserved_and_not_what_is_allocated(text: Any) -> None:
    plan = plan_of(**FULL, **CUDA)
    plain, expandable = text(plan), text(replace(plan, expandable_segments=True))
    assert expandable.reserved_bytes != plain.reserved_bytes
    assert expandable.phases == plain.phases


def test_a_paged_optimizer_takes_nothing_of_the_device(text: Any) -> None:
    plan = plan_of(**FULL, **CUDA, optimizer="adamw_8bit")
    paged = text(replace(plan, optimizer="paged_adamw_8bit"))
    assert "optimizer" not in paged.budget
    assert text(plan).total_bytes > paged.total_bytes


def test_a_gpu_holds_a_context_and_workspaces_too_and_a_cpu_nothing(text: Any, calibration: Calibration) -> None:
    on_cpu = text(plan_of(**FULL))
    assert on_cpu.allocated_bytes == on_cpu.reserved_bytes == on_cpu.total_bytes
    on_gpu = text(plan_of(**FULL, **CUDA))
    assert on_gpu.total_bytes - on_gpu.reserved_bytes == calibration.context_mib.num_bytes
    assert on_gpu.allocated_bytes - max(on_gpu.phases.values()) >= 64 * MIB  # two workspaces of Hopper's


def test_the_interval_lies_around_the_total_as_calibrated(text: Any, calibration: Calibration) -> None:
    on_gpu = text(plan_of(**FULL, **CUDA))
    assert on_gpu.low_bytes == round(on_gpu.total_bytes * (1 + calibration.reserved_error_low.value))
    assert on_gpu.high_bytes == round(on_gpu.total_bytes * (1 + calibration.reserved_error_high.value))
    assert on_gpu.low_bytes < on_gpu.total_bytes < on_gpu.high_bytes
    on_cpu = text(plan_of(**FULL))
    assert on_cpu.high_bytes == round(on_cpu.total_bytes * (1 + calibration.allocated_error_high.value))


def test_a_prediction_says_what_its_constants_were_measured_on(
    processors: Mapping[str, Processor], calibration: Calibration
) -> None:
    day = "NVIDIA H200, 2026-12-01"
    errors = ("allocated_error_low", "allocated_error_high", "reserved_error_low", "reserved_error_high")
    measured = replace(
        calibration,
        **{name: replace(getattr(calibration, name), measured=day) for name in ("context_mib", *errors)},
    )
    config = config_of("text")

    def label(plan: Plan) -> str:
        return predict(plan, config, processors["text"], batch_of(plan, config), measured).calibration

    plan = plan_of(**R1, **CUDA)
    assert label(plan) == day
    assert label(replace(plan, placement="ddp", device=DeviceParams(kind="cuda", count=2))) == "assumed"
    assert label(plan_of(**R1)) == "this CPU"


def test_a_second_prediction_in_one_process_is_the_first(text: Any) -> None:
    plan = plan_of(**R1)
    first, on_gpu = text(plan), text(plan_of(**R1, **CUDA))
    assert text(plan) == first
    assert text(plan_of(**R1, **CUDA)) == on_gpu


def test_a_micro_batch_larger_than_the_data_takes_what_the_data_has(processors: Mapping[str, Processor]) -> None:
    """largest_batch then holds all the samples there are."""
    config, one = config_of("text"), plan_of(**R1, micro_batch=1)
    batch = batch_of(one, config)
    schedule = replace(one.schedule, micro_batch=16, train_samples=1)
    record = record_step(replace(one, schedule=schedule), config, processors["text"], batch)
    assert peak_bytes(record) == peak_bytes(record_step(one, config, processors["text"], batch))


def test_the_shortest_samples_are_predicted_too(processors: Mapping[str, Processor]) -> None:
    plan, config = plan_of(**R1, max_length=2, micro_batch=1), config_of("text")
    assert peak_bytes(record_step(plan, config, processors["text"], batch_of(plan, config))) > 0
