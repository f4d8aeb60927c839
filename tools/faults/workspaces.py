"""Workspaces that commands are run in, and a small pipeline that nobody disturbed, of which copies are disturbed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML

from stages.kit.launcher.pipeline import DeclaredStage, declared_stages
from tools.faults import moment

ROOT = Path(__file__).parents[2]
RECIPE = "r1-llm-only"
CHAIN = (
    "check",
    "base@vlm",
    "prepare@nutrition-tables",
    *(f"{kind}@{RECIPE}" for kind in ("plan", "train", "merge", "evaluate")),
)
TARGET = CHAIN[-1]
LIMIT_S = 300
"""Of a command on one stage of it, which takes some ten seconds: what takes that long hangs."""
GRACE_S = 150
"""What processes have to be gone, after a command has ended: more than a stage has to save its work."""


class CannotRun(Exception):
    """Something that this tool needs is not here."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that was run."""

    command: str
    code: int | None
    """None: it had not ended by the limit, and was killed."""
    said: str
    left_running: tuple[str, ...]
    """Processes of the workspace that were not gone in time, and were killed."""


@dataclass(frozen=True)
class Change:
    """One change of the disk that a process made."""

    number: int
    """Counted from 1, in that process."""
    event: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """A copy of the pipeline, of which commands are run as a person would."""

    folder: Path
    environment: Mapping[str, str]
    limit_s: float = LIMIT_S
    """Of one command."""

    def stages(self) -> list[DeclaredStage]:
        """Those of the chain."""
        return [stage for stage in declared_stages(self.folder) if stage.name in CHAIN]

    def dvc(self, *arguments: str, meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None) -> Ended:
        return self.run("-m", "dvc", *arguments, meanwhile=meanwhile)

    def verify(self, *arguments: str) -> Ended:
        return self.run("-m", "tools.verify", *arguments)

    def shell(self, command: str) -> Ended:
        """A command that a message names."""
        if command.startswith("make verify"):
            return self.verify(*(["--restore"] if "RESTORE=1" in command else []))
        return self._run(["bash", "-c", command], shown=command)

    def run(self, *arguments: str, meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None) -> Ended:
        shown = " ".join(arguments).removeprefix("-m ")
        return self._run([self.environment["PYTHON"], *arguments], shown=shown, meanwhile=meanwhile)

    def start(self, command: list[str], log: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _run(
        self, command: list[str], *, shown: str, meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None
    ) -> Ended:
        log_path = self.folder.with_name(f"{self.folder.name}.log")
        with log_path.open("a+b") as log:
            log.write(f"\n$ {shown}\n".encode())
            log.flush()
            began = log.tell()
            process = self.start(command, log)
            hung = threading.Event()

            def end() -> None:
                hung.set()
                self.kill_all()

            deadline = threading.Timer(self.limit_s, end)
            deadline.start()
            try:
                if meanwhile is not None:
                    meanwhile(process)
                process.wait()
            finally:
                deadline.cancel()
                deadline.join()
                left = self.wait_for_the_rest(0 if hung.is_set() or process.poll() is None else GRACE_S)
            log.seek(began)
            said = log.read().decode("utf-8", errors="replace")
        return Ended(command=shown, code=None if hung.is_set() else process.returncode, said=said, left_running=left)

    def wait_for_the_rest(self, seconds: float) -> tuple[str, ...]:
        """Wait until nobody works in the workspace; whoever still does is killed, and returned."""
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
        """All in the workspace at once, as where the power fails: nobody is left to hear of another's end."""
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
            except (psutil.Error, OSError):  # it is gone, or somebody else's
                continue

    def process_of(self, role: str) -> psutil.Process | None:
        """The one that now is dvc, launcher or stage here."""
        for process in self.processes():
            with suppress(psutil.Error):
                if moment.role_of(process.cmdline()) == role:
                    return process
        return None

    def order(self, **what: Any) -> None:
        """To moment.py."""
        path = self.folder / moment.ORDER
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(what), encoding="utf-8")

    def take_order_back(self) -> bool:
        """Whether what was ordered came about."""
        path = self.folder / moment.ORDER
        path.unlink(missing_ok=True)
        done = path.with_suffix(".done")
        came = done.exists()
        done.unlink(missing_ok=True)
        return came


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The undisturbed pipeline. Nothing of it is ever written to again."""

    root: Path
    environment: Mapping[str, str]
    seconds: Mapping[str, float]
    """That each stage took."""
    changes: Mapping[tuple[str, str], list[Change]]
    """What each kind of process changed on the disk, in its order, by (stage, dvc or launcher or stage)."""

    @property
    def finished_dir(self) -> Path:
        return self.root / "finished"

    def before_dir(self, stage: str) -> Path:
        return self.root / "before" / stage

    def after_dir(self, stage: str) -> Path:
        later = CHAIN[CHAIN.index(stage) + 1 :]
        return self.before_dir(later[0]) if later else self.finished_dir

    def copied(self, source: Path, folder: Path) -> Workspace:
        """Hard links within stay hard links, and none leads back."""
        _copy(source, folder)
        return workspace_in(folder, self.environment)


def build_reference(root: Path, say: Callable[[str], None]) -> Reference:
    """Run the chain, stage by stage, in a clone of this checkout that holds what is not committed too.

    Raises CannotRun where git, dvc or the pipeline itself does not work.
    """
    # One thread: with so little to do, more are no faster.
    environment = {**make_environment(root), "OMP_NUM_THREADS": "1"}
    workspace = workspace_in(root / "workspace", environment)
    clone_checkout(workspace.folder)
    _make_small(workspace.folder)
    (root / "before").mkdir()
    seconds: dict[str, float] = {}
    changes: dict[tuple[str, str], list[Change]] = {}
    for name in CHAIN:
        _copy(workspace.folder, root / "before" / name)
        counts = root / "counts" / name
        counts.mkdir(parents=True)
        workspace.order(role="all", count=str(counts / "of"))
        began = time.monotonic()
        ended = workspace.dvc("repro", name)
        seconds[name] = time.monotonic() - began
        workspace.take_order_back()
        if ended.code != 0:
            raise CannotRun(f"the undisturbed pipeline itself fails, in {name}:\n{ended.said}")
        for role in ("dvc", "launcher", "stage"):
            path = counts / f"of-{role}"
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            changes[name, role] = [Change(at, *json.loads(line)) for at, line in enumerate(lines, start=1)]
        say(f"  {name}: {seconds[name]:.0f} s")
    workspace.folder.rename(root / "finished")
    return Reference(root=root, environment=environment, seconds=seconds, changes=changes)


def workspace_in(folder: Path, environment: Mapping[str, str], *, limit_s: float = LIMIT_S) -> Workspace:
    """With folders of its own for what is temporary, beside it."""
    # What DVC remembers of files lies with them, and what stages put aside is looked for too.
    scratch_dir = folder.with_name(f"{folder.name}.tmp")
    scratch_dir.mkdir(parents=True, exist_ok=True)
    own = {"DVC_SITE_CACHE_DIR": str(folder / ".dvc/tmp/site"), "TMPDIR": str(scratch_dir)}
    return Workspace(folder=folder, environment={**environment, **own}, limit_s=limit_s)


def make_environment(root: Path) -> dict[str, str]:
    """Of every command; with it goes a Python that is this one, but for moment.py.

    Raises CannotRun where git or dvc does not work.
    """
    if shutil.which("git") is None:
        raise CannotRun("git is not installed")
    venv_dir, no_config_dir = root / "venv", root / "no-config"
    venv.create(venv_dir, symlinks=True)
    (site_dir,) = venv_dir.glob("lib/python*/site-packages")
    own = sysconfig.get_path("purelib")
    (site_dir / "project.pth").write_text(f"import site; site.addsitedir({own!r})\n", encoding="utf-8")
    shutil.copyfile(moment.__file__, site_dir / "sitecustomize.py")
    python = venv_dir / "bin/python"
    dvc = venv_dir / "bin/dvc"
    dvc.write_text(f'#!/bin/sh\nexec "{python}" -m dvc "$@"\n', encoding="utf-8")
    dvc.chmod(0o755)
    no_config_dir.mkdir()
    checked = subprocess.run([python, "-m", "dvc", "--version"], cwd=root, capture_output=True, text=True, check=False)
    if checked.returncode != 0:
        raise CannotRun(f"dvc does not run with {sys.executable}; make setup installs it:\n{checked.stderr}")
    return {
        "PATH": f"{venv_dir / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "HOME": os.environ.get("HOME", str(root)),
        "LANG": "C.UTF-8",
        "PYTHON": str(python),
        "VIRTUAL_ENV": str(venv_dir),
        "BAKEOFF_ENGINE": "process",
        "OMP_WAIT_POLICY": "PASSIVE",
        # A person's own may have all their clones share a cache.
        "DVC_GLOBAL_CONFIG_DIR": str(no_config_dir),
        "DVC_SYSTEM_CONFIG_DIR": str(no_config_dir),
        "DVC_NO_ANALYTICS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def clone_checkout(folder: Path) -> None:
    """Commits are shared with this checkout; what it has of uncommitted and unignored files, staged or not, goes along.

    Raises CannotRun where git cannot.
    """

    def git(*arguments: str) -> str:
        ended = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            raise CannotRun(f"git {arguments[0]} failed: {ended.stderr.strip()}")
        return ended.stdout

    git("clone", "--quiet", "--shared", str(ROOT), str(folder))
    changed = git("diff", "--name-only", "--no-renames", "-z", "HEAD")
    untracked = git("ls-files", "-z", "--others", "--exclude-standard")
    for name in filter(None, (changed + untracked).split("\0")):
        place = folder / name
        place.unlink(missing_ok=True)
        if (ROOT / name).is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place)


@contextmanager
def tiny_params(folder: Path) -> Iterator[Any]:
    """params.yaml of a workspace, to be changed: of the tiny profile, and with nobody told, whatever it was here."""
    yaml, path = YAML(), folder / "params.yaml"
    raw = yaml.load(path)
    raw["profile"] = "tiny"
    raw["tracking"]["wandb"] = False
    yield raw
    yaml.dump(raw, path)


def _make_small(folder: Path) -> None:
    """Few samples and steps, each second step saved."""
    with tiny_params(folder) as raw:
        tiny = raw["profiles"]["tiny"]
        tiny["datasets"]["nutrition-tables"]["generate"] = {"train": 16, "val": 4, "seed": 1}
        tiny["images"] = {"min_pixels": 3136, "max_pixels": 12544}
        tiny["memory"]["micro_batch"] = 2
        tiny["evaluation"].update(batch_size=4, max_new_tokens=8)
        raw["checkpoints"].update(every_minutes=None, every_steps=2)
        raw["recipes"][RECIPE].update(effective_batch=4, epochs=2)


def _copy(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", f"{source}/.", str(folder)], check=True)


def size_bytes(folder: Path) -> int:
    """That a folder takes on a disk."""
    return sum({stat.st_ino: stat.st_blocks * 512 for stat in (path.lstat() for path in folder.rglob("*"))}.values())


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[int | None], None]]:
    """A disk of its own at `folder`; the function leaves so many bytes of it free, or, told None, plenty."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4g", "none", str(folder)], check=True)

    def leave(room: int | None) -> None:
        disk = os.statvfs(folder)
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        size = "4g" if room is None else str(max(used + room, disk.f_frsize))
        subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)

    try:
        yield leave
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
