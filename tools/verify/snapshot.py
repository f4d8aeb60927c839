"""A snapshot of the workspace: what dvc.lock records, the files of outputs and of DVC's cache, and their digests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, TypeVar

from ruamel.yaml.error import YAMLError

from stages.core.errors import UserError
from stages.core.lineage import LINEAGE_FILE, Lineage, combined_digest, digested_files, read_lineage
from stages.core.provenance import PROVENANCE_DIR, Provenance, read_provenance
from stages.kit.launcher.pipeline import DeclaredStage, declared_stages
from tools.verify.dvc_files import OBJECT_NAME, LockedPath, folder_listing, read_listing, read_lock
from tools.verify.hashing import hash_files

T = TypeVar("T")


class WorkspaceSnapshot:
    """Read once, when it is made; files that appear later are not in it.

    Works without git, without DVC's cache, and for a workspace that DVC does not know. Raises UserError where dvc.yaml
    or dvc.lock cannot be read.
    """

    def __init__(self, workspace_dir: Path) -> None:
        self.workspace_dir = workspace_dir
        self.stages = _read_stages(workspace_dir)
        """Each after those whose outputs it reads."""
        self.declared = [out for stage in self.stages for out in stage.outs]
        """The outputs of dvc.yaml, in that order."""
        lock = read_lock(workspace_dir / "dvc.lock")
        in_lock = [stage for stage in self.stages if stage.name in lock]
        self.locked = {stage.name: _locked(stage.name, lock[stage.name].get("outs", [])) for stage in in_lock}
        """The outputs of dvc.lock, by stage."""
        self.outputs = [out for stage in in_lock for out in self.locked[stage.name] if out.path in stage.outs]
        """Those that dvc.yaml declares, in the order of the pipeline."""
        self.inputs = [entry for name in self.locked for entry in _locked(name, lock[name].get("deps", []))]
        made = [any(overlap(entry.path, out) for out in self.declared) for entry in self.inputs]
        data = zip(self.inputs, made, strict=True)
        self.sources = [entry for entry, is_made in data if entry.path.startswith("data/") and not is_made]
        """Data among the inputs that no stage writes."""
        self._repo = _open_repo(workspace_dir)
        self.cache_dir = Path(self._repo.cache.local.path if self._repo else workspace_dir / ".dvc/cache/files/md5")
        """Of the objects."""
        names = {path: path.relative_to(self.cache_dir).as_posix() for path in self.cache_dir.glob("??/*")}
        self.objects = {name.replace("/", ""): path for path, name in names.items() if OBJECT_NAME.fullmatch(name)}
        """DVC's cache, by the digest in the name; without partial copies."""
        self.run_cache = sorted(self.cache_dir.parents[1].glob("runs/*/*"))
        """Folders, one for each stage and its inputs."""
        self.lineages = {path.parent: _read(read_lineage, path.parent) for path in self._find(f"**/{LINEAGE_FILE}")}
        """By folder; the problem, where it cannot be read."""
        records = self._find(f"{Path(PROVENANCE_DIR).name}/**/*.json")
        self.records = {path: _read(read_provenance, path) for path in records}
        """Likewise, by file."""
        self.certificates = [*self._find("runs/*/merge.json"), *self._find("builds/*.json")]
        self._model_files = {folder: digested_files(folder) for folder in self.lineages}
        self._files: dict[str, dict[str, Path]] = {}
        self.digests, self.size_bytes = hash_files(self._files_to_hash())
        data_dir = workspace_dir / "data"
        self.copies = {
            found.md5: path for path, found in self.digests.items() if found.md5 and path.is_relative_to(data_dir)
        }
        """Files of the workspace, by MD5."""
        self.expected = {output: self._expected(output) for output in self.outputs}
        """MD5 by name of the files that dvc.lock records of an output; None where its listing is lost."""

    def stage_of(self, path: str) -> str | None:
        """The stage that writes a path, or a folder around it."""
        return next((stage.name for stage in self.stages for out in stage.outs if is_within(path, out)), None)

    def files(self, path: str) -> dict[str, Path]:
        """The files at a path, by name below it, slashes between its parts; the name of a file itself is ""."""
        if path not in self._files:
            place = self.workspace_dir / path
            if place.is_dir():
                self._files[path] = {file.relative_to(place).as_posix(): file for file in self._list(place)}
            else:
                self._files[path] = {"": place} if os.path.lexists(place) else {}
        return self._files[path]

    def md5s(self, path: str) -> dict[str, str]:
        """MD5 by name of the files at a path, "" for one that cannot be read."""
        return {name: self.digests[file].md5 for name, file in self.files(path).items()}

    def is_intact(self, digest: str) -> bool:
        """Whether DVC's cache has an object, and it has the content that its name says."""
        path = self.objects.get(digest)
        return path is not None and self.digests[path].md5 == digest.removesuffix(".dir")

    def object_path(self, digest: str) -> Path:
        return self.cache_dir / digest[:2] / digest[2:]

    def content(self, path: str) -> str | None:
        """The digest of a path's content, as lineages and records have it; None where that cannot be read."""
        place, files = self.workspace_dir / path, self.files(path)
        if place in self.lineages:
            files = {file.relative_to(place).as_posix(): file for file in self._model_files[place]}
        sha256s = {name: self.digests[file].sha256 for name, file in files.items()}
        return sha256s.get("") or (combined_digest(sha256s) if files and all(sha256s.values()) else None)

    def record(self, stage: DeclaredStage) -> Provenance | None:
        """The stage's record; None where it is missing or cannot be read."""
        found = self.records.get(self.workspace_dir / (stage.provenance or ""))
        return found if isinstance(found, Provenance) else None

    def lineage(self, folder: Path) -> Lineage | None:
        """Likewise."""
        found = self.lineages.get(folder)
        return found if isinstance(found, Lineage) else None

    def shown(self, path: Path) -> str:
        """Relative to the workspace where it is in it."""
        return path.relative_to(self.workspace_dir).as_posix() if path.is_relative_to(self.workspace_dir) else str(path)

    def _find(self, pattern: str) -> list[Path]:
        """Files below data/, without those that a killed stage was writing."""
        data_dir = self.workspace_dir / "data"
        found = (path for path in data_dir.glob(pattern) if path.is_file())
        return sorted(path for path in found if not any(part[0] == "." for part in path.relative_to(data_dir).parts))

    def _list(self, folder: Path) -> Iterable[Path]:
        """The files below a folder, without those that .dvcignore names."""
        from dvc.fs import localfs

        if self._repo is None:
            return (path for path in folder.rglob("*") if path.is_file())
        return map(Path, self._repo.dvcignore.find(localfs, str(folder)))

    def _files_to_hash(self) -> set[Path]:
        records = [record for record in self.records.values() if isinstance(record, Provenance)]
        paths = {entry.path for entry in (*self.outputs, *self.sources)}.union(*(record.outputs for record in records))
        in_data = (file for path in paths for file in self.files(path).values())
        return {*self.objects.values(), *in_data, *(file for files in self._model_files.values() for file in files)}

    def _expected(self, output: LockedPath) -> dict[str, str] | None:
        if not output.is_folder:
            return {"": output.md5}
        if self.is_intact(output.md5):
            return read_listing(self.objects[output.md5])
        here = self.md5s(output.path)
        return here if here and folder_listing(here)[0] == output.md5 else None


