"""Of a model whose layers are spread over several GPUs, each is predicted for itself, and the fullest decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.kit.memory.calibration import Calibration, load_calibration
from stages.kit.memory.fit import decide, fit_of
from stages.kit.memory.predict import predict
from stages.kit.memory.recorder import Recorder
from stages.kit.memory.recording import Storage
from stages.kit.memory.spread import _copied
from stages.kit.memory.step import record_step
from stages.kit.models.load import meta_model
from stages.kit.models.placement import balanced_gpus, gpu_of
from stages.kit.models.processors import Processor
from stages.kit.planning.plan import Plan
from stages.kit.planning.prediction import PHASES, Prediction
from tests.kit.memory.small import ALL, FULL, R1, R2, R4, batch_of, config_of, plan_of

CUDA: dict[str, Any] = {"kind": "cuda", "precision": "bf16"}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "r1": ("detection", R1),
    "r1, checkpointed": ("detection", {**R1, "gradient_checkpointing": True}),
    "r1, nf4": ("detection", {**R1, "quantization": "nf4", "gradient_checkpointing": True}),
    "r2": ("detection", R2),
    "r4": ("detection", R4),
    "all of it": ("detection", {**ALL, "gradient_checkpointing": True}),
    "text full": ("text", FULL),
    "text full, fused": ("text", {**FULL, "optimizer": "adamw_torch_fused"}),
    "moe full": ("moe", FULL),
}
DEPTH = (4, 2)
FEW_BYTES = 2 * 96 * 8 * 4
"""Of a router's logits, for the tokens of a batch. What its layers compute is larger."""


def spread(plan: Plan, count: int = 2) -> Plan:
    return replace(plan, placement="balanced", device=DeviceParams(kind="cuda", count=count))


@pytest.fixture
def predicted(processors: Mapping[str, Processor]) -> Any:
    def prediction(model: str, plan: Plan, calibration: Calibration | None = None) -> Prediction:
        config, calibration = config_of(model, DEPTH), calibration or load_calibration()
        return predict(plan, config, processors[model], batch_of(plan, config), calibration, exact=True)

    return prediction


@pytest.mark.parametrize(("name", "count"), [*((name, 2) for name in SETTINGS), ("r4", 3)])
def test_what_lasts_is_on_one_gpu_each_and_together_as_on_a_single_one(name: str, count: int, predicted: Any) -> None:
    model, settings = SETTINGS[name]
    plan = plan_of(**settings, **CUDA)
    alone, over_several = predicted(model, plan), predicted(model, spread(plan, count)).gpus
    assert len(over_several) == count
    assert sum(gpu.phases["load"] for gpu in over_several) == alone.phases["load"]
    for entry in ("weights", "adapters", "optimizer"):
        assert sum(gpu.budget.get(entry, 0) for gpu in over_several) == alone.budget.get(entry, 0), entry
    # They are not at their fullest at once, and what crosses over is there twice.
    for phase in PHASES:
        assert sum(gpu.phases[phase] for gpu in over_several) >= alone.phases[phase], phase
        assert max(gpu.phases[phase] for gpu in over_several) <= alone.phases[phase], phase


def test_each_gpu_holds_the_weights_that_the_map_gives_it(predicted: Any) -> None:
    """And what an optimizer without a fused step takes for all trained weights at once, for its own."""
    alone, config = plan_of(**FULL, **CUDA, optimizer="adamw_torch"), config_of("text", DEPTH)
    plan, step_bytes = spread(alone), predicted("text", alone).phases["step"]
    gpus = balanced_gpus(plan, config)
    assert gpus is not None
    held = [0, 0]
    for name, parameter in meta_model(config).named_parameters():
        held[gpu_of(name, gpus) or 0] += parameter.numel() * 4
    for expected, found in zip(held, predicted("text", plan).gpus, strict=True):
        assert found.budget["weights"] == pytest.approx(expected, rel=0.002)  # the rotary embedding's buffer
        assert found.budget["optimizer"] == pytest.approx(2 * expected, rel=0.005)
        assert found.phases["step"] == pytest.approx(step_bytes * expected / sum(held), rel=0.01)


