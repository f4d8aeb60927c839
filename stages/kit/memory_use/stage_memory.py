"""What a stage held: before it loaded a model, after, and in its fullest moment. Kept in a file of its own.

Measured memory differs from run to run, and a stage that had it among its inputs would run anew for that. So it goes
to none of the files that others start from, but below the report of its task, where only `compare` looks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from stages.core.publish import publish_json

_strict = ConfigDict(extra="forbid", strict=True)

Amount = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""In bytes. Of a group that is over its limit, less than nothing is free."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class MemoryReading:
    """At one moment. Of several GPUs the sum, of their peaks too, which need not be at one moment."""

    held_bytes: Amount
    """By this process: in tensors on a GPU; on a CPU all that is resident, Python and its libraries among it."""
    reserved_bytes: Amount
    """What torch took from the GPU for its tensors; on a CPU the same as held."""
    peak_bytes: Amount
    """Held at most until then."""
    peak_reserved_bytes: Amount
    """Likewise."""
    free_bytes: Amount
    """Of the device, whoever holds the rest; on a CPU of the machine or container."""
    total_bytes: Amount
    """Of the same."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class StageMemory:
    stage: str
    name: str
    """Of its recipe, baseline or build."""
    kind: Literal["cuda_allocated", "cpu_resident"]
    """What counts as held."""
    gpus: int
    """How many it is the sum of; 0 on a CPU. Of a training in several processes it is the first one's, on its GPU."""
    before_load: MemoryReading
    after_load: MemoryReading
    """The fullest, where several models are loaded, one after the other."""
    end: MemoryReading


def stage_memory_path(data_dir: Path, task: str, *, name: str, stage: str) -> Path:
    """Where a stage of a recipe, a baseline or a build leaves it."""
    return data_dir / "report" / task / "memory" / name / f"{stage}.json"


def write_stage_memory(memory: StageMemory, *, task: str) -> None:
    path = stage_memory_path(Path("data"), task, name=memory.name, stage=memory.stage)
    publish_json(memory, path)
