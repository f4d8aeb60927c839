"""Checkpoints on disk: complete or absent, kept to a number, and found again by the same training only.

    .bakeoff/checkpoints/RECIPE/FINGERPRINT/step-000120/        files of resume.py, and manifest.json
                                            fingerprint.json    the facts that identify the training
                                            lock                held while a process trains or removes it

A checkpoint is written under a temporary name, reaches the disk with a digest of each file, and is renamed last: one
that was cut short is never found. Checkpoints lie below the person's repository, not in a workspace that DVC throws
away, and are not outputs: DVC never sees half a training. The launcher removes them, so this imports nothing heavy.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stages.core.atomic import atomic_write
from stages.core.errors import UserError
from stages.core.lineage import file_digest, file_digests, json_digest
from stages.core.locks import idle_folders, lock_folder
from stages.core.records import parse_json

MANIFEST, IDENTITY, FINISHED = "manifest.json", "fingerprint.json", "finished"

log = logging.getLogger(__name__)


def checkpoints_dir(repository_dir: Path, recipe: str) -> Path:
    """The folder of the checkpoints of all trainings of a recipe."""
    return repository_dir / ".bakeoff/checkpoints" / recipe


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one training."""

    folder: Path
    """Named by the training's fingerprint."""
    keep: int
    """Largest number of them. Once there are as many, those of the recipe's other trainings are removed."""

    def at(self, step: int) -> Path:
        return self.folder / _name_of(step)

    def partial(self, step: int) -> Path:
        """The folder for the files of a step's checkpoint until it is `complete`."""
        return self.folder / f".step-{step:06d}.partial"

    def newest(self) -> int | None:
        """The last step with an undamaged checkpoint; logs a warning for each damaged one, with the file."""
        for step in reversed(_steps(self.folder)):
            problem = damage(self.at(step))
            if problem is None:
                return step
            log.warning("%s; skipping this checkpoint", problem)
        return None

    def complete(self, step: int, names: Sequence[str], *, best: int | None = None) -> int:
        """Rename the checkpoint once these files of it are on the disk; returns their size in bytes.

        Removes surplus checkpoints, the oldest first. best: a step with a checkpoint worth as much as this one, and
        kept beside it. Raises OSError if a file is missing, or the disk is full.
        """
        partial = self.partial(step)
        files = {path.name: digest for path, digest in file_digests(partial / name for name in sorted(names)).items()}
        size_bytes = sum((partial / name).stat().st_size for name in files)
        manifest = json.dumps({"sha256": files, "best": best}, indent=2) + "\n"
        (partial / MANIFEST).write_text(manifest, encoding="utf-8")
        for path in (*(partial / name for name in files), partial / MANIFEST, partial):
            _sync(path)
        _remove(self.at(step))  # a damaged one
        partial.rename(self.at(step))
        _sync(self.folder)
        own = _steps(self.folder)
        kept = [each for each in own if each <= step][-self.keep :]  # a later one is damaged, or it had been resumed
        for each in {*own} - {*kept} - {_best(self.at(each)) for each in kept}:
            _remove(self.at(each))
        if len(kept) == self.keep:
            for other in idle_folders(_trainings(self.folder.parent)):  # this one is locked
                shutil.rmtree(other, ignore_errors=True)
        return size_bytes


@contextmanager
def kept_checkpoints(
    recipe_dir: Path, identity: Mapping[str, str], *, keep: int, owner: bool = True
) -> Iterator[Checkpoints]:
    """The checkpoints of the training that `identity` identifies, locked against other processes.

    Waits for a process that has the lock, such as one that a killed dvc left behind while it saves. If the block ends
    without an error, the training has finished: `remove_finished` may then remove its checkpoints.

    owner: False for all but the first of several processes that train together.
    Raises UserError if nothing can be written there.
    """
    checkpoints = Checkpoints(folder=recipe_dir / json_digest(identity), keep=keep)
    if not owner:
        yield checkpoints
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(checkpoints.folder))
            (checkpoints.folder / FINISHED).unlink(missing_ok=True)
            for path in checkpoints.folder.glob(".*.partial"):  # of a process that was killed
                shutil.rmtree(path, ignore_errors=True)
            atomic_write(json.dumps(identity, indent=2) + "\n", checkpoints.folder / IDENTITY)
        except OSError as error:
            raise UserError(f"{checkpoints.folder} cannot hold checkpoints: {error}") from None
        if not _steps(checkpoints.folder):
            _log_differences(checkpoints.folder, identity)
        yield checkpoints
        with suppress(OSError):  # someone has removed the folder
            (checkpoints.folder / FINISHED).touch()


def remove_finished(recipe_dir: Path) -> None:
    """Remove the checkpoints of finished trainings, once DVC has their outputs."""
    for folder in idle_folders(_trainings(recipe_dir)):
        if (folder / FINISHED).exists():
            shutil.rmtree(folder, ignore_errors=True)


def damage(checkpoint: Path) -> str | None:
    """The fault of a checkpoint, with the damaged file; None if every file agrees with its manifest."""
    path = checkpoint / MANIFEST
    try:
        manifest = parse_json(path.read_bytes())
        digests, best = manifest["sha256"], manifest["best"]
        needed = checkpoint if best is None else checkpoint.with_name(_name_of(best))
        for name, digest in digests.items():
            path = checkpoint / name
            if file_digest(path) != digest:
                return f"{path} differs from its digest in {checkpoint.name}/{MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} is damaged, or {checkpoint.name}/{MANIFEST} is: {error}"
    if not digests:
        return f"{path} is damaged: {checkpoint.name}/{MANIFEST} names no file"
    return damage(needed) if needed != checkpoint else None


def _best(checkpoint: Path) -> int | None:
    """The step of the checkpoint kept beside this one; None for a damaged one."""
    with suppress(OSError, ValueError):
        return parse_json((checkpoint / MANIFEST).read_bytes()).get("best")
    return None


def _name_of(step: int) -> str:
    return f"step-{step:06d}"


def _remove(checkpoint: Path) -> None:
    """Renames it first: if this is killed, nothing is left that looks like a checkpoint."""
    partial = checkpoint.with_name(f".{checkpoint.name}.removed.partial")
    if checkpoint.exists():
        with suppress(OSError):
            checkpoint.rename(partial)
            shutil.rmtree(partial)


def _steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, in order."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def _trainings(recipe_dir: Path) -> list[Path]:
    """Without links: a stage in a container can make one that leads the launcher out of the container's view."""
    if not recipe_dir.is_dir():
        return []
    return sorted(path for path in recipe_dir.iterdir() if path.is_dir() and not path.is_symlink())


def _log_differences(own: Path, identity: Mapping[str, str]) -> None:
    """The reason why the checkpoints of other trainings are not resumed."""
    for folder in _trainings(own.parent):
        if folder != own and (steps := _steps(folder)):
            with suppress(OSError, ValueError, AttributeError):
                other = parse_json((folder / IDENTITY).read_bytes())
                differing = ", ".join(name for name, value in identity.items() if other.get(name) != value)
                log.info("not resuming from step %d of another training, which differs in: %s", steps[-1], differing)


def _sync(path: Path) -> None:
    """fsync of a file or a folder, which then survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
