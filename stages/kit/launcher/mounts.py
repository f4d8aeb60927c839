"""What a stage in a container sees of the machine: its declared inputs, read-only, and folders for its outputs.

Everything keeps its path, so that a path in a log, a lineage or a link means the same inside and outside.
"""

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from stages.core.dvc_cache import cache_dir
from stages.core.environment import CERTIFICATES
from stages.core.errors import UserError
from stages.core.given_files import stays_inside
from stages.kit.launcher.inside import LAUNCHER_LOCK, READY
from stages.kit.launcher.outputs import Outputs
from stages.kit.launcher.pipeline import DeclaredStage
from stages.kit.launcher.stage_run import StageRun

CODE = ("params.yaml", "stages")

DVC_OBJECT = re.compile(r"(/files/md5)/[0-9a-f]{2}/[0-9a-f]{30}")
"""A file in a cache of DVC, to which DVC may link what it keeps."""

MAX_LINKS = 256
"""In the folder that data comes from: each is a mount of its own."""


@dataclass(frozen=True)
class Mount:
    source: Path
    target: Path
    writable: bool = False

    def option(self) -> str:
        """For `--mount` of docker, podman and apptainer: CSV, as a path may hold a comma."""
        fields = ["type=bind", f"source={self.source}", f"target={self.target}"]
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow([*fields, *([] if self.writable else ["readonly"])])
        return line.getvalue()


def mounts(stage_run: StageRun, declared: DeclaredStage, outputs: Outputs) -> list[Mount]:
    """Every mount of the container, parents before what lies in them.

    Raises UserError where an input leads to something that the stage may not see.
    """
    workspace_dir = stage_run.workspace_dir
    # A missing input is left to the stage to name.
    inputs = [workspace_dir / path for path in (*CODE, *declared.inputs("data")) if (workspace_dir / path).exists()]
    found = [Mount(path, path) for path in inputs]
    found += links_into_cache(inputs, cache_dir(workspace_dir))
    if stage_run.source_dir is not None and stage_run.source_dir.exists():
        found += [
            Mount(stage_run.source_dir, stage_run.source_dir),
            *_links_of_source(stage_run.source_dir, workspace_dir),
        ]
    if stage_run.network:
        certificates = {Path(stage_run.caller.get(name) or ".") for name in CERTIFICATES}
        found += [Mount(path, path) for path in sorted(certificates) if path.is_absolute() and path.exists()]
    _refuse_mounts_below(mount.source for mount in found)
    found.append(Mount(outputs.view_dir, workspace_dir))
    for folder in outputs.folders:
        found.append(Mount(outputs.written_dir / folder, workspace_dir / folder, writable=True))
    for path in stage_run.kept_dirs:
        path.mkdir(parents=True, exist_ok=True)
        found.append(Mount(path, path, writable=True))
    found.append(Mount(outputs.lock_path, LAUNCHER_LOCK))
    found.append(Mount(outputs.ready_path, READY, writable=True))
    # One for each place: a source may be a declared input too.
    return sorted({mount.target: mount for mount in found}.values(), key=lambda mount: len(mount.target.parts))


def make_places(found: list[Mount], outputs: Outputs) -> list[Path]:
    """Make what the mounts are mounted on, where that is inside another mount; the container's own root is writable
    while it starts. Returns those among the outputs.
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


def _links(path: Path) -> Iterator[Path]:
    inside = (Path(folder, name) for folder, dirs, files in os.walk(path) for name in (*dirs, *files))
    return (file for file in (path, *inside) if file.is_symlink())


def _where_it_says(link: Path) -> Path:
    """Where a link leads by its own words: inside, all folders on the way are real."""
    return Path(os.path.normpath(link.parent / link.readlink()))


def links_into_cache(inputs: Iterable[Path], cache: Path) -> list[Mount]:
    """The workspace's DVC cache, where DVC makes such links (cache.type symlink). Any other link is refused."""
    found = set()
    for link in (link for path in inputs for link in _links(path)):
        leads_to = _where_it_says(link)
        match = DVC_OBJECT.search(str(leads_to))
        folder = Path(str(leads_to)[: match.end(1)]) if match else Path()
        if match is None or not link.exists() or folder.resolve() != cache.resolve():
            raise UserError(
                f"{link} is a link to {leads_to}, which is nothing in DVC's cache ({cache}), so a container cannot be "
                f"shown it; put the file itself there"
            )
        found.add(folder)
    return [Mount(folder.resolve(), folder) for folder in sorted(found)]


def _links_of_source(source_dir: Path, workspace_dir: Path) -> list[Mount]:
    """Targets of links in the folder that data comes from, as in the hub's cache. A link that leads out of it leads
    nowhere in a container; the stage refuses it where it would read it.
    """
    links = [link for link in _links(source_dir) if link.exists() and link != source_dir]
    links = [link for link in links if stays_inside(link, source_dir, workspace_dir=workspace_dir)]
    if len(links) > MAX_LINKS:
        raise UserError(f"{source_dir} has {len(links)} links, more than {MAX_LINKS}; name the folder with the files")
    return [Mount(link.resolve(), _where_it_says(link)) for link in links]


def _refuse_mounts_below(sources: Iterable[Path]) -> None:
    """A read-only mount leaves what is mounted below it writable."""
    mounted = {Path(partition.mountpoint) for partition in psutil.disk_partitions(all=True)}
    for source in sources:
        if inside := sorted(path for path in mounted if source in path.parents):
            raise UserError(f"{inside[0]} is mounted inside {source}, an input, and could be written to; unmount it")
