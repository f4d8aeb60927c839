"""Provenance: of which code, settings, data, packages and machine the outputs of a stage are, and when they were made.

One record a stage, written by the launcher when the stage ended well. It is an output of that stage like any other, so
DVC keeps it with the bytes it tells of and brings it back with them, from its run cache, an experiment or a remote. It
holds times and so differs between runs whose bytes do not; therefore it lies apart from all other outputs, and nothing
depends on it but its task's comparison, which shows it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from stages.core.records import Record

PROVENANCE_DIR = "data/provenance"
"""Below it lie the records, as dvc.yaml declares them: those of the runs that a comparison shows in a folder of their
task, the others beside that."""

_strict = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, kw_only=True, config=_strict)
class Machine:
    """What a stage's own process saw, in its container if it had one."""

    python: str
    packages: dict[str, str]
    """All that could be imported, by name, to its version."""
    cuda: str | None
    """That torch was built with; None where it was built for CPUs."""
    system: str
    """Kernel, kind of processor, C library."""
    cpu: str
    """Its model."""
    arithmetic: str
    """Machines of which this is equal add numbers up alike, e.g. "AuthenticAMD avx2" (core/environment.py)."""
    cores: int
    """That the process could use."""
    memory_gib: float


@dataclass(frozen=True, kw_only=True, config=_strict)
class Provenance(Record):
    stage: str
    """DVC's name for it, e.g. "train@r1-llm-only"."""
    command: str
    started: str
    """ISO 8601, UTC; likewise `ended`."""
    ended: str
    seconds: float
    """By a clock that nobody sets."""
    commit: str | None
    """None where there is no git. In an experiment of DVC's, the one it started from."""
    changed: list[str]
    """Files that were not as the commit has them, among those that a stage can see."""
    code: str
    """Digest of the code that dvc.yaml declares for the stage: the same in two commits that differ elsewhere."""
    experiment: str | None
    """DVC's name for it."""
    params: dict[str, Any]
    """What the stage declares of params.yaml, by dotted path, defaults filled in."""
    plan: dict[str, Any] | None
    """The plan that it followed, as it was used; None for a stage without."""
    seed: int | None
    """Of the plan."""
    attempt: int
    """How often memory ran out before."""
    inputs: dict[str, str]
    """Digest of each, by path; a model folder's is that of its lineage."""
    outputs: dict[str, str]
    """Likewise: which bytes this is the provenance of."""
    engine: str
    """docker, podman, apptainer, or process for none."""
    image: str | None
    """Its name, which is made from all that it was built from; None without an engine."""
    image_digest: str | None
    lock: str | None
    """Digest of the lock that its packages come from; None where nobody knows, as in an environment made by hand."""
    vllm_lock: str | None = None
    """Digest of the lock of vLLM's own packages, where it answered."""
    machine: Machine | None
    """None where the container did not tell."""
    gpus: list[str]
    """Those that it had, by name; none: it ran on the CPU."""
    driver: str | None
    """Of the GPUs."""
    environment: dict[str, str] = field(default_factory=dict)
    """The caller's variables that it got and that decide how numbers are added up."""

    @staticmethod
    def fix(path: Path) -> str:
        return f"rm -f {shlex.quote(str(path))} && dvc checkout {shlex.quote(str(path))}"

    @property
    def device(self) -> str:
        """On what it computed, in words."""
        if self.gpus:
            names = " + ".join(
                f"{self.gpus.count(name)} x {name}" if self.gpus.count(name) > 1 else name
                for name in dict.fromkeys(self.gpus)
            )
            return f"{names}, driver {self.driver or 'unknown'}"
        return f"{self.machine.cpu}, {self.machine.cores} cores" if self.machine else "CPU"

    @property
    def changed_code(self) -> list[str]:
        """What was changed beside the settings, of which the record has a copy."""
        return [path for path in self.changed if path != "params.yaml"]


def records_dir(data_dir: Path, task: str) -> Path:
    """Of the runs that the comparison of a task shows."""
    return data_dir / Path(PROVENANCE_DIR).name / task


def provenance_of_run(folder: Path, name: str) -> Iterator[Provenance]:
    """The records of a recipe, or a baseline, in a folder of records, by stage; none where the launcher wrote none."""
    for path in sorted(folder.glob(f"*@{name}.json")):
        yield Provenance.read(path)