def is_within(path: str, folder: str) -> bool:
    """Whether a path is a folder, or lies below it; both relative to the workspace."""
    return f"{path}/".startswith(f"{folder}/")


def overlap(one: str, other: str) -> bool:
    return is_within(one, other) or is_within(other, one)


def one_line(error: UserError) -> str:
    """The problem, without the command that fixes it."""
    return " ".join(error.message.split("; rebuild it with")[0].split()).rstrip("; ")


def _read(read: Callable[[Path], T], path: Path) -> T | str:
    try:
        return read(path)
    except UserError as error:
        return one_line(error)


def _read_stages(workspace_dir: Path) -> list[DeclaredStage]:
    try:
        stages = {stage.name: stage for stage in declared_stages(workspace_dir)}
        made_by = {out: name for name, stage in stages.items() for out in stage.outs}
        graph = {
            name: [made_by[out] for out in made_by for dep in stage.inputs("data") if overlap(out, dep)]
            for name, stage in stages.items()
        }
        return [stages[name] for name in TopologicalSorter(graph).static_order()]
    except (OSError, YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError, CycleError) as error:
        raise UserError(f"{workspace_dir / 'dvc.yaml'} or params.yaml cannot be read: {error}") from None


def _locked(stage: str, entries: list[dict[str, Any]]) -> list[LockedPath]:
    return [LockedPath(stage=stage, path=entry["path"], md5=entry["md5"]) for entry in entries if "md5" in entry]


def _open_repo(workspace_dir: Path) -> Any:
    """DVC's own view of the workspace, git or no git; None where it has none."""
    if not (workspace_dir / ".dvc").is_dir():
        return None
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        return Repo(str(workspace_dir), config={"core": {"no_scm": True}})
    except DvcException as error:
        raise UserError(f"DVC cannot open {workspace_dir}: {error}") from None
