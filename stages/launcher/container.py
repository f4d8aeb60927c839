"""Parts that the engines with containers share: what of the machine a stage sees, and the engine's client.

A stage sees the code and its declared inputs, read-only, and the parents of its outputs, in which it writes. Everything
keeps its path, so that a path in a log, a lineage or a link means the same inside and outside.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TextIO

from pydantic import TypeAdapter

from stages.core.environment import CERTIFICATES, container_environment
from stages.core.errors import UserError
from stages.core.given_files import stays_inside
from stages.core.locks import hold
from stages.core.provenance import Machine
from stages.launcher.inside import LAUNCHER_LOCK, READY
from stages.launcher.pipeline import Request, cache_dir
from stages.launcher.process import Ended, Image, forwarded_signals, wait_for

CODE = ("params.yaml", "stages")
READY_S = 10.0
"""Time that a signal waits for the container to report that it handles signals; a stage could remove that report."""


class NotUsable(UserError):
    """This machine's engine cannot run a stage of this checkout; the message gives the reason."""


class NoImage(NotUsable):
    """The engine works here, and lacks the image of this checkout."""


class StageFolder:
    """The launcher's own files of a stage in a workspace, one folder for each node: its lock, and those of one run."""

    def __init__(self, request: Request) -> None:
        self.stage = request.require_declared().name
        name = f"{self.stage}-node-{request.node}" if request.node else self.stage
        own_dir = request.workspace_dir / ".bakeoff/stages" / name
        self.lock_path = own_dir / "lock"
        """Locked (flock) as long as the launcher lives."""
        self.run_dir = own_dir / "run"
        self.ready_path = self.run_dir / "ready"
        """Written by the container when it handles signals."""
        self.scratch_dir = self.run_dir / "scratch"
        """For an engine that keeps /tmp on a disk."""

    def alone(self) -> AbstractContextManager[TextIO]:
        """Hold the lock of this stage. Raises UserError if another launcher runs the same stage in this workspace."""
        return hold(self.lock_path, f"{self.stage} is already running in this workspace; wait for it, or end it")

    @contextmanager
    def new_run(self) -> Iterator[None]:
        """Make the files of one run, and remove them at the end."""
        shutil.rmtree(self.run_dir, ignore_errors=True)  # left by a killed launcher
        try:
            self.scratch_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.lock_path.touch()
            self.ready_path.write_bytes(b"")
            yield
        finally:
            shutil.rmtree(self.run_dir, ignore_errors=True)


@dataclass(frozen=True)
class Mount:
    source: Path
    target: Path
    writable: bool = False

    def option(self) -> str:
        """The value of `--mount` for docker, podman and apptainer."""
        fields = ("type=bind", f"source={self.source}", f"target={self.target}")
        return csv_line(*fields) if self.writable else csv_line(*fields, "readonly")


def csv_line(*fields: str) -> str:
    """Clients read the value of `--mount` as CSV; a path may hold a comma."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def mounts(request: Request, image: Image | None, folder: StageFolder) -> list[Mount]:
    """Every mount of the container, parents before what lies in them. Makes the folders in which the stage writes.

    Raises UserError if an input leads to something that the stage may not see.
    """
    stage, workspace_dir = request.require_declared(), request.workspace_dir
    output_dirs = {(workspace_dir / output).parent for output in stage.written}
    writable = [each for each in sorted(output_dirs) if output_dirs.isdisjoint(each.parents)]
    writable += [*request.cache_dirs(image).values(), *request.kept_dirs]
    for path in writable:
        path.mkdir(parents=True, exist_ok=True)
    # The stage reports a missing input.
    paths = (workspace_dir / path for path in (*CODE, *stage.inputs("data")))
    inputs = [path for path in paths if path.exists()]
    read_only = [Mount(path, path) for path in inputs]
    read_only += _links_into_cache(inputs, cache_dir(workspace_dir))
    source_dir = request.source_dir
    if source_dir is not None and source_dir.exists():
        read_only += [Mount(source_dir, source_dir), *_links_of_source(source_dir)]
    if request.network:
        certificates = {Path(request.caller.get(name) or ".") for name in CERTIFICATES}
        read_only += [Mount(path, path) for path in sorted(certificates) if path.is_absolute() and path.exists()]
    everything = [
        *(Mount(path, path, writable=True) for path in writable),
        Mount(folder.ready_path, READY, writable=True),
        # An input is read-only also where an output lies beside it: DVC may have linked it to its cache.
        *read_only,
        Mount(folder.lock_path, LAUNCHER_LOCK),
    ]
    # One for each target: a source may be a declared input too.
    return sorted({mount.target: mount for mount in everything}.values(), key=lambda mount: len(mount.target.parts))


def _links_into_cache(inputs: Iterable[Path], cache: Path) -> list[Mount]:
    """The workspace's DVC cache, if DVC links outputs to it (cache.type symlink). Any other link is refused."""
    folders = set()
    for link in (link for path in inputs for link in _links(path)):
        target = _literal_target(link)
        folder = target.parent.parent  # of .../files/md5/ab/c0ffee...
        if not link.exists() or folder.resolve() != cache.resolve():
            raise UserError(
                f"{link} is a link to {target}, which is not in DVC's cache ({cache}), so a container cannot see it; "
                f"put the file itself there"
            )
        folders.add(folder)
    return [Mount(folder.resolve(), folder) for folder in sorted(folders)]


