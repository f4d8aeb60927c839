"""Records of a training: its totals in training.json, every step in trace.csv, and its run in Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from stages.core.params.schema import TrackingParams
from stages.core.records import Record, publish_text
from stages.kit.planning.plan import Plan

if TYPE_CHECKING:
    from transformers import TrainerState

Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Trace = list[tuple[str, str]]
"""For each step, as hexadecimal floats, e.g. "0x1.8000000000000p+1", which lose nothing: the loss of the first
process's micro-batches, added up in fp32, before the step; and the gradient norm, over all processes, before clipping.
"""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True))
class TrainingRecord(Record):
    recipe: str
    profile: str
    attempt: Count
    """Rungs of the memory ladder that were taken; 0 is as planned. The settings below are those used."""
    micro_batch: int
    grad_accumulation: int
    gradient_checkpointing: bool
    optimizer: str
    quantization: str
    num_steps: Count
    epochs: Amount
    train_loss: float
    """Mean over the run. NaN, like final_loss, if training diverged."""
    final_loss: float
    """The last logged loss."""
    train_seconds: Amount
    samples_per_second: Amount
    peak_memory_bytes: Annotated[int, Field(ge=1, lt=2**63)]
    reserved_memory_bytes: Count
    memory_kind: str
    """cuda_allocated or cpu_allocated (RecipeTrainer.peak_bytes)."""
    trainable: dict[str, Count]
    skipped_steps: Count = 0
    """Steps that left the weights alone because gradients overflowed, under fp16; the first few do, to find a scale."""
    router_accuracy: float | None = None
    """Share of the tokens whose likeliest expert was their domain's, as logged last; None with another loss."""

    @staticmethod
    def fix(path: Path) -> str:
        return f"dvc repro -f -s train@{path.parent.parent.name}"

    @classmethod
    def of(
        cls, plan: Plan, state: TrainerState, trace: Trace, *, attempt: int, seconds: float, peak_bytes: tuple[int, int]
    ) -> TrainingRecord:
        """plan: as used, after `attempt` rungs. peak_bytes: allocated and reserved."""
        overflows = sum(not isfinite(float.fromhex(grad_norm)) for _, grad_norm in trace)
        last = {name: value for entry in state.log_history for name, value in entry.items()}
        schedule = plan.schedule
        settings = ("recipe", "profile", "gradient_checkpointing", "optimizer", "quantization", "trainable")
        samples = schedule.num_steps * schedule.train_samples / schedule.steps_per_epoch
        return cls(
            **{name: getattr(plan, name) for name in settings},
            attempt=attempt,
            micro_batch=schedule.micro_batch,
            grad_accumulation=schedule.grad_accumulation,
            num_steps=state.global_step,
            epochs=float(state.epoch or 0),
            train_loss=last["train_loss"],
            final_loss=last["loss"],
            train_seconds=round(seconds, 2),
            samples_per_second=round(samples / seconds, 3),
            peak_memory_bytes=peak_bytes[0],
            reserved_memory_bytes=peak_bytes[1],
            memory_kind=f"{plan.device.kind}_allocated",
            skipped_steps=overflows if plan.precision == "fp16" else 0,
            router_accuracy=last.get("router_accuracy"),
        )

    def summary(self) -> str:
        accuracy = "" if self.router_accuracy is None else f", router accuracy {self.router_accuracy:.1%}"
        skipped = f" ({self.skipped_steps} skipped, as gradients overflowed)" if self.skipped_steps else ""
        return (
            f"{self.num_steps} steps{skipped} in {self.train_seconds:.0f} s, loss {self.final_loss:.4f}{accuracy}, "
            f"peak {self.peak_memory_bytes / 2**30:.2f} GiB ({self.memory_kind})"
        )


def write_trace(trace: Sequence[tuple[str, str]], path: Path) -> None:
    rows = (f"{step},{loss},{grad_norm}" for step, (loss, grad_norm) in enumerate(trace, start=1))
    publish_text("\n".join(("step,loss,grad_norm", *rows)) + "\n", path)


def tracking_arguments(tracking: TrackingParams, recipe: str) -> dict[str, Any]:
    """Trainer's arguments for Weights & Biases, whose environment they need."""
    if not tracking.wandb:
        return {"report_to": "none"}
    set_tracking_environment(tracking)
    return {"report_to": "wandb", "run_name": run_name(recipe)}


def set_tracking_environment(tracking: TrackingParams) -> None:
    """Variables that wandb reads. Its files, those still to be sent included, lie below the repository."""
    # DVC_ROOT: also if DVC runs an experiment in a clone that it throws away.
    runs_dir = Path(os.environ.get("DVC_ROOT", "."), ".bakeoff/tracking").absolute()  # wandb adds a folder of its name
    runs_dir.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "WANDB_DIR": str(runs_dir),
        "WANDB_DATA_DIR": str(runs_dir / "data"),  # artifacts, until they are sent
        "WANDB_CACHE_DIR": str(runs_dir / "cache"),
        "WANDB_MODE": tracking.wandb_mode,
        "WANDB_PROJECT": tracking.wandb_project,
    }


def run_name(name: str) -> str:
    """The name of a tracked run: recipe or comparison, and the experiment."""
    experiment = os.environ.get("DVC_EXP_NAME")
    return f"{name}-{experiment}" if experiment else name
