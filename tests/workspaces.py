"""Workspaces in which tests run commands as a person would type them."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import ROOT
from tests.launcher.small_checkout import CALLER, Command

LIMIT_S = 600
"""For a command on one stage, which takes some ten seconds, or on several: a longer one hangs."""
GRACE_S = 150
"""For processes to end after their command: more than a stage has to save its work."""

Meanwhile = Callable[["subprocess.Popen[bytes]"], None]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that was run."""

    command: str
    code: int
    output: str
    left_running: tuple[str, ...]
    """Processes of the workspace that did not end in time, and were killed."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """A copy of the pipeline in which commands run."""

    folder: Path
    environment: Mapping[str, str]

    def dvc(self, *arguments: str, meanwhile: Meanwhile | None = None) -> Ended:
        return self.python("-m", "dvc", *arguments, meanwhile=meanwhile)

    def python(self, *arguments: str, meanwhile: Meanwhile | None = None) -> Ended:
        """Run a command to its end. meanwhile: called with the process once it has started."""
        command = Command(self.folder, sys.executable, *arguments, env=self.environment)
        process = command.process
        try:
            if meanwhile is not None:
                meanwhile(process)
            process.wait(LIMIT_S)
        finally:
            left = self.wait_for_processes(0 if process.poll() is None else GRACE_S)
        return Ended(command=" ".join(arguments), code=process.returncode, output=command.output, left_running=left)

    def wait_for_processes(self, seconds: float) -> tuple[str, ...]:
        """Wait until no process works in the workspace; those that still do are killed and returned."""
        until = time.monotonic() + seconds
        while (running := list(self.processes())) and time.monotonic() < until:
            time.sleep(0.05)
        names = []
        for process in running:
            with suppress(psutil.Error):  # it has ended meanwhile
                names.append(" ".join(process.cmdline()[-3:]))
                process.kill()
        psutil.wait_procs(running)
        return tuple(names)

    def processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(self.folder):
                    yield process
            except (psutil.Error, OSError):  # it has ended, or is another account's
                continue


def workspace_in(folder: Path) -> Workspace:
    """A workspace with a folder of its own for temporary files, beside it; DVC's state of files lies within."""
    scratch_dir = folder.with_name(f"{folder.name}.tmp")
    scratch_dir.mkdir(parents=True, exist_ok=True)
    own = {"DVC_SITE_CACHE_DIR": str(folder / ".dvc/tmp/site"), "TMPDIR": str(scratch_dir)}
    one_thread = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    return Workspace(folder=folder, environment={**CALLER, **own, **one_thread, "HF_HUB_OFFLINE": "1"})


def clone_checkout(folder: Path) -> None:
    """Clone this checkout, with its changed and untracked files, but for dvc.lock: DVC may be writing it just now."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    git("clone", "--quiet", "--shared", str(ROOT), str(folder))
    changed = git("diff", "--name-only", "--no-renames", "-z", "HEAD")
    untracked = git("ls-files", "-z", "--others", "--exclude-standard")
    for name in {*(changed + untracked).split("\0")} - {"", "dvc.lock"}:
        place = folder / name
        place.unlink(missing_ok=True)
        if (ROOT / name).is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place)


def copy_folder(source: Path, folder: Path) -> None:
    """Hard links within it stay hard links, and none leads back."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", f"{source}/.", str(folder)], check=True)


def require_clean_end(ended: Ended) -> None:
    """It ended without a traceback, and left no process running."""
    assert not ended.left_running, f"{ended.command} left running: {ended.left_running}"
    assert "Traceback (most recent call last):\n" not in ended.output, ended.output
