"""Records of a training: its totals in training.json, every step in trace.csv, curves, and its run in trackers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import isfinite, isnan, nan
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.atomic import atomic_write
from stages.core.errors import UserError
from stages.core.params.schema import TrackingParams
from stages.core.records import STRICT_OR_NAN, StageFile
from stages.planning.plan import Validation

if TYPE_CHECKING:
    from stages.training.trainer import RecipeTrainer

Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Trace = list[tuple[str, str]]
"""For each step, as hexadecimal floats, e.g. "0x1.8000000000000p+1", which lose nothing: the loss of the first
process's micro-batches, added up in fp32, before the step; and the gradient norm, over all processes, before clipping.
"""


LOSS, SCORE = "eval_loss", "eval_score"
"""Names of a validation's figures in Trainer's log."""

Log = Sequence[Mapping[str, Any]]
"""Trainer's log: an entry has its step, and figures by name."""


@dataclass(frozen=True, kw_only=True, config=STRICT_OR_NAN)
class TrainingSummary(StageFile):
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
    gpu_utilization: Amount | None = None
    """Mean share of time with a kernel running; this and the next two are NVML's, of this node's GPUs, and None on
    a CPU. They begin where a resumed training was resumed."""
    gpu_watts: Amount | None = None
    gpu_kwh: Amount | None = None
    trainable: dict[str, Count]
    kept_step: Count | None = None
    """The step of the kept weights, if it is not the last one."""
    validation_split: str | None = None
    """The split of the next two; None without validation."""
    validation_loss: float | None = None
    validation_score: float | None = None
    """Figures of the weights kept: the loss of a token, and the mean score of a sample. None without validation."""
    skipped_steps: Count = 0
    """Steps that left the weights alone because gradients overflowed, under fp16; the first few do, to find a scale."""
    router_accuracy: float | None = None
    """Share of tokens with their domain's expert as the likeliest, as logged last; None with another loss."""

    @classmethod
    def of(cls, trainer: RecipeTrainer, *, attempt: int) -> TrainingSummary:
        """trainer: of a training that has ended, by the plan as it is after `attempt` rungs."""
        plan, state, seconds, kept_step = trainer.plan, trainer.state, trainer.seconds, trainer.kept_step
        peak_bytes, reserved_bytes = trainer.peak_bytes()
        overflows = sum(not isfinite(float.fromhex(grad_norm)) for _, grad_norm in trainer.trace or ())
        last = {name: value for entry in state.log_history for name, value in entry.items()}
        schedule, memory = plan.schedule, plan.memory
        validated = {
            name: value for each in state.log_history if each["step"] == kept_step for name, value in each.items()
        }
        samples = state.global_step * schedule.train_samples / schedule.steps_per_epoch
        return cls(
            recipe=plan.name,
            profile=plan.profile,
            attempt=attempt,
            **{name: getattr(memory, name) for name in ("micro_batch", "gradient_checkpointing", "optimizer")},
            grad_accumulation=schedule.grad_accumulation,
            quantization=plan.quantization,
            num_steps=state.global_step,
            epochs=float(state.epoch or 0),
            train_loss=last["train_loss"],
            final_loss=last["loss"],
            train_seconds=round(seconds, 2),
            samples_per_second=round(samples / seconds, 3),
            peak_memory_bytes=peak_bytes,
            reserved_memory_bytes=reserved_bytes,
            memory_kind=f"{plan.device.kind}_allocated",
            trainable=plan.trainable,
            kept_step=kept_step if kept_step != state.global_step else None,
            validation_split=plan.validation.split if plan.validation else None,
            validation_loss=validated.get(LOSS),
            validation_score=validated.get(SCORE),
            **trainer.gpu_use.totals(),
            skipped_steps=overflows if plan.memory.precision == "fp16" else 0,
            router_accuracy=last.get("router_accuracy"),
        )

    def summary(self) -> str:
        accuracy = "" if self.router_accuracy is None else f", router accuracy {self.router_accuracy:.1%}"
        skipped = f" ({self.skipped_steps} skipped, as gradients overflowed)" if self.skipped_steps else ""
        return (
            f"{self.num_steps} steps{skipped} in {self.train_seconds:.0f} s, loss {self.final_loss:.4f}{accuracy}, "
            f"peak {self.peak_memory_bytes / 2**30:.2f} GiB ({self.memory_kind})"
        )


