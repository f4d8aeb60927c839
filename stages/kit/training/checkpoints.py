"""Checkpoints on disk: complete or absent, kept to a number, and found again by the same training only.

    .bakeoff/checkpoints/RECIPE/FINGERPRINT/step-000120/        resumable.py's files, and manifest.json
                                            fingerprint.json    the facts that identify the training
                                            lock                held while a process trains or removes it

A checkpoint is written aside, reaches the disk with a digest of each file, and only then takes its name: one that was
cut short is never found. They lie below the person's repository, not in a workspace that DVC throws away, and are no
output: DVC never sees half a training. Imports nothing heavy, as the launcher removes them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from stages.core.errors import UserError
from stages.core.lineage import file_digest, file_digests
from stages.core.publish import publish_text

MANIFEST, IDENTITY, LOCK, FINISHED = "manifest.json", "fingerprint.json", "lock", "finished"

log = logging.getLogger(__name__)


def checkpoints_dir(repository_dir: Path, recipe: str) -> Path:
    """The folder of the checkpoints of a recipe, those of all its trainings."""
    return repository_dir / ".bakeoff/checkpoints" / recipe


def digest_of(identity: Mapping[str, str]) -> str:
    """The fingerprint of a training, from the facts that identify it (fingerprint.py)."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one training."""

    folder: Path
    """Named by the training's fingerprint."""
    keep: int
    """Limit for the recipe, this training's first; trainings that another process works on are not counted."""

    def at(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def aside(self, step: int) -> Path:
        """Where the files of a step's checkpoint are written. They count for nothing until `complete`."""
        return self.folder / f".step-{step:06d}.partial"

    def newest(self) -> int | None:
        """The last step of which there is an undamaged checkpoint; every damaged one is warned of, its file named."""
        for step in reversed(_steps(self.folder)):
            problem = damage(self.at(step))
            if problem is None:
                return step
            log.warning("%s; this checkpoint is passed over", problem)
        return None

    def complete(self, step: int, names: Sequence[str]) -> int:
        """Give the checkpoint its name, once these files of it are on the disk; returns their size in bytes.

        Removes surplus checkpoints, the oldest first. Raises OSError where a file is missing, or the disk is full.
        """
        aside = self.aside(step)
        files = {path.name: digest for path, digest in file_digests(aside / name for name in sorted(names)).items()}
        size_bytes = sum((aside / name).stat().st_size for name in files)
        (aside / MANIFEST).write_text(json.dumps({"sha256": files}, indent=2) + "\n", encoding="utf-8")
        for path in (*(aside / name for name in files), aside / MANIFEST, aside):
            _to_disk(path)
        _remove(self.at(step))  # a damaged one
        aside.rename(self.at(step))
        _to_disk(self.folder)
        self._remove_surplus(step)
        return size_bytes

    def abandon(self, step: int) -> None:
        """Remove the files of a checkpoint that cannot be completed."""
        shutil.rmtree(self.aside(step), ignore_errors=True)

    def _remove_surplus(self, newest: int) -> None:
        own = _steps(self.folder)  # one later than the newest was found damaged, or it would have been gone on from
        kept = [step for step in own if step <= newest][-self.keep :]
        for step in set(own) - set(kept):
            _remove(self.at(step))
        with suppress(OSError):  # another training removes them too, and this one is saved
            _thin_out(self.folder.parent, self.keep - len(kept))


@contextmanager
def kept_checkpoints(
    recipe_dir: Path, identity: Mapping[str, str], *, keep: int, owner: bool = True
) -> Iterator[Checkpoints]:
    """The checkpoints of the training that `identity` identifies, which no other process touches meanwhile.

    Waits for a process that does: one that a killed dvc left behind, saving its work. A block that ends without an
    error has finished the training: `remove_finished` may then take its checkpoints away.

    owner: False for all but the first of several processes that train together.
    Raises UserError where nothing can be written there.
    """
    checkpoints = Checkpoints(folder=recipe_dir / digest_of(identity), keep=keep)
    if not owner:
        yield checkpoints
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(checkpoints.folder))
            (checkpoints.folder / FINISHED).unlink(missing_ok=True)
            for path in checkpoints.folder.glob(".*.partial"):  # of a process that was killed
                shutil.rmtree(path, ignore_errors=True)
            publish_text(json.dumps(identity, indent=2) + "\n", checkpoints.folder / IDENTITY)
        except OSError as error:
            raise UserError(f"{checkpoints.folder} cannot hold checkpoints: {error}") from None
        if not _steps(checkpoints.folder):
            _say_what_differs(checkpoints.folder, identity)
        yield checkpoints
        with suppress(OSError):  # somebody has removed the folder: so much the better
            (checkpoints.folder / FINISHED).touch()


