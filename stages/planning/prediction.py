"""The peak memory that is predicted for a run, and its record, memory.json. Sizes are of the fullest device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.params.schema import Size
from stages.core.records import STRICT, StageFile, rebuild

GIB = 2**30

Phase = Literal["load", "forward", "backward", "step"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Loading the weights, the two passes of a batch, and the optimizer's step."""

Budget = Literal["weights", "adapters", "gradients", "optimizer", "activations", "logits", "temporaries", "overhead"]
BUDGET: tuple[Budget, ...] = get_args(Budget)
"""Categories of memory. logits include the loss; temporaries live for an instant within backward and step; overhead is
what torch's allocator keeps beyond what is requested of it, CUDA's context and the workspaces of its libraries."""

Verdict = Literal["fits", "too close", "does not fit"]

Bytes = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Prediction:
    allocated_bytes: Bytes
    """Peak of all tensors, as torch.cuda.max_memory_allocated counts it."""
    reserved_bytes: Bytes
    """Peak of what torch takes from the device for them, as torch.cuda.max_memory_reserved counts it."""
    total_bytes: Bytes
    """Everything that the process holds on the device, as nvidia-smi shows it."""
    low_bytes: Bytes
    high_bytes: Bytes
    """The interval that the total is expected in."""
    peak_phase: Phase
    phases: dict[Phase, Bytes]
    """The peak of the allocated bytes in each phase; a generation has no backward and no step."""
    budget: dict[Budget, Bytes]
    """The total by category at the peak: sums to total_bytes."""
    calibration: str
    """Source of the constants, e.g. "NVIDIA H200, 2026-12-01"; or "assumed"."""
    flops: float = 0.0
    """Floating-point operations of a micro-batch, forward and backward; 0 for a generation."""
    operators: float = 0.0
    """Calls of torch's operators for it, which take the time of one core, whatever the size of the tensors."""

    def verdict(self, capacity_bytes: int) -> Verdict:
        """Compares the capacity with the whole interval, not with the total alone."""
        if self.high_bytes <= capacity_bytes:
            return "fits"
        return "does not fit" if self.low_bytes > capacity_bytes else "too close"

    def summary(self) -> str:
        """One line: the total and its three largest categories."""
        spent = sorted(self.budget.items(), key=lambda entry: -entry[1])[:3]
        most = ", ".join(f"{entry} {gib_text(size)}" for entry, size in spent)
        return f"memory: {gib_text(self.total_bytes)} GiB expected, most in {self.peak_phase}: {most}"

    def lines(self, capacity_bytes: int | None = None) -> list[str]:
        """The budget, phases, interval and verdict in plain ASCII: for logs, a refusal and `make plan`."""
        assert sum(self.budget.values()) == self.total_bytes, (self.budget, self.total_bytes)
        spent = {entry: self.budget[entry] for entry in BUDGET if self.budget.get(entry)}
        lines = [
            f"{entry:<12} {gib_text(size):>8} GiB {size / self.total_bytes:>7.1%}"
            for entry, size in [*spent.items(), ("total", self.total_bytes)]
        ]
        phases = ", ".join(f"{phase} {gib_text(self.phases[phase])}" for phase in PHASES if phase in self.phases)
        lines.append(f"peak      in {self.peak_phase}; allocated at most, GiB: {phases}")
        interval = f"{gib_text(self.low_bytes)} to {gib_text(self.high_bytes)} GiB"
        lines.append(f"expected  {interval} (calibration: {self.calibration})")
        if capacity_bytes is not None:
            lines += [f"usable    {gib_text(capacity_bytes)} GiB", f"verdict   {self.verdict(capacity_bytes)}"]
        return lines


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PlannedMemory(StageFile):
    """data/runs/RECIPE/memory.json: whether a plan fits the profile's device."""

    verdict: str
    """"unknown" for a GPU of unknown size."""
    prediction: Prediction
    usable_bytes: Bytes | None
    """None if the profile does not give it: a CPU's capacity is the machine's own memory, but the record is the same
    on every machine."""
    changes: list[str]
    """Settings that memory.fit changed."""
    evaluation_verdict: str
    evaluation_bytes: Bytes
    """Total of the evaluation at its own batch size, on one device."""
    evaluation_batch_size: Size
    """Completions at once: of params.yaml, or with `auto` the largest predicted to fit."""


def read_memory(recipe: str, *, runs_dir: Path = Path("data/runs")) -> PlannedMemory:
    """Raises UserError if the record is missing or damaged."""
    return PlannedMemory.read(runs_dir / recipe / "memory.json", fix=rebuild(f"plan@{recipe}"))


def prediction_metrics(prediction: Prediction, measured_bytes: int, *, on_cpu: bool) -> dict[str, float]:
    """Metrics: predicted and measured peak of all tensors, and the relative error.

    On a CPU the two passes are measured, and not the optimizer's step (`cpu_peak` in internals/torch_internals.py).
    """
    passes = max(prediction.phases["forward"], prediction.phases["backward"])
    predicted_bytes = passes if on_cpu else prediction.allocated_bytes
    return {
        # To the nearest kB, so that a tiny model's sizes are not rounded to 0.
        "memory_predicted_gib": round(predicted_bytes / GIB, 6),
        "memory_measured_gib": round(measured_bytes / GIB, 6),
        "memory_error": round(predicted_bytes / measured_bytes - 1, 4),
    }


def gib_text(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
