"""training.json: the totals of one training run."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import TrainerState

from stages.kit.params import DeviceParams
from stages.kit.plan import Plan
from stages.kit.publish import publish_text


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    bytes: int
    kind: str
    """cuda_allocated: by torch, on the fullest GPU of this process; rss: resident memory of the whole process."""


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    recipe: str
    profile: str
    num_steps: int
    epochs: float
    train_loss: float
    """Mean over the run."""
    final_loss: float
    """As logged last."""
    train_seconds: float
    samples_per_second: float
    peak_memory_bytes: int
    memory_kind: str
    trainable: dict[str, int]

    @classmethod
    def of(cls, plan: Plan, state: TrainerState, *, seconds: float, peak: PeakMemory) -> TrainingRecord:
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        means = [entry["train_loss"] for entry in state.log_history if "train_loss" in entry]
        samples = plan.schedule.num_steps * plan.schedule.train_samples / plan.schedule.steps_per_epoch
        return cls(
            recipe=plan.recipe,
            profile=plan.profile,
            num_steps=state.global_step,
            epochs=float(state.epoch or 0),
            train_loss=means[-1],
            final_loss=losses[-1],
            train_seconds=round(seconds, 2),
            samples_per_second=round(samples / seconds, 3),
            peak_memory_bytes=peak.bytes,
            memory_kind=peak.kind,
            trainable=plan.trainable,
        )

    def summary(self) -> str:
        return (
            f"{self.num_steps} steps in {self.train_seconds:.0f} s, loss {self.final_loss:.4f}, "
            f"peak {self.peak_memory_bytes / 2**30:.2f} GiB ({self.memory_kind})"
        )


def write_record(record: TrainingRecord, path: Path) -> None:
    publish_text(json.dumps(asdict(record), indent=2) + "\n", path)


def peak_memory(device: DeviceParams) -> PeakMemory:
    """The largest amount held so far by this process."""
    if device.kind == "cuda":
        peaks = [torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())]
        return PeakMemory(bytes=max(peaks), kind="cuda_allocated")
    # ru_maxrss is in KiB on Linux and in bytes on macOS (getrusage(2))
    unit = 1 if sys.platform == "darwin" else 1024
    return PeakMemory(bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, kind="rss")
