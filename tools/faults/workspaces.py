"""Workspaces in which commands run, and the reference: a small pipeline that ran undisturbed, to be copied."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sysconfig
import threading
import time
import venv
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
from click import ClickException
from ruamel.yaml import YAML

from stages.kit.launcher.slurm.inside_job import JOB_VARIABLE
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
"""For a command on one stage of it, which takes some ten seconds: a longer one hangs."""
GRACE_S = 150
"""For processes to end after their command: more than a stage has to save its work."""

Meanwhile = Callable[[subprocess.Popen[bytes]], None]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that was run."""

    command: str
    code: int | None
    """None: it had not ended by the limit, and was killed."""
    output: str
    left_running: tuple[str, ...]
    """Processes of the workspace that did not end in time, and were killed."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """A copy of the pipeline in which commands run as a person would type them."""

    folder: Path
    environment: Mapping[str, str]
    limit_s: float = LIMIT_S
    """For one command."""

    def dvc(self, *arguments: str, meanwhile: Meanwhile | None = None) -> Ended:
        return self.python("-m", "dvc", *arguments, meanwhile=meanwhile)

    def verify(self, *arguments: str) -> Ended:
        return self.python("-m", "tools.verify", *arguments)

    def shell(self, command: str) -> Ended:
        """Run a command that a message names."""
        if command.startswith("make verify"):
            return self.verify(*(["--restore"] if "RESTORE=1" in command else []))
        return self._run(["bash", "-c", command], command, None)

    def python(self, *arguments: str, meanwhile: Meanwhile | None = None) -> Ended:
        shown = " ".join(arguments).removeprefix("-m ")
        return self._run([self.environment["PYTHON"], *arguments], shown, meanwhile)

    def _run(self, command: list[str], shown: str, meanwhile: Meanwhile | None) -> Ended:
        hung = threading.Event()

        def end() -> None:
            hung.set()
            self.kill_all()

        with self.folder.with_name(f"{self.folder.name}.log").open("a+b") as log:
            log.write(f"\n$ {shown}\n".encode())
            log.flush()
            began = log.tell()
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            deadline = threading.Timer(self.limit_s, end)
            deadline.start()
            try:
                if meanwhile is not None:
                    meanwhile(process)
                process.wait()
            finally:
                deadline.cancel()
                deadline.join()
                left = self.wait_for_processes(0 if hung.is_set() or process.poll() is None else GRACE_S)
            log.seek(began)
            output = log.read().decode("utf-8", errors="replace")
        code = None if hung.is_set() else process.returncode
        return Ended(command=shown, code=code, output=output, left_running=left)

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

    def process_of(self, role: str) -> psutil.Process | None:
        """The running dvc, launcher or stage; "job": the launcher in a job, which one that waits has submitted."""
        for process in self.processes():
            with suppress(psutil.Error):
                found = moment.role_of(process.cmdline())
                if found == "launcher" and JOB_VARIABLE in process.environ():
                    found = "job"
                if found == role:
                    return process
        return None

    def order(self, **order: Any) -> None:
        """Give moment.py an order."""
        path = self.folder / moment.ORDER
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(order), encoding="utf-8")

    def withdraw_order(self) -> bool:
        """Whether it was carried out."""
        path = self.folder / moment.ORDER
        path.unlink(missing_ok=True)
        came = path.with_suffix(".done").exists()
        path.with_suffix(".done").unlink(missing_ok=True)
        return came


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The undisturbed pipeline. Nothing in it is ever written to again."""

    root: Path
    environment: Mapping[str, str]
    seconds: Mapping[str, float]
    """Of each stage."""
    changes: Mapping[tuple[str, str], list[str]]
    """By (stage, dvc or launcher or stage): the changes that the process made on the disk, e.g. "rename of data/x"."""

    @property
    def finished_dir(self) -> Path:
        return self.root / "finished"

    def before_dir(self, stage: str) -> Path:
        return self.root / "before" / stage

    def after_dir(self, stage: str) -> Path:
        later = CHAIN[CHAIN.index(stage) + 1 :]
        return self.before_dir(later[0]) if later else self.finished_dir


