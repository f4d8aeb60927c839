"""Layers spread over several GPUs: each GPU has a prediction, and the fullest decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.kit.memory.calibration import load_calibration
from stages.kit.memory.fit import Fit, decide
from stages.kit.memory.predict import predict
from stages.kit.memory.recorder import Recorder
from stages.kit.models.load import balanced_gpus, gpu_of, meta_model
from stages.kit.planning.plan import Plan
from stages.kit.planning.prediction import PHASES
from tests.kit.memory.small import (
    CUDA,
    FULL,
    R1,
    R2,
    R4,
    batch_of,
    config_of,
    plan_of,
    predicted,
    processor_of,
)

CHECKPOINTED = {"gradient_checkpointing": True}
SETTINGS: dict[str, tuple[str, dict[str, Any], int]] = {
    "r1, nf4": ("detection", {**R1, **CHECKPOINTED, "quantization": "nf4"}, 2),
    "r4, over 3": ("detection", R4, 3),
    "text full": ("text", FULL, 2),
    "moe full": ("moe", FULL, 2),
}
DEPTH = (4, 2)
FEW_BYTES = 2 * 96 * 8 * 4
"""A router's logits for the tokens of a batch; results of its layers are larger."""


def spread(plan: Plan, count: int = 2) -> Plan:
    return replace(plan, placement="balanced", device=DeviceParams(kind="cuda", count=count))


@pytest.mark.parametrize("name", SETTINGS)
def test_what_lasts_is_on_one_gpu_each_and_no_operation_takes_from_two(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But those on a few numbers, as of masks and of a mixture's balance."""
    model, settings, count = SETTINGS[name]
    plan = plan_of(**settings, **CUDA)
    alone = predicted(model, plan, depth=DEPTH, exact=True)
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
    config = config_of(model, DEPTH)
    batch = batch_of(plan, config)
    gpus = predict(spread(plan, count), config, processor_of(model), batch, load_calibration()).gpus
    assert seen == set(range(count))
    assert not torn
    assert len(gpus) == count
    assert sum(gpu.phases["load"] for gpu in gpus) == alone.phases["load"]
    for entry in ("weights", "adapters", "optimizer"):
        assert sum(gpu.budget.get(entry, 0) for gpu in gpus) == alone.budget.get(entry, 0), entry
    # They are not at their fullest at once, and what crosses over is there twice.
    for phase in PHASES:
        assert sum(gpu.phases[phase] for gpu in gpus) >= alone.phases[phase], phase
        assert max(gpu.phases[phase] for gpu in gpus) <= alone.phases[phase], phase


def test_each_gpu_holds_the_weights_that_the_map_gives_it() -> None:
    """And what an optimizer without a fused step takes for all trained weights at once, for its own."""
    alone, config = plan_of(**FULL, **CUDA, optimizer="adamw_torch"), config_of("text", DEPTH)
    plan, step_bytes = spread(alone), predicted("text", alone, depth=DEPTH, exact=True).phases["step"]
    gpus = balanced_gpus(plan, config)
    assert gpus is not None
    held = [0, 0]
    for name, parameter in meta_model(config).named_parameters():
        held[gpu_of(name, gpus) or 0] += parameter.numel() * 4
    for expected, found in zip(held, predicted("text", plan, depth=DEPTH).gpus, strict=True):
        assert found.budget["weights"] == pytest.approx(expected, rel=0.002)  # the rotary embedding's buffer
        assert found.budget["optimizer"] == pytest.approx(2 * expected, rel=0.005)
        assert found.phases["step"] == pytest.approx(step_bytes * expected / sum(held), rel=0.01)


def test_the_fullest_gpu_decides() -> None:
    """Here the one with the vision tower, trained in full. Shared out evenly the plan would fit."""
    calibration = load_calibration()
    calibration = replace(  # or a small model's GPUs would be filled by the same on each
        calibration,
        context_mib=replace(calibration.context_mib, value=0.1),
        cublas_workspaces_mib=replace(calibration.cublas_workspaces_mib, value=0.2),
    )
    plan, config = spread(plan_of(**R2, **CUDA)), config_of("detection", DEPTH)
    prediction = predict(plan, config, processor_of("detection"), batch_of(plan, config), calibration)
    fullest, other = sorted(prediction.gpus, key=lambda gpu: -gpu.total_bytes)
    assert prediction.gpus[prediction.fullest_gpu] == fullest == replace(prediction, gpus=())
    capacity = fullest.low_bytes - 1
    assert (fullest.high_bytes + other.high_bytes) / 2 <= capacity
    fit = Fit(plan=plan, prediction=prediction, capacity_bytes=capacity)
    assert fit.verdict == "does not fit"
    assert sorted(gpu.verdict(capacity) for gpu in prediction.gpus) == ["does not fit", "fits"]
    with pytest.raises(UserError, match=rf"does not fit GPU {prediction.fullest_gpu} of profile tiny"):
        decide(fit, lambda _: prediction, "refuse")