def _links_of_source(source_dir: Path) -> list[Mount]:
    """Targets of links in a source folder, as in the hub's cache.

    A link that leads out of it has no target in a container; the stage refuses it when it would read it.
    """
    links = [link for link in _links(source_dir) if link.exists() and link != source_dir]
    links = [link for link in links if stays_inside(link, source_dir)]
    return [Mount(link.resolve(), _literal_target(link)) for link in links]


def _links(path: Path) -> Iterator[Path]:
    return (each for each in (path, *path.rglob("*")) if each.is_symlink())


def _literal_target(link: Path) -> Path:
    """The target as the link has it: inside, all folders on the way are real."""
    return Path(os.path.normpath(link.parent / link.readlink()))


@dataclass(frozen=True, kw_only=True)
class SealedEngine:
    """An engine that runs each stage in a fresh, sealed container."""

    name: str
    image: Image
    """The name is made from the hash of what it is built from; the digest is what is run, as the name could be given to
    another image."""

    def run(self, request: Request) -> Ended:
        """Run a stage on its declared inputs; it writes its outputs in their places.

        Signals that ask to end go on to the stage, which decides how to end. If the launcher is killed, the first
        process of the container ends the stage.
        """
        folder = StageFolder(request)
        try:
            with folder.new_run():
                code = self.run_container(request, mounts(request, self.image, folder), folder)
                machine = None
                with suppress(OSError, ValueError):  # the stage could have overwritten what its container reported
                    machine = TypeAdapter(Machine).validate_json(folder.ready_path.read_bytes())
                return Ended(code=code, machine=machine)
        except OSError as error:  # no space, no permission, a read-only file system
            raise UserError(f"the files of {folder.stage} cannot be written: {error}") from error

    def run_container(self, request: Request, mounts: list[Mount], folder: StageFolder) -> int:
        """Start the container with these mounts; returns the stage's exit code."""
        raise NotImplementedError

    def variables(self, request: Request, *, terminal: bool) -> tuple[list[str], dict[str, str]]:
        """(names of the caller's variables that a container gets, further variables with their values)."""
        passed, given = container_environment(
            request.stage,
            request.caller,
            network=request.network,
            terminal=terminal,
            native=request.params.active.memory.native,
            num_nodes=request.num_nodes,
        )
        return passed, {**given, **request.variables(self.image), "BAKEOFF_IMAGE": self.image[1]}


def first_process(request: Request) -> list[str]:
    """The command of a container. The files that it makes get the rights that the launcher's umask leaves."""
    os.umask(umask := os.umask(0o077))
    return ["python", "-m", "stages.launcher.inside", f"{umask:03o}", *request.command]


def run_client(
    command: Sequence[str],
    ready_path: Path,
    *,
    environment: Mapping[str, str] | None = None,
    send: Callable[[int, subprocess.Popen[bytes]], bool],
    failed: Callable[[int], int],
) -> int:
    """Run the client of an engine, which shows the stage's output; returns the stage's exit code.

    Signals that ask to end go on to the container as soon as it has written to `ready_path`, which means that it
    handles them. send: passes one on, given the client; returns whether the container received it.
    failed: called with the client's code if it failed (128 + n after signal n); returns the stage's.
    """
    with forwarded_signals() as signals:
        # In its own process group, a Ctrl-C reaches the stage once, from here.
        client = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)

        def forward(number: int) -> None:
            patience_ends = time.monotonic() + READY_S
            while client.poll() is None:
                ready = ready_path.exists() and ready_path.stat().st_size > 0
                if (ready or time.monotonic() > patience_ends) and send(number, client):
                    return
                time.sleep(0.05)

        signals.forward_to(lambda number: Thread(target=forward, args=(number,), daemon=True).start())
        if code := wait_for(client):
            code = failed(code)
    return signals.code_of_stage(code)
