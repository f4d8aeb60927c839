"""memory.json: what a plan was predicted to take, as metrics that experiments are compared by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from stages.core.documents import read_json
from stages.core.publish import publish_text
from stages.kit.planning.prediction import PHASES, Budget, Phase

GIB = 2**30
Name = TypeVar("Name", bound=str)

_strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, config=_strict)
class GpuRecord:
    """The prediction for one of several GPUs that layers are spread over; amounts in GiB."""

    verdict: str
    total_gib: float
    peak_phase: Phase
    budget_gib: dict[Budget, float]


@dataclass(frozen=True, kw_only=True, config=_strict)
class MemoryRecord:
    """All amounts in GiB, of one device, the fullest."""

    verdict: str
    """For the profile's device; "unknown" for a GPU whose size is."""
    allocated_gib: float
    reserved_gib: float
    total_gib: float
    low_gib: float
    high_gib: float
    usable_gib: float | None
    """None where the profile does not give it: a machine's own memory decides on a CPU, but the record is the same on
    each machine."""
    peak_phase: Phase
    phases_gib: Annotated[dict[Phase, float], Field(min_length=len(PHASES))]
    """Of each."""
    budget_gib: dict[Budget, float]
    calibration: str
    changes: list[str]
    """What memory.fit took from the plan that was asked for."""
    evaluation_verdict: str
    evaluation_gib: float
    """The total that evaluation takes, at its own batch size, of one device."""
    gpus: Annotated[dict[str, GpuRecord], Field(default_factory=dict)]
    """By number, where layers are spread over several."""

    def summary(self) -> str:
        """The prediction on one line, what takes most first."""
        spent = sorted(self.budget_gib.items(), key=lambda entry: -entry[1])
        listed = ", ".join(f"{entry} {size:.2f}" for entry, size in spent if size >= 0.005)
        usable = "" if self.usable_gib is None else f" of {self.usable_gib:.2f} usable"
        return f"{self.total_gib:.2f} GiB{usable}, fullest in {self.peak_phase}: {listed}"


def beside_measured(record: MemoryRecord, measured_bytes: int, *, on_cpu: bool) -> dict[str, float]:
    """Metrics: what the plan's tensors were predicted to take at most, what they took, and the error between.

    On a CPU the two passes are measured, and not the optimizer's step (training/peak.py).
    """
    passes = max(record.phases_gib["forward"], record.phases_gib["backward"])
    predicted_gib, measured_gib = passes if on_cpu else record.allocated_gib, in_gib(measured_bytes)
    return {
        "memory_predicted_gib": predicted_gib,
        "memory_measured_gib": measured_gib,
        "memory_error": round(predicted_gib / measured_gib - 1, 4),
    }


def in_gib(num_bytes: int) -> float:
    """To the nearest kB: what a tiny model takes must not be lost in rounding."""
    return round(num_bytes / GIB, 6)


def all_in_gib(sizes: Mapping[Name, int]) -> dict[Name, float]:
    return {name: in_gib(size) for name, size in sizes.items()}


def write_memory_record(record: MemoryRecord, path: Path) -> None:
    fields = asdict(record)
    if not record.gpus:
        del fields["gpus"]
    publish_text(json.dumps(fields, indent=2) + "\n", path)


def read_memory_record(path: Path) -> MemoryRecord:
    """Raises UserError where it is missing or damaged."""
    return read_json(MemoryRecord, path, fix=f"dvc repro -f -s plan@{path.parent.name}")
