"""What DVC recorded: the outputs in dvc.lock, and the objects of its cache.

DVC takes a read-only file of its cache, and a file whose time and size it knows, for what they were: to see a flipped
bit, one has to read them. The layouts are those of DVC 3: an object `files/md5/ab/cdef…` is called by the MD5 of what
it holds, one that ends in `.dir` lists a folder, and an entry `runs/ab/KEY/VALUE` of the run cache is called by the
SHA-256 of what it says.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from voluptuous import Invalid

from stages.core.errors import UserError
from stages.kit.launcher.pipeline import DeclaredStage, declared_stages

_OBJECT = re.compile(r"[0-9a-f]{2}/[0-9a-f]{30}(\.dir)?")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A file or folder as dvc.lock has it."""

    stage: str
    """That writes it, or for a source reads it."""
    path: str
    """Relative to the workspace."""
    md5: str
    """As DVC writes it: of a folder, the MD5 of its listing, with `.dir` at the end."""

    @property
    def is_folder(self) -> bool:
        return self.md5.endswith(".dir")

    def agrees_with(self, files: Mapping[str, str]) -> bool:
        """Whether that is what lay at the path. files: MD5 by name; the name of a file itself is ""."""
        return self.md5 == (listing_object(files)[0] if self.is_folder else files.get(""))


@dataclass(frozen=True, kw_only=True)
class Store:
    stages: tuple[DeclaredStage, ...]
    """As dvc.yaml declares them, each after those that it depends on."""
    outputs: tuple[Recorded, ...]
    """Those that dvc.yaml declares, in the same order."""
    undeclared: tuple[Recorded, ...]
    """Those that it does not, of stages that it does."""
    unlocked: Mapping[str, str]
    """Outputs that dvc.yaml declares and dvc.lock does not have: by path, the stage, which it does have."""
    inputs: tuple[Recorded, ...]
    """What stages read."""
    sources: tuple[Recorded, ...]
    """Data among that which no stage writes."""
    objects: Mapping[str, Path]
    """The cache, by the digest in the name."""
    run_cache: tuple[Path, ...]
    """Folders, each for one stage and what it read."""
    cache_dir: Path | None
    """None where the workspace is not DVC's."""
    repo: Any
    """DVC's own view of the workspace; None where it has none."""

    @property
    def declared(self) -> Iterator[str]:
        """The outputs of dvc.yaml, each after those that it is made of."""
        return (out for stage in self.stages for out in stage.outs)

    @property
    def has_cache(self) -> bool:
        """Whether there is anything in it: a workspace may have been copied without."""
        return bool(self.objects)

    def listed(self, folder: Path) -> list[Path]:
        """The files below a folder, as far as DVC counts them (.dvcignore)."""
        from dvc.fs import localfs

        if self.repo is None:
            return [path for path in folder.rglob("*") if path.is_file()]
        return [Path(path) for path in self.repo.dvcignore.find(localfs, str(folder))]

    def object_path(self, digest: str) -> Path:
        assert self.cache_dir is not None
        return self.cache_dir / digest[:2] / digest[2:]

    def stage_of(self, path: str) -> str | None:
        """The stage that writes what lies at a path, or around it."""
        for stage in self.stages:
            if any(is_within(path, out) for out in stage.outs):
                return stage.name
        return None


def is_within(path: str, folder: str) -> bool:
    """Whether a path is a folder, or lies below it; both relative to the workspace."""
    return f"{path}/".startswith(f"{folder}/")


def overlap(one: str, other: str) -> bool:
    return is_within(one, other) or is_within(other, one)


def read_store(workspace_dir: Path) -> Store:
    """What DVC knows of a workspace; of one that it does not know, or where nothing was run, nothing.

    Raises UserError where dvc.yaml or dvc.lock cannot be read.
    """
    stages = tuple(_in_order(_stages(workspace_dir)))
    lock = _read_lock(workspace_dir / "dvc.lock")
    written = {out for stage in stages for out in stage.outs}
    locked = [entry for stage in stages for entry in _recorded(stage.name, lock.get(stage.name, {}).get("outs", []))]
    read = [entry for stage in stages for entry in _recorded(stage.name, lock.get(stage.name, {}).get("deps", []))]
    declared = [(stage.name, out) for stage in stages if stage.name in lock for out in stage.outs]
    known = {(entry.stage, entry.path) for entry in locked}
    sources = [
        dep for dep in read if dep.path.startswith("data/") and not any(overlap(dep.path, out) for out in written)
    ]
    repo = _repo(workspace_dir)
    cache_dir = Path(repo.cache.local.path) if repo is not None else None
    objects = {}
    if cache_dir is not None:
        for path in cache_dir.glob("??/*"):
            if _OBJECT.fullmatch(path.relative_to(cache_dir).as_posix()):  # not what a killed DVC was copying
                objects[path.parent.name + path.name] = path
    return Store(
        stages=stages,
        outputs=tuple(entry for entry in locked if (entry.stage, entry.path) in declared),
        undeclared=tuple(entry for entry in locked if (entry.stage, entry.path) not in declared),
        unlocked={out: stage for stage, out in declared if (stage, out) not in known},
        inputs=tuple(read),
        sources=tuple(sources),
        objects=objects,
        run_cache=tuple(sorted(cache_dir.parents[1].glob("runs/*/*"))) if cache_dir is not None else (),
        cache_dir=cache_dir,
        repo=repo,
    )


