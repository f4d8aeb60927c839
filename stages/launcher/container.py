"""Parts that the engines with containers share: mounts of declared inputs, outputs written aside, the engine's client.

A stage sees its declared inputs, read-only, and empty writable folders in place of its outputs; declared outputs move
into the workspace when it has succeeded, and anything else that it wrote makes the run fail. Everything keeps its path,
so that a path in a log, a lineage or a link means the same inside and outside.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import TextIO

import psutil
from pydantic import TypeAdapter

from stages.core.environment import CERTIFICATES, container_environment
from stages.core.errors import UserError, join_truncated
from stages.core.given_files import stays_inside
from stages.core.locks import hold
from stages.core.provenance import Machine
from stages.launcher.inside import LAUNCHER_LOCK, READY
from stages.launcher.pipeline import DeclaredStage, Request, cache_dir
from stages.launcher.process import Ended, Image, forwarded_signals

INSIDE = ("python", "-m", "stages.launcher.inside")
"""The first process of a container; a stage's name and arguments follow."""
CODE = ("params.yaml", "stages")
ASIDE_DIR = Path("data/.outputs")
"""On the file system of the outputs, so that taking them is a rename."""
DVC_OBJECT = re.compile(r"(/files/md5)/[0-9a-f]{2}/[0-9a-f]{30}")
"""A file in a cache of DVC, to which DVC may link an output."""
READY_S = 10.0
"""Time that a signal waits for the container to report that it handles signals; a stage could remove that report."""


class NotUsable(UserError):
    """This machine's engine cannot run a stage of this checkout; the message gives the reason."""


class NoImage(NotUsable):
    """The engine works here, and lacks the image of this checkout."""


class Outputs:
    """The folders in which a stage writes, and the move of its outputs into the workspace."""

    def __init__(self, stage: DeclaredStage, workspace_dir: Path, *, node: int = 0) -> None:
        """node: index of the machine; only the first one's outputs are taken."""
        self.stage, self.workspace_dir = stage, workspace_dir
        own_dir = workspace_dir / ASIDE_DIR / stage.name / (f"node-{node}" if node else "")
        self.lock_path = own_dir / "lock"
        """Locked (flock) as long as the launcher lives."""
        self.run_dir = own_dir / "run"
        """Folder of one run; it holds all that follows."""
        self.ready_path = self.run_dir / "ready"
        """Written by the container when it handles signals."""
        self.view_dir = self.run_dir / "view"
        """The workspace as the stage sees it: empty files and folders, on which everything else is mounted."""
        self.written_dir = self.run_dir / "written"
        """The files that the stage writes, under their paths in the workspace."""
        self.scratch_dir = self.run_dir / "scratch"
        """For an engine that keeps /tmp on a disk."""

    @property
    def folders(self) -> tuple[str, ...]:
        """The writable folders, relative to the workspace: the parents of the outputs, none inside another."""
        parents = {PurePosixPath(out).parent for out in self.stage.written}
        return tuple(sorted(str(folder) for folder in parents if parents.isdisjoint(folder.parents)))

    def alone(self) -> AbstractContextManager[TextIO]:
        """Hold the lock of this stage. Raises UserError if another launcher runs the same stage in this workspace."""
        return hold(self.lock_path, f"{self.stage.name} is already running in this workspace; wait for it, or end it")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Make empty folders for the outputs, and remove them at the end, whether the stage succeeds or not."""
        remove(self.run_dir)  # left by a killed launcher
        try:
            for folder in (self.view_dir, self.written_dir, *(self.written_dir / folder for folder in self.folders)):
                folder.mkdir(parents=True, exist_ok=True)
            self.scratch_dir.mkdir(mode=0o700)
            self.lock_path.touch()
            self.ready_path.touch()
            yield
        finally:
            remove(self.run_dir)

    def take(self, inputs: list[Path]) -> None:
        """Move the outputs to their places, replacing what is there.

        inputs: the empty files and folders in `written_dir` on which inputs were mounted.
        Raises UserError, and takes nothing, if the stage wrote anything but declared files and folders. Links are
        refused: whoever followed one, here or in a later stage, would leave the folders that the stage may see.
        """
        for place in sorted(inputs, reverse=True):
            # Moved away, it would pass for an output.
            if not os.path.lexists(place):
                raise UserError(f"the stage moved its input {self._shown(place)}; none of its outputs is taken")
            remove(place)
        if strays := sorted(self._strays(inputs)):
            raise UserError(
                f"the stage wrote {join_truncated(strays, 3)}, which dvc.yaml does not declare; no output is taken"
            )
        allowed = self.view_dir.stat().st_mode & 0o777  # the rights that the caller's umask leaves
        for out in self.stage.written:
            written, place = self.written_dir / out, self.workspace_dir / out
            if not written.exists():
                continue  # DVC reports it
            for path in (written, *(_everything_below(written) if written.is_dir() else ())):
                # No setuid, no file that its owner cannot read, move and remove, and none open to more people than
                # `allowed`: the umask in a container is another one.
                path.chmod(path.stat().st_mode & allowed | (0o700 if path.is_dir() else 0o400))
            move(written, place)

    def _strays(self, inputs: list[Path]) -> Iterator[str]:
        declared = {PurePosixPath(out) for out in self.stage.written}
        known = [*declared, *(PurePosixPath(self._shown(path)) for path in inputs)]
        above = {parent for path in known for parent in path.parents}
        for path in _everything_below(self.written_dir):
            inside, mode = PurePosixPath(self._shown(path)), path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                yield f"{inside} (a link or a special file)"
            elif declared.isdisjoint((inside, *inside.parents)) and not (stat.S_ISDIR(mode) and inside in above):
                yield str(inside)

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self.written_dir))


def move(source: Path, place: Path) -> None:
    """Move a file or folder, and replace what is at its place."""
    remove(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(source, place)


def remove(path: Path) -> None:
    """Remove a file, folder or link if it exists; a link itself, and not its target."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    path.chmod(0o700)
    for inside in _everything_below(path):
        if inside.is_dir() and not inside.is_symlink():
            inside.chmod(0o700)  # nothing can be removed from a read-only folder
    shutil.rmtree(path)


