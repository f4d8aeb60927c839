"""The outputs of a stage in a container: written aside, moved into the workspace when it ended well.

The stage sees empty, writable folders where its outputs belong, and nothing else of the workspace that it can write
to. What dvc.yaml declares is taken from them; anything else there makes the run fail.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from stages.core.errors import UserError, some
from stages.kit.launcher.pipeline import DeclaredStage

ASIDE_DIR = Path("data/.outputs")
"""On the file system of the outputs, so that taking them is a rename."""


class Outputs:
    """Where a stage may write."""

    def __init__(self, stage: DeclaredStage, workspace_dir: Path, *, node: int = 0) -> None:
        """node: which of those that the stage runs on; only the first one's outputs are to be taken."""
        self.stage, self.workspace_dir = stage, workspace_dir
        run_dir = workspace_dir / ASIDE_DIR / stage.name / (f"node-{node}" if node else "")
        self.lock_path = run_dir / "lock"
        """Locked (flock) for as long as the launcher lives."""
        self.ready_path = run_dir / "ready"
        """Written to by the container when signals arrive there."""
        self.link_path = run_dir / "link"
        """A name for a link while it is made."""
        self.view_dir = run_dir / "view"
        """The workspace as the stage sees it: empty files and folders, on which all else is mounted."""
        self.written_dir = run_dir / "written"
        """The files that the stage writes, under their paths in the workspace."""
        self.scratch_dir = run_dir / "scratch"
        """For an engine that keeps /tmp on a disk."""

    @property
    def folders(self) -> tuple[str, ...]:
        """The writable folders, relative to the workspace: the parents of the outputs, none inside another."""
        parents = {PurePosixPath(out).parent for out in self.stage.written}
        return tuple(sorted(str(folder) for folder in parents if parents.isdisjoint(folder.parents)))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other launcher runs the same stage in this workspace meanwhile. Raises UserError where one does."""
        self.lock_path.parent.mkdir(parents=True, exist_ok=True)
        # The lock file stays: were it removed, two launchers could each lock one of its name.
        with self.lock_path.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"{self.stage.name} is already running in this workspace; wait for it, or end it"
                raise UserError(message) from None
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Empty folders for the outputs of a stage that runs alone, removed in the end whatever becomes of it."""
        temporary = (self.view_dir, self.written_dir, self.scratch_dir, self.ready_path)
        for path in temporary:
            remove(path)  # what a killed launcher left
        try:
            self.view_dir.mkdir(parents=True)
            self.scratch_dir.mkdir(mode=0o700)
            self.written_dir.mkdir()
            for folder in self.folders:
                (self.written_dir / folder).mkdir(parents=True)
            self.lock_path.touch()
            self.ready_path.touch()
            yield
        finally:
            for path in temporary:
                remove(path)

    def take(self, inputs: list[Path]) -> None:
        """Move the outputs to their places; what lay there is replaced.

        inputs: the empty files and folders in `written_dir` on which inputs were mounted.
        Raises UserError, and takes nothing, where the stage wrote anything else than declared files and folders. A
        link is none: whoever followed it, here or in a later stage, would leave what this stage may see.
        """
        for place in sorted(inputs, reverse=True):
            # Moved away, it would pass for an output.
            if not os.path.lexists(place):
                raise UserError(f"the stage moved its input {self._shown(place)}; none of its outputs is taken")
            remove(place)
        if strays := sorted(self._strays(inputs)):
            raise UserError(
                f"the stage wrote {some(strays, 3)}, which dvc.yaml does not declare; none of its outputs is taken"
            )
        allowed = self.view_dir.stat().st_mode & 0o777  # of a folder just made here: what the caller's umask leaves
        for out in self.stage.written:
            written, place = self.written_dir / out, self.workspace_dir / out
            if not written.exists():
                continue  # DVC names it
            for path in (written, *(_everything_below(written) if written.is_dir() else ())):
                # Nothing that runs as somebody else (setuid), nothing that its owner cannot read, move and remove, and
                # nothing open to more people than `allowed`: in a container another umask holds.
                path.chmod(path.stat().st_mode & allowed | (0o700 if path.is_dir() else 0o400))
            remove(place)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(written, place)

    def _strays(self, inputs: list[Path]) -> Iterator[str]:
        """What may not be taken, for people."""
        declared = {PurePosixPath(out) for out in self.stage.written}
        known = [*declared, *(PurePosixPath(self._shown(path)) for path in inputs)]
        above = {parent for path in known for parent in path.parents}
        for path in _everything_below(self.written_dir):
            inside = PurePosixPath(self._shown(path))
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                yield f"{inside} (a link or a special file)"
            elif declared.isdisjoint((inside, *inside.parents)) and not (stat.S_ISDIR(mode) and inside in above):
                yield str(inside)

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self.written_dir))


def refuse_links_out(workspace_dir: Path, outs: Iterable[str]) -> None:
    """Raises UserError where a folder above one of the paths is a link out of the workspace: stages, and DVC, would
    remove and write there what the person may not know of. A checkout of somebody else can bring such a link.
    """
    for folder in sorted({parent for out in outs for parent in PurePosixPath(out).parents} - {PurePosixPath()}):
        place = workspace_dir / folder
        if place.is_symlink() and not Path(os.path.realpath(place)).is_relative_to(workspace_dir.resolve()):
            raise UserError(
                f"{folder} is a link out of this checkout, to {os.path.realpath(place)}, where stages would remove and "
                "write files; replace it by a folder. To have data on a larger disk, put the checkout there, or DVC's "
                "cache: dvc cache dir --local FOLDER"
            )


def remove(path: Path) -> None:
    """Whatever it is, if it is; a link itself, and not where it leads."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    path.chmod(0o700)
    for inside in _everything_below(path):
        if inside.is_dir() and not inside.is_symlink():
            inside.chmod(0o700)  # from a folder that is read-only nothing can be removed
    shutil.rmtree(path)


def _everything_below(folder: Path) -> Iterator[Path]:
    """Files, folders, links and the rest, parents first; links are not followed. What cannot be read is an OSError."""
    for entry in os.scandir(folder):
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _everything_below(Path(entry.path))
