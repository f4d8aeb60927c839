"""Predicts a run's memory before launch: its step is recorded without weights, at small depths, and scaled up.

The layers of a model are alike, so each adds the same amount: two or three records of a few layers give the memory of
all of them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from stages.core.families import family_of
from stages.core.params.schema import OPTIMIZERS, DeviceParams, MemoryParams
from stages.data.conversation import Conversation
from stages.memory.calibration import load_calibration
from stages.memory.fakes import fake_batch
from stages.memory.recorder import Peak, Recording
from stages.memory.step import from_features, record_generation, record_step
from stages.models.adapters import apply_recipe, count_trainable
from stages.models.forward import require_own_loss
from stages.models.load import meta_model
from stages.models.prompts import Processor, count_tokens
from stages.planning.cards import named_card, usable_bytes
from stages.planning.ladder import prefill_batch_size
from stages.planning.memory_use import free_and_total_bytes
from stages.planning.plan import Plan
from stages.planning.prediction import BUDGET, PHASES, Phase, Prediction
from stages.planning.resolve import with_speedups
from stages.training.batches import FEATURES, packed

CPU_ERRORS = (-0.03, 0.05)
"""Bounds of the error of a CPU's peak, relative to the prediction. Assumed: tests find 0.002."""
SHALLOW = 2
"""Layers of the smallest recorded model: the first and the last layer differ a little from the others."""

Number = TypeVar("Number", int, float)
BatchOf: TypeAlias = Callable[..., Mapping[str, torch.Tensor]]
"""batch_of(micro_batch=2) is the largest batch of that many samples, padded."""
Depth: TypeAlias = tuple[int, int]
"""Layers of the language model, and of the vision tower (0 without one)."""


@dataclass(frozen=True, kw_only=True)
class MemoryPredictor:
    """Predictions for a recipe's plan and for the plans down its ladder, each made once."""

    config: PreTrainedConfig
    processor: Processor
    batch_of: BatchOf
    guard: Sequence[Conversation] = ()
    """Conversations that an evaluation reads one by one, without generating anything."""
    likelihoods: bool = False
    """Whether an evaluation computes likelihoods of answers, of guards or for its score."""
    made: dict[str, Prediction] = field(default_factory=dict)
    """Predictions by plan, which recipes that differ in name only may share, and GPUs that differ in memory only."""

    def __call__(self, plan: Plan) -> Prediction:
        key = repr(replace(plan, name="", device=replace(plan.device, memory_gb=None)))
        if key not in self.made:
            with warnings.catch_warnings(action="ignore"):  # bitsandbytes': this CPU cannot run what is only recorded
                batch = self.batch_of(micro_batch=plan.memory.micro_batch)
                batch = packed(batch, self.config, plan.recipe.loss) if plan.padding_free else batch
                self.made[key] = predict(plan, self.config, self.processor, batch)
        return self.made[key]

    def generation(self, plan: Plan, batch_size: int, *, max_new_tokens: int) -> Prediction:
        """Memory of evaluating what the plan trains; training's longest samples bound its prompts."""
        batch = self.batch_of(micro_batch=prefill_batch_size(batch_size))
        longest = max((count_tokens(self.processor, row) for row in self.guard), default=0)
        if longest > batch["input_ids"].numel():
            batch = fake_batch(self.config, micro_batch=1, max_length=longest, max_pixels=None)
        prompts = {name: tensor for name, tensor in batch.items() if name != "labels"}
        alone = replace(plan.with_memory(placement="single"), device=plan.device.one())
        limits: Any = {"batch_size": batch_size, "max_new_tokens": max_new_tokens, "likelihoods": self.likelihoods}
        return predict_generation(alone, self.config, prompts, **limits)

    def completed(self, plan: Plan, memory: MemoryParams) -> tuple[Plan, tuple[str, ...]]:
        """The plan with what follows from the base's geometry: trainable parameters, disk for features, and what makes
        it faster; and a line on each choice. Raises UserError if TRL's loss is not the model's own."""
        model = meta_model(self.config)
        require_own_loss(model)
        plan = replace(plan, trainable=count_trainable(apply_recipe(model, plan.recipe)))
        return with_speedups(self.with_features(plan, memory.features_gb), memory, self.config)

    def with_features(self, plan: Plan, limit_gb: float) -> Plan:
        """The plan, with features of images kept on disk if vision tower and projector are frozen.

        limit_gb: of their size. Not if the tower is sharded: its processes would compute each image together.
        """
        vision = family_of(self.config.model_type).vision
        frozen = not {"vision", "projector"} & {*plan.recipe.parts.trained()}
        if vision is None or not vision.same_from_features or not frozen or plan.is_sharded:
            return plan
        longest = self.batch_of(micro_batch=1)
        if "pixel_values" not in longest:
            return plan
        features = from_features(longest, self.config, plan.memory.precision)[FEATURES]
        size_bytes = plan.schedule.train_samples * features.nbytes
        return replace(plan, features_bytes=size_bytes if size_bytes <= limit_gb * 1e9 else 0)