def build_reference(root: Path) -> Reference:
    """Run the chain, stage by stage, in a clone of this checkout that also has what is not committed.

    Raises ClickException where git or the pipeline itself does not work.
    """
    # With so little to do, more threads are no faster.
    environment = {**make_environment(root), "OMP_NUM_THREADS": "1"}
    workspace = workspace_in(root / "workspace", environment)
    clone_checkout(workspace.folder)
    with tiny_params(workspace.folder) as raw:  # few samples and steps, each second step saved
        tiny = raw["profiles"]["tiny"]
        tiny["datasets"]["nutrition-tables"]["limit"] = {"train": 16, "val": 4}
        tiny["images"] = {"min_pixels": 3136, "max_pixels": 12544}
        tiny["memory"]["micro_batch"] = 2
        tiny["evaluation"].update(batch_size=4, max_new_tokens=8)
        raw["checkpoints"].update(every_minutes=None, every_steps=2)
        raw["recipes"][RECIPE].update(effective_batch=4, epochs=2)
    seconds: dict[str, float] = {}
    changes: dict[tuple[str, str], list[str]] = {}
    for name in CHAIN:
        copy_folder(workspace.folder, root / "before" / name)
        log_dir = root / "changes" / name
        log_dir.mkdir(parents=True)
        workspace.order(log=str(log_dir))
        began = time.monotonic()
        ended = workspace.dvc("repro", name)
        seconds[name] = time.monotonic() - began
        workspace.withdraw_order()
        if ended.code != 0:
            raise ClickException(f"the undisturbed pipeline itself fails, in {name}:\n{ended.output}")
        for role in ("dvc", "launcher", "stage"):
            path = log_dir / role
            changes[name, role] = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        click.echo(f"  {name}: {seconds[name]:.0f} s")
    workspace.folder.rename(root / "finished")
    return Reference(root=root, environment=environment, seconds=seconds, changes=changes)


def workspace_in(folder: Path, environment: Mapping[str, str], *, limit_s: float = LIMIT_S) -> Workspace:
    """A workspace with a folder of its own for temporary files, beside it; DVC's state of files lies within."""
    scratch_dir = folder.with_name(f"{folder.name}.tmp")
    scratch_dir.mkdir(parents=True, exist_ok=True)
    own = {"DVC_SITE_CACHE_DIR": str(folder / ".dvc/tmp/site"), "TMPDIR": str(scratch_dir)}
    return Workspace(folder=folder, environment={**environment, **own}, limit_s=limit_s)


def make_environment(root: Path) -> dict[str, str]:
    """The environment of every command, with a Python that is this one plus moment.py."""
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
    return {
        "PATH": f"{venv_dir / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "HOME": os.environ.get("HOME", str(root)),
        "LANG": "C.UTF-8",
        "PYTHON": str(python),
        "VIRTUAL_ENV": str(venv_dir),
        "BAKEOFF_ENGINE": "process",
        "OMP_WAIT_POLICY": "PASSIVE",
        # A person's own configuration may have all clones share a cache.
        "DVC_GLOBAL_CONFIG_DIR": str(no_config_dir),
        "DVC_SYSTEM_CONFIG_DIR": str(no_config_dir),
        "DVC_NO_ANALYTICS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def clone_checkout(folder: Path) -> None:
    """Clone this checkout, with its changed and untracked files. Raises ClickException where git cannot."""

    def git(*arguments: str) -> str:
        ended = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            raise ClickException(f"git {arguments[0]} failed: {ended.stderr.strip()}")
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
    """The params.yaml of a workspace, to be changed: with the tiny profile, and without tracking."""
    yaml, path = YAML(), folder / "params.yaml"
    raw = yaml.load(path)
    raw["profile"] = "tiny"
    raw["tracking"]["wandb"] = False
    yield raw
    yaml.dump(raw, path)


def copy_folder(source: Path, folder: Path) -> None:
    """Hard links within it stay hard links, and none leads back."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", f"{source}/.", str(folder)], check=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[int | None], None]]:
    """A disk of its own at `folder`; the function sets the bytes that are free on it, None for plenty."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4g", "none", str(folder)], check=True)

    def leave(free_bytes: int | None) -> None:
        disk = os.statvfs(folder)
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        size = "4g" if free_bytes is None else str(max(used + free_bytes, disk.f_frsize))
        subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)

    try:
        yield leave
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