def _everything_below(folder: Path) -> Iterator[Path]:
    """Files, folders, links and the rest, parents first, without following links. An unreadable one is an OSError."""
    for entry in os.scandir(folder):
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _everything_below(Path(entry.path))


@dataclass(frozen=True)
class Mount:
    source: Path
    target: Path
    writable: bool = False

    def option(self) -> str:
        """The value of `--mount` for docker, podman and apptainer: CSV, as a path may hold a comma."""
        fields = ["type=bind", f"source={self.source}", f"target={self.target}"]
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow([*fields, *([] if self.writable else ["readonly"])])
        return line.getvalue()


def mounts(request: Request, image: Image | None, outputs: Outputs) -> list[Mount]:
    """Every mount of the container, parents before what lies in them.

    Raises UserError if an input leads to something that the stage may not see.
    """
    workspace_dir, source_dir = request.workspace_dir, request.source_dir
    # The stage reports a missing input.
    paths = (workspace_dir / path for path in (*CODE, *outputs.stage.inputs("data")))
    inputs = [path for path in paths if path.exists()]
    found = [Mount(path, path) for path in inputs]
    found += _links_into_cache(inputs, cache_dir(workspace_dir))
    if source_dir is not None and source_dir.exists():
        found += [Mount(source_dir, source_dir), *_links_of_source(source_dir)]
    if request.network:
        certificates = {Path(request.caller.get(name) or ".") for name in CERTIFICATES}
        found += [Mount(path, path) for path in sorted(certificates) if path.is_absolute() and path.exists()]
    _refuse_mounts_below(mount.source for mount in found)
    found.append(Mount(outputs.view_dir, workspace_dir))
    for folder in outputs.folders:
        found.append(Mount(outputs.written_dir / folder, workspace_dir / folder, writable=True))
    for path in (*request.cache_dirs(image).values(), *request.kept_dirs):
        path.mkdir(parents=True, exist_ok=True)
        found.append(Mount(path, path, writable=True))
    found.append(Mount(outputs.lock_path, LAUNCHER_LOCK))
    found.append(Mount(outputs.ready_path, READY, writable=True))
    # One for each place: a source may be a declared input too.
    return sorted({mount.target: mount for mount in found}.values(), key=lambda mount: len(mount.target.parts))


