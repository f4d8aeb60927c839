"""Whether a run fits, before it is launched: its step recorded without weights, at small depths, and scaled up.

The layers of a model are alike, so what they take grows by the same amount with each: two or three records of a few
layers say what all of them take. `exact` records them all, and so does placement balanced: which GPU has which layers
depends on how many there are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedConfig

from stages.core.params.schema import DeviceParams
from stages.kit.memory.allocator import Allocation, Event, Free, replay
from stages.kit.memory.answers import record_answers
from stages.kit.memory.calibration import Calibration
from stages.kit.memory.recording import Peak, Recording
from stages.kit.memory.side_by_side import side_by_side
from stages.kit.memory.step import record_step
from stages.kit.models.placement import balanced_gpus
from stages.kit.models.processors import Processor
from stages.kit.planning.plan import DATA_PARALLEL, Plan
from stages.kit.planning.prediction import BUDGET, PHASES, Budget, Phase, Prediction

SHALLOW = 2
"""Layers of the smallest model recorded: the first and the last one are not quite as the others."""

Depth: TypeAlias = tuple[int, int]
"""Layers of the language model, and of the vision tower (0 where there is none)."""


@dataclass(frozen=True)
class Peaks:
    """Of one recorded step, or of a deeper model's, scaled up."""

    phases: dict[Phase, Peak]
    allocated_share: float
    """What torch's allocator hands out in its fullest moment, relative to what is asked of it: 1 on a CPU."""
    reserved_share: float
    """What it takes from the device for that, likewise."""

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: self.phases[phase].size_bytes)


def predict(
    plan: Plan,
    config: PreTrainedConfig,
    processor: Processor,
    batch: Mapping[str, torch.Tensor],
    calibration: Calibration,
    *,
    exact: bool = False,
) -> Prediction:
    """What the plan's step takes on the fullest of its devices.

    batch: the largest micro-batch of the run, as the collator makes it. exact: record every layer.
    """
    if (gpus := balanced_gpus(plan, config)) is not None:
        recording = record_step(plan, config, processor, batch, gpus=gpus)
        return _of_the_fullest(plan, recording, calibration)
    depth = depth_of(config)
    depths = [depth] if exact else sample_depths(config)

    def peaks_of(depth: Depth) -> Peaks:
        recording = record_step(plan, with_depth(config, depth), processor, batch)
        return _peaks(recording, expandable=plan.expandable_segments)

    recorded = dict(zip(depths, side_by_side([partial(peaks_of, each) for each in depths]), strict=True))
    peaks = recorded[depth] if depth in recorded else _scaled_up(recorded, depth)
    return _on_a_device(_shared(plan, peaks), plan.device, calibration, placement=plan.placement)


def predict_answers(
    plan: Plan,
    config: PreTrainedConfig,
    batch: Mapping[str, torch.Tensor],
    calibration: Calibration,
    *,
    max_new_tokens: int,
) -> Prediction:
    """What evaluating the plan's merged model takes, on the one device that it uses.

    batch: the longest prompts of an evaluation's batch.
    """
    recording = record_answers(
        config,
        batch,
        precision=plan.precision,
        flash_only=plan.attn == "flash_attention_2",
        on_cuda=plan.device.kind == "cuda",
        max_new_tokens=max_new_tokens,
    )
    return _on_a_device(_peaks(recording), plan.device, calibration, placement="single")


def depth_of(config: PreTrainedConfig) -> Depth:
    vision = getattr(config, "vision_config", None)
    return config.get_text_config().num_hidden_layers, vision.depth if vision is not None else 0