@pytest.mark.parametrize("name", SETTINGS)
def test_no_operation_takes_from_two_gpus(
    name: str, processors: Mapping[str, Processor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But those on a few numbers, as of masks and of a mixture's balance."""
    model, settings = SETTINGS[name]
    plan, config = spread(plan_of(**settings, **CUDA)), config_of(model, DEPTH)
    runs_on, torn = Recorder._runs_on, []
    seen: set[int] = set()

    def watched(recorder: Recorder, tensors: list[torch.Tensor]) -> int:
        if recorder._pinned is None and recorder._phase in ("forward", "backward"):
            sizes: dict[int, int] = {}
            for tensor in tensors:
                gpu = recorder.gpu_of(tensor)
                sizes[gpu] = max(sizes.get(gpu, 0), tensor.untyped_storage().nbytes())
            seen.update(sizes)
            if len(sizes) > 1 and sorted(sizes.values())[-2] > FEW_BYTES:
                torn.append([tensor.shape for tensor in tensors])
        return runs_on(recorder, tensors)

    monkeypatch.setattr(Recorder, "_runs_on", watched)
    record_step(plan, config, processors[model], batch_of(plan, config), gpus=balanced_gpus(plan, config))
    assert seen == {0, 1}
    assert not torn


def test_what_is_computed_lies_where_its_layer_does(processors: Mapping[str, Processor]) -> None:
    """Logits with the head; a picture's activations with the vision tower; what crosses over on both sides."""
    plan, config = spread(plan_of(**R4, **CUDA)), config_of("detection", DEPTH)
    text, head = "model.language_model", {"lm_head": 1}
    layers = {f"{text}.layers.{layer}": layer // 2 for layer in range(4)}
    there = {f"{text}.embed_tokens": 0, f"{text}.norm": 1, f"{text}.rotary_emb": 1, "model.visual": 0}

    def recorded(gpus: dict[str, int]) -> list[Storage]:
        return record_step(plan, config, processors["detection"], batch_of(plan, config), gpus=gpus).storages

    def gpus_of(storages: list[Storage], budget: str) -> set[int]:
        return {storage.gpu for storage in storages if storage.budget == budget}

    one = recorded({"": 0})
    several = recorded({**layers, **head, **there})
    assert gpus_of(one, "activations") == gpus_of(one, "logits") == {0}
    assert gpus_of(several, "activations") == gpus_of(several, "gradients") == {0, 1}
    assert gpus_of(several, "logits") == {1}
    assert gpus_of(recorded({**layers, **there, "lm_head": 0}), "logits") == {0}
    # Where the vision tower lies matters to nobody but its GPU.
    moved = recorded({**layers, **head, **there, "model.visual": 1})
    sizes = [sum(each.size_bytes for each in storages if each.gpu == 1) for storages in (several, moved)]
    assert sizes[0] < sizes[1]
    crossing = len(several) - len(one)
    assert 0 < crossing < 100
    assert sum(each.size_bytes for each in several) > sum(each.size_bytes for each in one)


def test_a_gradient_goes_back_to_where_its_tensor_was_copied_from() -> None:
    recorder = Recorder(fake=True, cuda=True, vocab_size=1024, spread=True)
    with recorder:
        tensor = torch.empty(8, 8, requires_grad=True)
        recorder.place(tensor, 1)
        copy = _copied(tensor, recorder=recorder, gpu=0)
        (copy * 2).sum().backward()
        assert tensor.grad is not None
        assert [recorder.gpu_of(each) for each in (copy, tensor.grad)] == [0, 1]
        assert _copied(tensor, recorder=recorder, gpu=1) is tensor


def test_spread_over_one_gpu_it_is_what_it_is_on_one(processors: Mapping[str, Processor]) -> None:
    plan, config = plan_of(**R4, **CUDA), config_of("detection", DEPTH)
    batch = batch_of(plan, config)
    spread_over_one = record_step(plan, config, processors["detection"], batch, gpus={"": 0})
    assert spread_over_one.on(0).peaks() == record_step(plan, config, processors["detection"], batch).peaks()
    assert not spread_over_one.on(1).storages


def test_the_fullest_gpu_decides(predicted: Any) -> None:
    """Where the vision tower is trained in full, the GPU that has it. Shared out evenly the plan would fit."""
    calibration = load_calibration()
    calibration = replace(  # or a small model's GPUs would be filled by the same on each
        calibration,
        context_mib=replace(calibration.context_mib, value=0.1),
        cublas_workspace_hopper_mib=replace(calibration.cublas_workspace_hopper_mib, value=0.1),
    )
    plan = spread(plan_of(**R2, **CUDA))
    prediction = predicted("detection", plan, calibration)
    fullest, other = sorted(prediction.gpus, key=lambda gpu: -gpu.total_bytes)
    assert prediction.gpus[prediction.fullest_gpu] == fullest == replace(prediction, gpus=())
    capacity = fullest.low_bytes - 1
    assert (fullest.high_bytes + other.high_bytes) / 2 <= capacity
    fit = fit_of(plan, lambda _: prediction, capacity)
    assert fit.verdict == "does not fit"
    assert sorted(str(gpu.verdict) for gpu in fit.gpus) == ["does not fit", "fits"]
    with pytest.raises(UserError, match=rf"does not fit GPU {prediction.fullest_gpu} of profile tiny"):
        decide(fit, lambda _: prediction, "refuse")


def test_a_gpu_that_the_map_leaves_empty_has_its_context_and_no_more(predicted: Any) -> None:
    """Four layers over eight GPUs."""
    prediction = predicted("text", spread(plan_of(**R1, **CUDA), 8))
    empty = [gpu for gpu in prediction.gpus if not gpu.phases["load"]]
    assert empty
    for gpu in empty:
        assert set(gpu.budget) == {"overhead"}
        assert set(gpu.phases) == set(PHASES)
        assert gpu.total_bytes >= load_calibration().context_mib.num_bytes
