"""Workspaces in which tests run commands as a person would type them, and a small pipeline that ran in one."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from stages.core.params import load_params
from stages.core.params.schema import made_by
from tests import ROOT
from tests.documents import write_yaml
from tests.launcher.small_checkout import CALLER, Command
from tests.stage_runs import small_params
from tools.verify.rerun import unequal_files

RECIPE = "r1-llm-only"


def chain_of(recipe: str) -> tuple[str, ...]:
    """The stages that lead to a recipe's evaluation, if its base is none that another made."""
    found = load_params(ROOT / "params.yaml").recipe(recipe)
    stages = (f"{kind}@{recipe}" for kind in ("plan", "train", "merge", "evaluate"))
    return (made_by(found.base), f"prepare@{found.data}", *stages)


CHAIN = chain_of(RECIPE)
TARGET = CHAIN[-1]
LIMIT_S = 600
"""For a command on one stage of it, which takes some ten seconds, or on all: a longer one hangs."""
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

    def kill_all(self) -> None:
        """All processes at once, as in a power failure: none learns of another's end."""
        running = list(self.processes())
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in running:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(self.folder):
                    yield process
            except (psutil.Error, OSError):  # it has ended, or is another account's
                continue


def build_reference(root: Path, recipe: str = RECIPE) -> Path:
    """Run the stages of a recipe, one by one, in a clone of this checkout that also has what is not committed.

    Returns the root: `before/STAGE` is the workspace before each stage, `finished` that after the last one.
    """
    workspace = workspace_in(root / "workspace")
    clone_checkout(workspace.folder)
    raw = small_params(root="")
    raw["checkpoints"].update(every_minutes=None, every_steps=2)
    raw["recipes"][recipe]["epochs"] = 2
    write_yaml(raw, workspace.folder / "params.yaml")
    for name in chain_of(recipe):
        copy_folder(workspace.folder, root / "before" / name)
        ended = workspace.dvc("repro", name)
        assert ended.code == 0, ended.output
    workspace.folder.rename(root / "finished")
    return root


def workspace_in(folder: Path) -> Workspace:
    """A workspace with a folder of its own for temporary files, beside it; DVC's state of files lies within."""
    scratch_dir = folder.with_name(f"{folder.name}.tmp")
    scratch_dir.mkdir(parents=True, exist_ok=True)
    own = {"DVC_SITE_CACHE_DIR": str(folder / ".dvc/tmp/site"), "TMPDIR": str(scratch_dir)}
    one_thread = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    return Workspace(folder=folder, environment={**CALLER, **own, **one_thread, "HF_HUB_OFFLINE": "1"})


def clone_checkout(folder: Path) -> None:
    """Clone this checkout, with its changed and untracked files."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    git("clone", "--quiet", "--shared", str(ROOT), str(folder))
    changed = git("diff", "--name-only", "--no-renames", "-z", "HEAD")
    untracked = git("ls-files", "-z", "--others", "--exclude-standard")
    for name in filter(None, (changed + untracked).split("\0")):
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


def require_same_end(folder: Path, reference: Path, outputs: Iterable[str]) -> None:
    """Every output has the bytes of the reference, times and memory aside, and nothing else was left behind."""
    assert not unequal_files(reference, folder, tuple(outputs))
    strays = _files(folder) - _files(reference)
    # A launcher that waited for a job left its lock; until a training is merged, its checkpoints are there.
    assert [name for name in sorted(strays) if Path(name).name != "waiter" and "/step-" not in name] == []


def _files(folder: Path) -> set[str]:
    """Files, and folders that are hidden or partial, where nothing may be left behind."""
    return {
        path.relative_to(folder).as_posix()
        for top in ("data", ".bakeoff/checkpoints")
        for path in (folder / top).rglob("*")
        if path.is_file() or path.name.startswith(".") or "partial" in path.name
    }