def make_places(found: list[Mount], outputs: Outputs) -> list[Path]:
    """Make the files and folders on which mounts lie inside other mounts; returns those among the outputs.

    The container's own root is writable while it starts, so the rest needs no place.
    """
    places = []
    for mount in found:
        around = [other for other in found if other.target in mount.target.parents]
        if around:  # parents come before what lies in them, so the last one is the nearest
            place = around[-1].source / mount.target.relative_to(around[-1].target)
            if not os.path.lexists(place):
                place.parent.mkdir(parents=True, exist_ok=True)
                place.mkdir() if mount.source.is_dir() else place.touch()
            if place.is_relative_to(outputs.written_dir):
                places.append(place)
    return places


def _links_into_cache(inputs: Iterable[Path], cache: Path) -> list[Mount]:
    """The workspace's DVC cache, if DVC links outputs to it (cache.type symlink). Any other link is refused."""
    found = set()
    for link in (link for path in inputs for link in _links(path)):
        target = _literal_target(link)
        match = DVC_OBJECT.search(str(target))
        folder = Path(str(target)[: match.end(1)]) if match else Path()
        if match is None or not link.exists() or folder.resolve() != cache.resolve():
            raise UserError(
                f"{link} is a link to {target}, which is not in DVC's cache ({cache}), so a container cannot see it; "
                f"put the file itself there"
            )
        found.add(folder)
    return [Mount(folder.resolve(), folder) for folder in sorted(found)]


def _links_of_source(source_dir: Path) -> list[Mount]:
    """Targets of links in a source folder, as in the hub's cache.

    A link that leads out of it has no target in a container; the stage refuses it when it would read it.
    """
    links = [link for link in _links(source_dir) if link.exists() and link != source_dir]
    links = [link for link in links if stays_inside(link, source_dir)]
    return [Mount(link.resolve(), _literal_target(link)) for link in links]


def _links(path: Path) -> Iterator[Path]:
    inside = (Path(folder, name) for folder, dirs, files in os.walk(path) for name in (*dirs, *files))
    return (file for file in (path, *inside) if file.is_symlink())


def _literal_target(link: Path) -> Path:
    """The target as the link has it: inside, all folders on the way are real."""
    return Path(os.path.normpath(link.parent / link.readlink()))


def _refuse_mounts_below(sources: Iterable[Path]) -> None:
    """A read-only mount leaves the file systems that are mounted below it writable."""
    mounted = {Path(partition.mountpoint) for partition in psutil.disk_partitions(all=True)}
    for source in sources:
        if inside := sorted(path for path in mounted if source in path.parents):
            raise UserError(f"{inside[0]} is mounted inside {source}, an input, and could be written to; unmount it")


@dataclass(frozen=True, kw_only=True)
class SealedEngine:
    """An engine that runs each stage in a fresh, sealed container."""

    name: str
    image: Image
    """The name is made from the hash of what it is built from; the digest is what is run, as the name could be given to
    another image."""

    def run(self, request: Request) -> Ended:
        """Run a stage on its declared inputs; if its exit code is 0, its outputs are in the workspace.

        Signals that ask to end go on to the stage, which decides how to end. If the launcher is killed, the first
        process of the container ends the stage.
        """
        outputs = Outputs(request.require_declared(), request.workspace_dir, node=request.node)
        try:
            with outputs.aside():
                found = mounts(request, self.image, outputs)
                places = make_places(found, outputs)
                code = self.run_container(request, found, outputs)
                if code == 0 and request.node == 0:
                    outputs.take(places)
                machine = None
                with suppress(OSError, ValueError):  # the stage could have overwritten what its container reported
                    machine = TypeAdapter(Machine).validate_json(outputs.ready_path.read_bytes())
                return Ended(code=code, machine=machine)
        except OSError as error:  # no space, no permission, a read-only file system
            raise UserError(f"the outputs of {outputs.stage.name} cannot be written: {error}") from error

    def run_container(self, request: Request, found: list[Mount], outputs: Outputs) -> int:
        """Start the container with these mounts; returns the stage's exit code."""
        raise NotImplementedError

    def variables(self, request: Request, *, terminal: bool) -> tuple[list[str], dict[str, str]]:
        """(names of the caller's variables that a container gets, further variables with their values)."""
        passed, given = container_environment(
            request.stage, request.caller, network=request.network, terminal=terminal, num_nodes=request.num_nodes
        )
        own = {"BAKEOFF_IMAGE": self.image[1]}
        return passed, {**given, **request.variables(self.image), **own}


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
        code = client.wait()
        if code != 0:
            code = failed(code if code > 0 else 128 - code)
    return signals.code_of_stage(code)
