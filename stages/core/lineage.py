"""Lineage by content: the content of a model folder, and of the models that it was made from.

Every model folder has a `lineage.json`: the digest of its files, and each parent's own lineage, down to a hub revision
or a local folder. Paths to parents are relative, so a moved or cloned workspace still resolves; a parent is accepted
only if its digest agrees.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.environment import usable_cores
from stages.core.errors import UserError
from stages.core.records import STRICT, read_record

K = TypeVar("K")
V = TypeVar("V")

LINEAGE_FILE = "lineage.json"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Lineage:
    kind: str
    """base, trained, merged or built; answers for a file of them."""
    name: str
    """The base's, the recipe's or the build's name."""
    digest: str
    """SHA-256 over the folder's files, excluding lineage.json."""
    source: dict[str, str] = field(default_factory=dict)
    """Origin of a base: {"hub": id, "revision": commit}, {"folder": path}; empty for a model made here."""
    parents: dict[str, Parent] = field(default_factory=dict)
    """Parents by role: base, trained, and expert/NAME for each expert of a build."""

    def bases(self) -> Iterator[Lineage]:
        """Itself, its base, its base's base, and so on."""
        yield self
        if "base" in self.parents:
            yield from self.parents["base"].lineage.bases()

    def tree(self) -> Iterator[Lineage]:
        """Itself, and everything that it was made from."""
        yield self
        for parent in self.parents.values():
            yield from parent.lineage.tree()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Parent:
    path: Annotated[str, Field(pattern=r"^(\.\./){1,3}[^./\\\x00][^/\\\x00]*(/[^./\\\x00][^/\\\x00]*)*$")]
    """Path relative to the folder of the lineage.json, within its workspace: every model folder lies at least three
    levels deep in it."""
    lineage: Lineage


def folder_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of all files below a folder, excluding lineage.json.

    Independent of the folder's place, of times and of modes. Raises UserError for a missing or empty folder.
    """
    files = digested_files(folder)
    if not files:
        raise UserError(f"{folder} is missing or empty")
    return combined_digest(
        {path.relative_to(folder).as_posix(): digest for path, digest in file_digests(files).items()}
    )


def digested_files(folder: Path) -> list[Path]:
    """The files that a folder's digest covers."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name != LINEAGE_FILE]


def file_digest(path: Path) -> str:
    """SHA-256 of the content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(paths: Iterable[Path]) -> dict[Path, str]:
    """SHA-256 of each file, read in parallel."""
    return map_largest_first(file_digest, {path: path.stat().st_size for path in paths})


def json_digest(values: Any) -> str:
    """16 hexadecimal digits of SHA-256 over JSON values, the same whatever the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def map_largest_first(work: Callable[[K], V], sizes: Mapping[K, int]) -> dict[K, V]:
    """The result of `work` by item, in the order of `sizes`; raises the error of one of the items.

    Runs in threads, for digests: hashlib and zlib release the lock. Large items start first, so that none is waited for
    at the end.
    """
    largest_first = sorted(sizes, key=sizes.__getitem__, reverse=True)
    with ThreadPoolExecutor(usable_cores()) as threads:
        done = dict(zip(largest_first, threads.map(work, largest_first), strict=True))
    return {item: done[item] for item in sizes}


def combined_digest(files: Mapping[str, str]) -> str:
    """A folder's digest. files: SHA-256 by path below the folder, with slashes."""
    total = hashlib.sha256()
    for name in sorted(files, key=PurePosixPath):
        total.update(f"{name}\0{files[name]}\n".encode())
    return total.hexdigest()


def content_digest(path: Path) -> str:
    """Digest of a file or a folder. A model folder's is the one in its lineage; readers of the model verify it.

    Raises UserError for a missing or empty folder, or a damaged lineage.json.
    """
    if path.is_file():
        return file_digest(path)
    return read_lineage(path).digest if (path / LINEAGE_FILE).is_file() else folder_digest(path)