@dataclass(frozen=True)
class Peaks:
    """Peaks of one device in a recorded step, or in that of a deeper model, scaled up."""

    phases: dict[Phase, Peak]
    allocated_share: float
    """Peak of what torch's allocator hands out, relative to what is requested of it: 1 on a CPU."""
    gap_bytes: float
    """Bytes that it takes from the device beyond that."""
    flops: float = 0.0
    operators: float = 0.0


def predict(
    plan: Plan, config: PreTrainedConfig, processor: Processor, batch: Mapping[str, torch.Tensor]
) -> Prediction:
    """Memory of training. batch: the largest micro-batch of the data, or one without contents."""
    recorded = {}
    for few in sample_depths(config):
        recording = record_step(plan, with_depth(config, few), processor, batch)
        allocator = _replayed(recording, expandable=plan.memory.expandable_segments)
        work = (amount / plan.rehearsed_micro_batches for amount in (recording.flops, recording.operators))
        recorded[few] = Peaks(recording.peaks(), *allocator, *work)
    peaks = _scaled_up(recorded, depth_of(config))
    on_one = {phase: _on_one_device(plan, phase, peak) for phase, peak in peaks.phases.items()}
    return _prediction(replace(peaks, phases=on_one), plan, extra_bytes=_extra_bytes(plan, peaks.phases))


def predict_generation(
    plan: Plan, config: PreTrainedConfig, batch: Mapping[str, torch.Tensor], **limits: Any
) -> Prediction:
    """Memory of generation. The arguments are those of `record_generation`."""
    recording = record_generation(plan, config, batch, **limits)
    phases = recording.peaks()
    phases["load"] = _loaded(phases["load"])
    return _prediction(Peaks(phases, *_replayed(recording, expandable=False)), plan)


def capacity_bytes(device: DeviceParams) -> int | None:
    """Usable memory of one process on its device; None for a GPU of unknown size.

    For a CPU without memory_gb: all memory of this machine, or of this process's control group. The processes of a CPU
    share its memory.
    """
    if device.card is not None:
        capacity = named_card(device.card).usable_bytes
    elif device.memory_gb is not None:
        capacity = usable_bytes(device.memory_gb)
    elif device.kind == "cpu":
        capacity = free_and_total_bytes()[1]
    else:
        return None
    return capacity // device.count if device.kind == "cpu" else capacity


def depth_of(config: PreTrainedConfig) -> Depth:
    vision = config.vision_config.depth if family_of(config.model_type).vision else 0
    return config.get_text_config().num_hidden_layers, vision


def with_depth(config: PreTrainedConfig, depth: Depth) -> PreTrainedConfig:
    """A copy of the geometry with `depth` layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, values in per_layer(text).items():
        setattr(text, name, values[: depth[0]])
    text.num_hidden_layers = depth[0]
    if depth[1]:
        tower = config.vision_config
        tower.depth = depth[1]
        full = getattr(tower, "fullatt_block_indexes", None)
        if full and min(full) >= depth[1]:  # the other blocks attend within windows, and keep as much for backward
            tower.fullatt_block_indexes = [0]
    return config


def per_layer(text: PreTrainedConfig) -> dict[str, list[object]]:
    """The settings of a language model that have a value for each layer, such as layer_types."""
    depth = text.num_hidden_layers
    return {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == depth}


def sample_depths(config: PreTrainedConfig) -> list[Depth]:
    """A shallow model, and one more layer of each kind; the model itself if its layers differ or are few.

    A vision tower is recorded whole if some of its layers feed the first layers of the language model (Qwen3-VL).
    """
    text, vision = depth_of(config)
    fed = len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    few = max(SHALLOW, fed)
    settings = config.get_text_config()
    uneven = any(len({*map(repr, values)}) > 1 for values in per_layer(settings).values())
    if uneven or layers_differ(config) or text <= few or 0 < vision <= SHALLOW:
        return [(text, vision)]
    if fed or not vision:
        return [(few, vision), (few + 1, vision)]
    return [(SHALLOW, SHALLOW), (SHALLOW + 1, SHALLOW), (SHALLOW, SHALLOW + 1)]


def layers_differ(config: PreTrainedConfig) -> bool:
    """Whether the layers of a language model have other weights than each other, or none are found."""
    depth = config.get_text_config().num_hidden_layers
    lists = (each for each in meta_model(config).get_decoder().modules() if isinstance(each, nn.ModuleList))
    layers = next((each for each in lists if len(each) == depth), ())
    return len({tuple((name, each.shape) for name, each in layer.named_parameters()) for layer in layers}) != 1


def _replayed(recording: Recording, *, expandable: bool) -> tuple[float, int]:
    """The peak of torch's allocator relative to the bytes that are requested of it, and the bytes of its gaps."""
    if not recording.cuda or not recording.storages:
        return 1.0, 0
    requested = max(peak.total() for peak in recording.peaks().values())
    allocator = recording.replayed(expandable=expandable)
    return allocator.peak_allocated_bytes / requested, allocator.reserved_bytes - allocator.peak_allocated_bytes


