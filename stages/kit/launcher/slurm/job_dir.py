"""What a job and those who wait for it tell each other: files, as all that both are sure to share is the file system.

    data/.outputs/STAGE/waiter              locked while somebody waits for a job of the stage
    data/.outputs/STAGE/job-FINGERPRINT/    of one job
        log                                 what it prints
        facts.json                          what it is to do
        cancel                              made before it is asked to end
        failed-START                        by another node than the first: its stage's exit code, in that start
        outputs/                            what the stage made, under its paths in the workspace
        end.json                            the last that it writes
        taken/                              `outputs`, from the moment that a launcher publishes them

DVC removes a stage's outputs before it starts the stage, that of a job which still runs or has ended unwatched too. So
the job puts them aside, and the launcher that waits, or the next, moves them to their places.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from stages.core.errors import UserError
from stages.core.publish import publish_text
from stages.kit.launcher.outputs import ASIDE_DIR, remove
from stages.kit.launcher.pipeline import DeclaredStage

PATIENCE_S = 30.0
"""How long another launcher's lock is waited for: the sbatch of one that was killed keeps it until it has ended."""


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True))
class End:
    """How a job's stage ended."""

    code: int
    """The stage's exit code."""
    outputs: list[str]
    """Those that it left whole, by their paths in the workspace."""


@dataclass(frozen=True)
class JobDir:
    folder: Path

    @property
    def log_path(self) -> Path:
        return self.folder / "log"

    @property
    def cancel_path(self) -> Path:
        return self.folder / "cancel"

    @property
    def outputs_dir(self) -> Path:
        return self.folder / "outputs"

    @property
    def taken_dir(self) -> Path:
        return self.folder / "taken"

    def end(self) -> End | None:
        """None where the job has not ended, or without writing it."""
        try:
            return TypeAdapter(End).validate_json((self.folder / "end.json").read_bytes())
        except FileNotFoundError:
            return None

    def write_end(self, code: int, outputs: Iterable[str]) -> None:
        publish_text(json.dumps(asdict(End(code=code, outputs=list(outputs)))), self.folder / "end.json")

    def renew(self, facts: Mapping[str, object]) -> None:
        """Empty but for what a new job is to do."""
        remove(self.folder)
        self.folder.mkdir(parents=True)
        publish_text(json.dumps(facts), self.folder / "facts.json")

    def changed_since(self, facts: Mapping[str, object]) -> list[str]:
        """Names of what is no longer what it was when the job was submitted."""
        asked = json.loads((self.folder / "facts.json").read_bytes())
        now = json.loads(json.dumps(facts))
        return [name for name in now if now[name] != asked.get(name)]

    def put_aside(self, workspace_dir: Path, outputs: Iterable[str]) -> list[str]:
        """Move the outputs there are out of the workspace; returns those that are whole, which have files.

        DVC of a run that begins may be removing them just now: one of which a file has vanished meanwhile is not whole.
        """
        whole = []
        for out in outputs:
            place, aside = workspace_dir / out, self.outputs_dir / out
            try:
                before = _sizes(place)
                remove(aside)
                aside.parent.mkdir(parents=True, exist_ok=True)
                place.rename(aside)
                if before and _sizes(aside) == before:
                    whole.append(out)
            except FileNotFoundError:
                continue
        return whole

    def is_taken(self) -> bool:
        """Whether a launcher has begun to publish the outputs, and was killed before it had done so."""
        return self.taken_dir.exists()

    def publish(self, workspace_dir: Path, outputs: Iterable[str]) -> None:
        """Move outputs to their places; what lay there is replaced.

        Raises UserError where another launcher does so, on a file system that shows it no locks of this one.
        """
        taken = self.taken_dir
        try:
            self.outputs_dir.rename(taken)
        except OSError:
            message = f"another launcher has taken the outputs in {self.folder}; type the same command again"
            raise UserError(message) from None
        for out in outputs:
            place = workspace_dir / out
            if (taken / out).exists():  # DVC names what is missing
                remove(place)
                place.parent.mkdir(parents=True, exist_ok=True)
                (taken / out).rename(place)

    def forget(self) -> None:
        """Its job is over, and nothing of it is needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)  # a network file system may keep the open log


def job_dirs(stage: DeclaredStage, workspace_dir: Path) -> list[JobDir]:
    """Of all jobs of a stage in this workspace."""
    return [JobDir(path) for path in sorted((workspace_dir / ASIDE_DIR / stage.name).glob("job-*"))]


def job_dir(stage: DeclaredStage, workspace_dir: Path, fingerprint: str) -> JobDir:
    return JobDir(workspace_dir / ASIDE_DIR / stage.name / f"job-{fingerprint}")


@contextmanager
def waiting_alone(stage: DeclaredStage, workspace_dir: Path) -> Iterator[TextIO]:
    """The lock of the one launcher that waits for jobs of the stage. Raises UserError where another one does."""
    path = workspace_dir / ASIDE_DIR / stage.name / "waiter"
    path.parent.mkdir(parents=True, exist_ok=True)
    patience_ends = time.monotonic() + PATIENCE_S
    with path.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > patience_ends:
                    message = f"another launcher waits for {stage.name} in this workspace; wait for it, or end it"
                    raise UserError(message) from None
                time.sleep(0.2)
        yield lock


def _sizes(path: Path) -> dict[str, int]:
    """Of each file at a path or below it."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if not file.is_dir()]
    return {str(file.relative_to(path)): file.lstat().st_size for file in files}