def write_lineage(
    folder: Path,
    *,
    kind: str,
    name: str,
    source: dict[str, str] | None = None,
    parents: dict[str, tuple[Path, Lineage]] | None = None,
) -> Lineage:
    """Record the content of `folder`. parents: (folder, lineage as verified when it was loaded) by role."""
    lineage = Lineage(
        kind=kind,
        name=name,
        digest=folder_digest(folder),
        source=source or {},
        parents={
            role: Parent(path=Path(os.path.relpath(path, folder)).as_posix(), lineage=parent)
            for role, (path, parent) in (parents or {}).items()
        },
    )
    (folder / LINEAGE_FILE).write_text(lineage_text(lineage), encoding="utf-8")
    return lineage


def lineage_text(lineage: Lineage) -> str:
    """The content of lineage.json."""
    return json.dumps(asdict(lineage), indent=2) + "\n"


def read_lineage(folder: Path, *, name: str = LINEAGE_FILE, fix: str = "dvc repro") -> Lineage:
    """The recorded lineage, not compared with the folder's files. Raises UserError if it is missing or damaged.

    name: another file name, for a copy of another folder's lineage. fix: the command that rebuilds the folder.
    """
    path = folder / name
    if not path.exists():
        raise UserError(f"{path} is missing: {folder} was not made by a stage of this pipeline")
    return read_record(Lineage, path, fix=fix)


def verified_lineage(folder: Path, *, fix: str) -> Lineage:
    """The recorded lineage. Raises UserError, with the command `fix`, if the folder's files do not match it."""
    lineage = read_lineage(folder, fix=fix)
    try:
        digest = folder_digest(folder)
    except (OSError, UnicodeEncodeError) as error:  # the latter for a file name that is not UTF-8
        raise UserError(f"{folder} cannot be read: {error}; rebuild it with: {fix}") from None
    if digest != lineage.digest:
        raise UserError(
            f"{folder} was recorded with content {short(lineage.digest)}, but now holds {short(digest)}; "
            f"rebuild it with: {fix}"
        )
    return lineage


def lineage_lines(model: Lineage, *, role: str = "", depth: int = 0, seen: set[str] | None = None) -> Iterator[str]:
    """A model and what it was made from, a line each, indented by generation; the parents of a model are listed at its
    first mention only."""
    seen = set() if seen is None else seen
    source = "".join(f", {key} {value}" for key, value in model.source.items())
    again = model.digest in seen and bool(model.parents)
    seen.add(model.digest)
    name = f"{model.kind} {model.name}, content {short(model.digest)}{source}{', as above' if again else ''}"
    yield f"{'  ' * depth}{role and f'{role}: '}{name}"
    for each, parent in ({} if again else model.parents).items():
        yield from lineage_lines(parent.lineage, role=each, depth=depth + 1, seen=seen)


def require_base(trained_dir: Path, base_dir: Path, *, fix: str, fix_base: str = "") -> tuple[Lineage, Lineage]:
    """The lineages (trained, base). Raises UserError with both digests unless `trained_dir` was trained on the
    content of `base_dir`: an adapter is never merged into, or evaluated on, another base than its own.

    fix_base: the command that rebuilds a damaged base; `fix` if not given.
    """
    trained = verified_lineage(trained_dir, fix=fix)
    base = verified_lineage(base_dir, fix=fix_base or fix)
    if "base" not in trained.parents:
        raise UserError(f"{trained_dir} names no base in its {LINEAGE_FILE}; rebuild it with: {fix}")
    wanted = trained.parents["base"].lineage
    if wanted.digest != base.digest:
        raise UserError(
            f"{trained.name} was trained on base {short(wanted.digest)} ({true_base(trained_dir)}), "
            f"but {base_dir} holds {short(base.digest)}; rebuild it with: {fix}"
        )
    return trained, base


def true_base(trained_dir: Path) -> Path:
    """The folder of the base that `trained_dir` was trained on, as its lineage names it."""
    return Path(os.path.normpath(trained_dir / read_lineage(trained_dir).parents["base"].path))


def short(digest: str) -> str:
    return digest[:12]