def best_step(history: Log, plan: Validation, *, first: int = 1) -> int | None:
    """The step of the best validation so far, the first of equal ones; None before the first.

    NaN is ignored. first: 0 lets the untrained model be the best.
    """
    name, sign = (LOSS, 1) if plan.by == "loss" else (SCORE, -1)
    figures = [(int(each["step"]), sign * each.get(name, nan)) for each in history if each["step"] >= first]
    return min((each for each in figures if not isnan(each[1])), key=itemgetter(1), default=(None,))[0]


def is_over(history: Log, plan: Validation | None) -> bool:
    """Whether so many validations have followed the best one that the training stops.

    That of the untrained model counts: a learning rate that is far too high throws the model away in its first steps,
    and from there on the loss may fall to the last step.
    """
    if plan is None or plan.patience is None or (best := best_step(history, plan, first=0)) is None:
        return False
    return sum(LOSS in entry and entry["step"] > best for entry in history) >= plan.patience


CURVES = ("loss", "grad_norm", "learning_rate", "mean_token_accuracy", "router_accuracy", "score")
"""Figures of Trainer's log that are written as curves."""


def write_records(trainer: RecipeTrainer, training_dir: Path, *, attempt: int) -> TrainingSummary:
    """Write training.json, trace.csv, and the curves."""
    record = TrainingSummary.of(trainer, attempt=attempt)
    record.write(training_dir / "training.json")
    rows = (f"{step},{loss},{grad_norm}" for step, (loss, grad_norm) in enumerate(trainer.trace or (), start=1))
    atomic_write("\n".join(("step,loss,grad_norm", *rows)) + "\n", training_dir / "trace.csv")
    write_curves(trainer.state.log_history, training_dir)
    return record


def write_curves(history: Log, training_dir: Path) -> None:
    """Write plots/metrics/{train, validation}/NAME.tsv, for `dvc plots` and the report."""
    for kind, prefix in (("train", ""), ("validation", "eval_")):
        entries = [entry for entry in history if f"{prefix}loss" in entry]
        for name in CURVES:
            points = [f"{each['step']}\t{float(each[prefix + name])}\n" for each in entries if prefix + name in each]
            if points:
                path = training_dir / "plots/metrics" / kind / f"{name}.tsv"
                atomic_write("".join((f"step\t{name}\n", *points)), path)


_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboardX", "mlflow": "mlflow", "trackio": "trackio"}
"""The package that writes for each tracker."""


def tracking_arguments(tracking: TrackingParams, recipe: str) -> dict[str, Any]:
    """Trainer's arguments for the trackers; sets the variables that they read. Raises UserError for a missing one."""
    if missing := [tracker for tracker in tracking.to if find_spec(_PACKAGES[tracker]) is None]:
        raise UserError(
            f"tracking.to names {', '.join(missing)}, and the package is not installed; run without containers, after: "
            f".venv/bin/uv pip install --overrides docker/$(cat .venv/.bakeoff/target).lock {_PACKAGES[missing[0]]}"
        )
    if not tracking.to:
        return {"report_to": "none"}
    # Trackio would send what it keeps to a Space.
    local = {"project": tracking.project, "trackio_static_space_id": False}
    run_name = set_up_tracking(tracking, recipe)
    return {"report_to": list(tracking.to), "run_name": run_name, **local}


def set_up_tracking(tracking: TrackingParams, name: str) -> str:
    """Set the variables that trackers read; returns the name of the run, of recipe or comparison and the experiment.

    The files of trackers, those still to be sent included, lie below the repository.
    """
    experiment = os.environ.get("DVC_EXP_NAME")
    run = f"{name}-{experiment}" if experiment else name
    # DVC_ROOT: also if DVC runs an experiment in a clone that it throws away.
    runs_dir = Path(os.environ.get("DVC_ROOT", "."), ".bakeoff/tracking").absolute()  # wandb adds a folder of its name
    runs_dir.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "WANDB_DIR": str(runs_dir),
        "WANDB_DATA_DIR": str(runs_dir / "data"),  # artifacts, until they are sent
        "WANDB_CACHE_DIR": str(runs_dir / "cache"),
        "WANDB_MODE": tracking.wandb_mode,
        "WANDB_PROJECT": tracking.project,
        "TENSORBOARD_LOGGING_DIR": str(runs_dir / "tensorboard" / run),
        "MLFLOW_TRACKING_URI": f"sqlite:///{runs_dir}/mlflow.db",
        "MLFLOW_EXPERIMENT_NAME": tracking.project,
        "TRACKIO_DIR": str(runs_dir / "trackio"),
    }
    return run
