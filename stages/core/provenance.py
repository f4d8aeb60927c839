"""Provenance: the code, settings, data, packages and machine that made the outputs of a stage, and when.

The launcher writes one record for each stage that succeeded; dvc.lock has the digests of the outputs. The record is an
output of the stage, so DVC caches it with the bytes that it describes, and restores both from its run cache, an
experiment or a remote. It has times, and so differs between runs of equal bytes: it lies apart from the other outputs,
and only comparison and publication read it.
"""

from __future__ import annotations

import shlex
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.records import STRICT, StageFile

PROVENANCE_DIR = "data/provenance"
"""Folder of the records: those of a task's runs in a folder TASK, all others beside it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Machine:
    """Packages and hardware as the stage's own process saw them, in its container if it had one."""

    python: str
    packages: dict[str, str]
    """Version of each importable package, by name."""
    cuda: str | None
    """Version that torch was built with; None for a CPU build."""
    system: str
    """Kernel, kind of processor, C library."""
    cpu: str
    """Model of the CPU."""
    arithmetic: str
    """Equal on machines that add numbers up alike, e.g. "AuthenticAMD avx2" (core/environment.py)."""
    cores: int
    """Cores that the process could use."""
    memory_gib: float


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Provenance(StageFile):
    stage: str
    """DVC's name for it, e.g. "train@r1-llm-only"."""
    started: str
    """Start in ISO 8601, UTC; `ended` too."""
    ended: str
    seconds: float
    """Duration by a monotonic clock."""
    commit: str | None
    """None without git. In an experiment of DVC's, the commit that it started from."""
    changed: list[str]
    """Files that differ from the commit, among those that a stage can see."""
    code: str
    """Digest of the code that dvc.yaml declares for the stage: the same in two commits that differ elsewhere."""
    experiment: str | None
    """DVC's name for it."""
    params: dict[str, Any]
    """Settings of params.yaml that the stage declares, by dotted path, with defaults filled in."""
    plan: dict[str, Any] | None
    """The plan as it was used; None for a stage without one."""
    attempt: Annotated[int, Field(ge=0)]
    """Restarts after running out of memory."""
    inputs: dict[str, str]
    """Digest of each input, by path; a model folder's is the one in its lineage."""
    engine: str
    """Name of the engine, e.g. docker; "process" without containers."""
    image: str | None
    """Name of the image, derived from its inputs; None without an engine."""
    image_digest: str | None
    lock: str | None
    """Digest of the lock of its packages; None if unknown, as in an environment made by hand."""
    vllm_lock: str | None = None
    """Digest of the lock of vLLM's own packages, if vLLM generated the completions."""
    machine: Machine | None
    """None if the container did not report it."""
    gpus: list[str]
    """Names of the stage's GPUs; empty on a CPU."""
    driver: str | None
    """Version of the GPU driver."""
    environment: dict[str, str] = field(default_factory=dict)
    """The caller's variables that reached the stage and may change the order of additions."""

    @property
    def device(self) -> str:
        """The device in words."""
        if self.gpus:
            names = " + ".join(
                f"{self.gpus.count(name)} x {name}" if self.gpus.count(name) > 1 else name
                for name in dict.fromkeys(self.gpus)
            )
            return f"{names}, driver {self.driver or 'unknown'}"
        return f"{self.machine.cpu}, {self.machine.cores} cores" if self.machine else "CPU"


def read_provenance(path: Path) -> Provenance:
    """Raises UserError, with the command that restores the file, if it is missing or damaged."""
    name = shlex.quote(str(path))
    return Provenance.read(path, fix=f"rm -f {name} && dvc checkout {name}")


def records_dir(data_dir: Path, task: str) -> Path:
    """Folder of the records of the runs that a task's comparison shows."""
    return data_dir / Path(PROVENANCE_DIR).name / task
