"""The outputs of a stage in a container: written aside, moved into the workspace when it ended well.

The stage sees empty, writable folders where its outputs belong, and nothing else of the workspace that it can write
to. What dvc.yaml declares is taken from them; any other file there makes the run fail.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stages.kit.containers.pipeline import DeclaredStage
from stages.kit.errors import UserError

ASIDE_DIR = Path("data/.outputs")
"""On the file system of the outputs, so that taking them is a rename."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where a stage may write. What is a string is a path relative to the workspace."""

    workspace_dir: Path
    run_dir: Path
    declared: tuple[str, ...]
    inputs: tuple[str, ...]
    """What of the workspace the stage is to see, read-only."""

    @property
    def lock_path(self) -> Path:
        """Locked (flock) for as long as the launcher lives."""
        return self.run_dir / "lock"

    @property
    def view_dir(self) -> Path:
        """The workspace as the stage sees it: empty files and folders, on which all else is mounted."""
        return self.run_dir / "view"

    @property
    def written_dir(self) -> Path:
        """What the stage writes, under its paths in the workspace; and empty ones, for inputs in the same folders."""
        return self.run_dir / "written"

    @property
    def folders(self) -> tuple[str, ...]:
        """The writable folders: the parents of the outputs, none inside another."""
        parents = {PurePosixPath(out).parent for out in self.declared}
        return tuple(sorted(str(folder) for folder in parents if parents.isdisjoint(folder.parents)))

    def take(self) -> None:
        """Move the outputs to their places; what lay there is replaced.

        Raises UserError, and takes nothing, where the stage wrote anything else.
        """
        if strays := sorted(self._strays()):
            shown = ", ".join(strays[:3]) + (f" and {len(strays) - 3} more" if len(strays) > 3 else "")
            raise UserError(f"the stage wrote {shown}, which dvc.yaml does not declare; none of its outputs is taken")
        for out in self.declared:
            written, place = self.written_dir / out, self.workspace_dir / out
            if not written.exists():
                continue  # DVC names it
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(written, place)

    def _strays(self) -> Iterator[str]:
        known = {PurePosixPath(path) for path in (*self.declared, *self.inputs)}
        for folder, _, files in os.walk(self.written_dir):
            for file in files:
                path = PurePosixPath(folder, file).relative_to(self.written_dir)
                if known.isdisjoint((path, *path.parents)):
                    yield str(path)


@contextmanager
def claimed_outputs(workspace_dir: Path, stage: DeclaredStage, inputs: Sequence[str]) -> Iterator[Outputs]:
    """Empty folders for the outputs of a stage, removed in the end whatever becomes of it.

    inputs: what of the workspace the stage is to see; all of it exists.
    Raises UserError where another launcher runs the same stage in this workspace.
    """
    outputs = Outputs(
        workspace_dir=workspace_dir,
        run_dir=workspace_dir / ASIDE_DIR / stage.name,
        declared=stage.outs,
        inputs=tuple(inputs),
    )
    outputs.run_dir.mkdir(parents=True, exist_ok=True)
    # The lock file stays: were it removed, two launchers could each lock one of its name.
    with outputs.lock_path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{stage.name} is already running in this workspace; wait for it, or end it") from None
        lock.truncate(0)
        _clear(outputs)  # what a killed launcher left
        try:
            _lay_out(outputs)
            yield outputs
        finally:
            _clear(outputs)


def _clear(outputs: Outputs) -> None:
    for folder in (outputs.view_dir, outputs.written_dir):
        shutil.rmtree(folder, ignore_errors=True)


def _lay_out(outputs: Outputs) -> None:
    folders = {PurePosixPath(folder) for folder in outputs.folders}
    for folder in outputs.folders:
        (outputs.view_dir / folder).mkdir(parents=True)
        (outputs.written_dir / folder).mkdir(parents=True)
    for path in outputs.inputs:
        below_outputs = not folders.isdisjoint(PurePosixPath(path).parents)
        place = (outputs.written_dir if below_outputs else outputs.view_dir) / path
        if (outputs.workspace_dir / path).is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