def read_listing(path: Path) -> dict[str, str]:
    """MD5 by path, of the files of a folder, from an object that lists them. Raises ValueError for another file."""
    content = path.read_bytes()
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != path.parent.name + path.stem:
        raise ValueError("not what its name says")
    return {entry["relpath"]: entry["md5"] for entry in json.loads(content)}


def listing_object(files: Mapping[str, str]) -> tuple[str, bytes]:
    """(digest, content) of the object that lists a folder, as DVC makes it. files: MD5 by path."""
    from dvc_data.hashfile.tree import Tree

    tree = Tree.from_list([{"relpath": name, "md5": md5} for name, md5 in files.items()], hash_name="md5")
    tree.digest()
    return tree.oid, tree.as_bytes()


def run_cache_problem(folder: Path) -> str | None:
    """What is wrong with a folder of the run cache: DVC would take other outputs from it than were made, or stumble."""
    entries = sorted(folder.iterdir())
    if not entries:  # dvc 3.67.1, StageCache._load; it makes the folder, and then what lies in it
        return "is empty, where DVC was killed; it then ends with: join() argument must be str ... not 'NoneType'"
    return next((problem for path in entries if (problem := _entry_problem(path))), None)


def _entry_problem(path: Path) -> str | None:
    from dvc.utils import dict_sha256

    leaving_out = {"exclude": ["size", "nfiles"]}
    try:
        entry = YAML(typ="safe").load(path)
        value = dict_sha256(entry, **leaving_out)
        key = dict_sha256({**entry, "outs": [out["path"] for out in entry["outs"]]}, **leaving_out)
    except (OSError, YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        return f"{path.name} cannot be read: {error!r}"
    return None if (value, key) == (path.name, path.parent.name) else f"{path.name} is not what its name says"


def _stages(workspace_dir: Path) -> list[DeclaredStage]:
    if not (workspace_dir / "dvc.yaml").exists():
        return []
    try:
        return declared_stages(workspace_dir)
    except (OSError, YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{workspace_dir / 'dvc.yaml'} or params.yaml cannot be read: {error}") from None


def _in_order(stages: list[DeclaredStage]) -> Iterator[DeclaredStage]:
    """Each after those whose outputs it reads."""
    graph = {
        stage.name: [
            other.name
            for other in stages
            if other is not stage and any(overlap(out, dep) for out in other.outs for dep in stage.inputs("data"))
        ]
        for stage in stages
    }
    by_name = {stage.name: stage for stage in stages}
    try:
        yield from (by_name[name] for name in TopologicalSorter(graph).static_order())
    except CycleError:  # params.yaml names it
        yield from stages


def _read_lock(path: Path) -> dict[str, Any]:
    """What it has of each stage, in the shape that DVC itself requires."""
    if not path.exists():
        return {}
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA

    try:
        stages: dict[str, Any] = COMPILED_LOCKFILE_SCHEMA(YAML(typ="safe").load(path))["stages"]
    except (OSError, YAMLError, ValueError, Invalid, KeyError) as error:
        # DVC 3.67 writes into the file itself, for a second where there are many stages.
        raise UserError(
            f"{path} is damaged, as DVC leaves it where it is killed while it writes: {error}\n"
            f"  mend it with: git checkout HEAD -- dvc.lock || rm dvc.lock  # dvc repro then takes from its run cache "
            f"what was made"
        ) from None
    return stages


def _recorded(stage: str, entries: list[dict[str, Any]]) -> Iterator[Recorded]:
    for entry in entries:
        if "md5" in entry:
            yield Recorded(stage=stage, path=str(entry["path"]), md5=str(entry["md5"]))


def _repo(workspace_dir: Path) -> Any:
    """DVC's view of the workspace itself, git or no git."""
    if not (workspace_dir / ".dvc").is_dir():
        return None
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        return Repo(str(workspace_dir), config={"core": {"no_scm": True}})
    except DvcException as error:
        raise UserError(f"DVC cannot open {workspace_dir}: {error}") from None
