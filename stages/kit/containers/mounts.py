"""What a stage in a container sees of the machine: its declared inputs, read-only, and folders for its outputs.

Everything keeps its path, so that a path in a log, a lineage or a link means the same inside and outside.
"""

import csv
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.kit.containers.inside import LAUNCHER_LOCK
from stages.kit.containers.outputs import Outputs
from stages.kit.containers.pipeline import DeclaredStage
from stages.kit.containers.stage_run import StageRun

CODE = ("params.yaml", "stages")

CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@dataclass(frozen=True, kw_only=True)
class Mount:
    source: Path
    target: Path
    writable: bool = False

    def option(self) -> str:
        """For `--mount` of docker and podman: CSV, as a path may hold a comma."""
        fields = [
            "type=bind",
            f"source={self.source}",
            f"target={self.target}",
            *([] if self.writable else ["readonly"]),
        ]
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(fields)
        return line.getvalue()


def input_paths(stage_run: StageRun, stage: DeclaredStage) -> list[str]:
    """What the stage is to see of the workspace, relative to it; what is missing is left to the stage to name."""
    data = [dep for dep in stage.deps if dep.startswith("data/")]
    if stage_run.source_dir is not None and stage_run.source_dir.is_relative_to(stage_run.workspace_dir):
        data.append(str(stage_run.source_dir.relative_to(stage_run.workspace_dir)))
    return [path for path in (*CODE, *data) if (stage_run.workspace_dir / path).exists()]


def mounts(stage_run: StageRun, outputs: Outputs) -> list[Mount]:
    """Every mount of the container, parents before what lies in them."""
    workspace_dir = stage_run.workspace_dir
    read = [workspace_dir / path for path in outputs.inputs]
    if stage_run.source_dir is not None and stage_run.source_dir.exists():
        read.append(stage_run.source_dir)
    read += sorted({folder for path in read for folder in _linked_folders(path)})
    if stage_run.network:
        certificates = {Path(stage_run.caller[name]) for name in CERTIFICATES if stage_run.caller.get(name)}
        read += sorted(path for path in certificates if path.is_absolute() and path.exists())
    found = [Mount(source=outputs.view_dir, target=workspace_dir), *(Mount(source=path, target=path) for path in read)]
    found += [
        Mount(source=outputs.written_dir / folder, target=workspace_dir / folder, writable=True)
        for folder in outputs.folders
    ]
    for kept_dir in stage_run.kept_dirs:
        kept_dir.mkdir(parents=True, exist_ok=True)
        found.append(Mount(source=kept_dir, target=kept_dir, writable=True))
    found.append(Mount(source=outputs.lock_path, target=LAUNCHER_LOCK, writable=True))
    # One a place: a source may be a declared input too.
    return sorted({mount.target: mount for mount in found}.values(), key=lambda mount: len(mount.target.parts))


def _linked_folders(path: Path) -> Iterator[Path]:
    """The folders that symlinks in a path lead to: DVC's cache where it makes such links, or the hub's."""
    files = [path, *(Path(folder, name) for folder, dirs, files in os.walk(path) for name in (*dirs, *files))]
    for file in files:
        if file.is_symlink() and file.exists():
            folder = file.resolve().parent
            # DVC spreads its cache over 256 folders: files/md5/ab/cdef...
            yield folder.parent if folder.parent.name == "md5" else folder