def with_depth(config: PreTrainedConfig, depth: Depth) -> PreTrainedConfig:
    """The same geometry with so many layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = depth[0]
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: depth[0]]
    if depth[1]:
        config.vision_config.depth = depth[1]
    return config


def sample_depths(config: PreTrainedConfig) -> list[Depth]:
    """A shallow model, and one layer more of each kind; the model itself where its layers differ or are few."""
    text, vision = depth_of(config)
    settings = config.get_text_config()
    uneven = (
        len(set(getattr(settings, "layer_types", None) or [0])) > 1
        or getattr(settings, "mlp_only_layers", None)
        or getattr(settings, "decoder_sparse_step", 1) != 1  # experts in every so many layers only
    )
    if uneven or text <= SHALLOW or 0 < vision <= SHALLOW:
        return [(text, vision)]
    if not vision:
        return [(SHALLOW, 0), (SHALLOW + 1, 0)]
    return [(SHALLOW, SHALLOW), (SHALLOW + 1, SHALLOW), (SHALLOW, SHALLOW + 1)]


def _peaks(recording: Recording, *, expandable: bool = False) -> Peaks:
    phases = recording.peaks()
    if not recording.rounded or not recording.storages:
        return Peaks(phases, 1.0, 1.0)
    replayed = replay(_events(recording), expandable=expandable)
    asked = max(peak.size_bytes for peak in phases.values())
    return Peaks(phases, replayed.allocated_bytes / asked, replayed.reserved_bytes / asked)


def _events(recording: Recording) -> Iterable[Event]:
    keys = {id(storage): key for key, storage in enumerate(recording.storages)}
    for _, born, storage in recording.timeline():
        key = keys[id(storage)]
        if storage.size_bytes:
            yield Allocation(key, storage.size_bytes) if born else Free(key)


def _scaled_up(recorded: Mapping[Depth, Peaks], depth: Depth) -> Peaks:
    (base_depth, base), *deeper = recorded.items()

    def scaled(amount: Any) -> int:
        """amount: a number of one record; the same number of the whole model."""
        start = amount(base)
        return start + sum(
            (amount(more) - start) * (layers - few)
            for (more_depth, more) in deeper
            for layers, few, many in zip(depth, base_depth, more_depth, strict=True)
            if many > few
        )

    phases: dict[Phase, Peak] = {}
    for phase in PHASES:
        budget: dict[Budget, int] = {
            entry: max(0, scaled(lambda peaks, entry=entry, phase=phase: peaks.phases[phase].budget.get(entry, 0)))
            for entry in BUDGET
        }
        phases[phase] = Peak(sum(budget.values()), budget)
    # What the allocator keeps in gaps does not grow by layers, but stays about the same share: 5 to 9 % in the records
    # of a 7B with a few layers, 4 to 8 % with all.
    shares = [(peaks.allocated_share, peaks.reserved_share) for peaks in recorded.values()]
    return Peaks(phases, *map(mean, zip(*shares, strict=True)))


def _of_the_fullest(plan: Plan, recording: Recording, calibration: Calibration) -> Prediction:
    """With that of each GPU, from the record of all layers."""
    gpus = tuple(
        _on_a_device(
            _shared(plan, _peaks(recording.on(gpu), expandable=plan.expandable_segments)),
            plan.device,
            calibration,
            placement=plan.placement,
        )
        for gpu in range(plan.device.count)
    )
    return replace(max(gpus, key=lambda gpu: gpu.total_bytes), gpus=gpus)


def _on_a_device(peaks: Peaks, device: DeviceParams, calibration: Calibration, *, placement: str) -> Prediction:
    """The peaks of tensors, and all else that the process holds on the device."""
    several = placement in DATA_PARALLEL
    peak = peaks.phases[peaks.fullest]
    allocated = round(peak.size_bytes * peaks.allocated_share)
    reserved = round(peak.size_bytes * peaks.reserved_share)
    total = reserved
    low, high = calibration.allocated_error_low.value, calibration.allocated_error_high.value
    label = "this CPU"
    if device.kind == "cuda":
        workspaces = round(calibration.cublas_workspaces.value) * calibration.cublas_workspace_hopper_mib.num_bytes
        allocated += workspaces
        reserved += workspaces
        total = reserved + calibration.context_mib.num_bytes
        total += calibration.nccl_buffers_mib.num_bytes if several else 0
        low, high = calibration.reserved_error_low.value, calibration.reserved_error_high.value
        label = calibration.ddp_label if several else calibration.label
    budget = {entry: size for entry, size in peak.budget.items() if size}
    budget["overhead"] = total - peak.size_bytes
    # Layers are gathered and gradients shared out on streams of their own, and what one stream has freed torch's
    # allocator gives to no other. The record has one stream for all: at worst they take that much once more.
    beside = 0
    if device.kind == "cuda" and placement == "sharded":
        beside = max(peak.budget.get("temporaries", 0) for peak in peaks.phases.values())
    return Prediction(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        total_bytes=total,
        low_bytes=round(total * (1 + low)),
        high_bytes=round(total * (1 + high)) + beside,
        peak_phase=peaks.fullest,
        phases={phase: peak.size_bytes for phase, peak in peaks.phases.items()},
        budget=budget,
        calibration=label,
    )


def _shared(plan: Plan, peaks: Peaks) -> Peaks:
    return replace(peaks, phases={phase: _share(plan, phase, peak) for phase, peak in peaks.phases.items()})


def _share(plan: Plan, phase: Phase, peak: Peak) -> Peak:
    """What one device holds of a phase's peak."""
    budget = dict(peak.budget)
    if phase == "load":  # neither the optimizer nor the batch is there yet
        budget = {entry: size for entry, size in budget.items() if entry in ("weights", "adapters")}
    if plan.optimizer.startswith("paged"):  # its state lies in the host's memory
        budget.pop("optimizer", None)
    if plan.placement == "ddp" and phase != "load":
        # DistributedDataParallel keeps a second copy of all gradients, in the buckets that it sends (torch's default,
        # and accelerate's: gradient_as_bucket_view=False). The rest is the whole model, as in a process on its own.
        budget["gradients"] = budget.get("gradients", 0) + plan.trainable.get("total", 0) * 4
    return Peak(sum(budget.values()), budget)