def remove_finished(recipe_dir: Path) -> None:
    """Remove the checkpoints of trainings that have ended, once DVC has kept their outputs."""
    for folder in _idle_trainings(recipe_dir):
        if (folder / FINISHED).exists():
            shutil.rmtree(folder, ignore_errors=True)


def damage(checkpoint: Path) -> str | None:
    """The fault of a checkpoint, None where every file agrees with its manifest.

    Names the file and the manifest, as either may be the damaged one.
    """
    manifest = checkpoint / MANIFEST
    path, says = manifest, ""
    try:
        digests = json.loads(manifest.read_text(encoding="utf-8"))["sha256"]
        if not digests:
            return f"{manifest} is damaged: it names no file"
        for name, digest in digests.items():
            path, says = checkpoint / name, f", though {checkpoint.name}/{MANIFEST} names it"
            if file_digest(path) != digest:
                return f"{path} is not what {checkpoint.name}/{MANIFEST} says"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}{says}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} is damaged: {error}{says}"
    return None


def _remove(checkpoint: Path) -> None:
    """Renamed first: killed meanwhile, this leaves nothing that looks like one, and the next training removes it."""
    aside = checkpoint.with_name(f".{checkpoint.name}.removed.partial")
    if checkpoint.exists():
        with suppress(OSError):
            checkpoint.rename(aside)
            shutil.rmtree(aside)


def _steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, in order."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def _trainings(recipe_dir: Path) -> list[Path]:
    """No links: a stage in a container can make some, and the launcher must not follow them out of what it may see."""
    if not recipe_dir.is_dir():
        return []
    return sorted(path for path in recipe_dir.iterdir() if path.is_dir() and not path.is_symlink())


def _idle_trainings(recipe_dir: Path) -> Iterator[Path]:
    """Those that nobody works on, nor can until the next is asked for. A training holds its own lock itself."""
    for folder in _trainings(recipe_dir):
        with suppress(OSError), open_lock(folder) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder


def _thin_out(recipe_dir: Path, keep: int) -> None:
    """Keep the `keep` last written checkpoints of a recipe's idle trainings."""
    found = [folder / f"step-{step:06d}" for folder in _idle_trainings(recipe_dir) for step in _steps(folder)]
    by_age = sorted(found, key=lambda path: path.stat().st_mtime_ns)
    surplus = by_age[: max(0, len(by_age) - keep)]
    for folder in _idle_trainings(recipe_dir):
        for path in surplus:
            if path.parent == folder:
                _remove(path)
        if not _steps(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _say_what_differs(own: Path, identity: Mapping[str, str]) -> None:
    """Why the work of other trainings is not gone on from."""
    for folder in _trainings(own.parent):
        if folder != own and (steps := _steps(folder)):
            try:
                theirs = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
                unlike = [name for name, value in identity.items() if theirs.get(name) != value]
            except (OSError, ValueError, AttributeError):
                unlike = []
            what = f" (unlike this one in: {', '.join(unlike)})" if unlike else ""
            log.info("step %d was saved by another training%s; not gone on from", steps[-1], what)


def locked(folder: Path, kind: int = fcntl.LOCK_EX) -> TextIO:
    """The folder's lock, open and held, alone or with LOCK_SH shared; makes the folder, and waits for others."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_lock(folder)
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process is at work in %s, or saving its work; waiting for its end", folder)
            fcntl.flock(lock, kind)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), (folder / LOCK).stat()):
                return lock
        lock.close()  # whoever held it has removed the folder


def open_lock(folder: Path) -> TextIO:
    return os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")


def _to_disk(path: Path) -> None:
    """fsync of a file or a folder: it then outlives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