def _loaded(peak: Peak) -> Peak:
    """The loaded model alone: neither the optimizer nor the batch."""
    return Peak({"weights": peak["weights"], "adapters": peak["adapters"]})


def _on_one_device(plan: Plan, phase: Phase, peak: Peak) -> Peak:
    """The part of a recorded peak that one device holds."""
    peak = peak.copy()
    if phase == "load":
        return _loaded(peak)
    if OPTIMIZERS[plan.memory.optimizer].paged:  # its state is in the host's memory
        del peak["optimizer"]
    if plan.memory.placement == "ddp":
        # DistributedDataParallel keeps a second copy of all gradients, in the buckets that it sends (torch's default,
        # and accelerate's: gradient_as_bucket_view=False). The rest is the whole model, as in a process on its own.
        peak["gradients"] += plan.trainable.get("total", 0) * 4
    if plan.memory.placement == "balanced":  # each GPU has its share of the layers, and of what backward needs
        for entry in {*peak} - {"logits", "temporaries"}:
            peak[entry] //= plan.device.count
    return peak


def _extra_bytes(plan: Plan, peaks: Mapping[Phase, Peak]) -> int:
    """Bytes that the fullest device may hold beyond its prediction.

    Sharded: FSDP gathers layers and sums gradients on streams of their own, and torch's allocator gives one stream's
    freed memory to no other; the record has one stream. Balanced: the layers of one GPU may be those that are trained,
    or that keep most for backward.
    """
    if plan.on_gpu and plan.is_sharded:
        return max(peak["temporaries"] for peak in peaks.values())
    if plan.memory.placement == "balanced":
        kept = max(peak.total() - peak["weights"] - peak["logits"] - peak["temporaries"] for peak in peaks.values())
        return kept - kept // plan.device.count
    return 0


def _scaled_up(recorded: Mapping[Depth, Peaks], depth: Depth) -> Peaks:
    """Peaks of `depth` layers, from a shallow model's and those of one layer of a kind more."""
    few, *deeper = recorded
    layers = [
        sum(all_ - one for all_, one, more in zip(depth, few, each, strict=True) if more > one) for each in deeper
    ]
    weights = (1 - sum(layers), *layers)  # by record: each layer beyond the shallow model's adds the same

    def scaled(amounts: Iterable[Number]) -> Number:
        return sum((weight * amount for weight, amount in zip(weights, amounts, strict=True)))

    phases = {
        phase: Peak(
            {entry: max(0, scaled(peaks.phases[phase][entry] for peaks in recorded.values())) for entry in BUDGET}
        )
        for phase in PHASES
    }
    # The allocator's gaps do not grow with the layers: seven trainings of 2B to 7B on an H100 had .17 to .71 GiB, and
    # the records of two and three layers .25 to 1.01 GiB (docs/memory.md).
    return Peaks(
        phases,
        mean(peaks.allocated_share for peaks in recorded.values()),
        mean(peaks.gap_bytes for peaks in recorded.values()),
        scaled(peaks.flops for peaks in recorded.values()),
        scaled(peaks.operators for peaks in recorded.values()),
    )


def _prediction(peaks: Peaks, plan: Plan, extra_bytes: int = 0) -> Prediction:
    """The peaks of tensors, and all else that the process holds on the device."""
    calibration = load_calibration()
    sizes = {phase: peak.total() for phase, peak in peaks.phases.items()}
    fullest = max(sizes, key=lambda phase: sizes[phase])
    peak, size = peaks.phases[fullest], sizes[fullest]
    allocated = round(size * peaks.allocated_share)
    total = reserved = allocated + round(peaks.gap_bytes)
    (low, high), label = CPU_ERRORS, "this CPU"
    if plan.on_gpu:
        allocated += calibration.cublas_workspaces_mib.num_bytes
        reserved += calibration.cublas_workspaces_mib.num_bytes
        total = reserved + calibration.context_mib.num_bytes
        total += calibration.nccl_buffers_mib.num_bytes if plan.is_data_parallel else 0
        low, high = calibration.reserved_error_low.value, calibration.reserved_error_high.value
        label = calibration.label(several=plan.is_data_parallel)
    return Prediction(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        total_bytes=total,
        low_bytes=round(total * (1 + low)),
        high_bytes=round(total * (1 + high)) + extra_bytes,
        peak_phase=fullest,
        phases=sizes,
        budget={**{entry: spent for entry, spent in peak.items() if spent}, "overhead": total - size},
        calibration=label,
        flops=peaks.flops,
        operators=peaks.operators,
    )
