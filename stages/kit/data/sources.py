"""Where a dataset comes from: the folder that a source names, and the files of its splits."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stages.core.errors import UserError, counted, listed
from stages.core.given_files import given_files
from stages.kit.data.hub import fetch_snapshot
from stages.kit.data.parquet import count_rows, missing_columns, read_rows

READ_ON = "docs/data.md says more"
VALIDATION = ("val", "dev", "test")
"""Beginnings of the names of validation files; the first that any file has counts."""
MAX_FILES, MAX_NAMED = 10_000, 3


@dataclass(frozen=True)
class Place:
    """Where a sample was read."""

    file: str
    """Relative to the dataset's folder, so that it reads the same on every machine."""
    number: int | str | None = None
    """Of a line, counted from 1, or of a row, counted from 0, or an entry's own id; None for a fault of the whole
    file."""
    unit: str = "line"

    def __str__(self) -> str:
        return self.file if self.number is None else f"{self.file} {self.unit} {self.number}"


def source_folder(source: str, *, known: str) -> Path:
    """The folder of `folder:PATH`. Raises UserError for another source, and where the folder does not exist.

    known: the sources that there are, for the message.
    """
    kind, _, rest = source.partition(":")
    if kind != "folder" or not rest:
        raise UserError(f"unknown source {source!r}; expected {known}")
    if not Path(rest).is_dir():
        raise UserError(f"no dataset folder {rest}; point the dataset's `source` in params.yaml at one that exists")
    return Path(rest)


def parquet_folder(source: str) -> tuple[Path, str, str | None]:
    """(folder, source as resolved, full commit if any) of `folder:PATH` or `hub:OWNER/NAME@REVISION`.

    Raises UserError as source_folder, and where the hub does not have it.
    """
    kind, _, rest = source.partition(":")
    repo_id, at, revision = rest.partition("@")
    if kind == "hub" and at:
        folder, commit = fetch_snapshot("dataset", repo_id, revision, patterns=["data/*.parquet"])
        return folder, f"hub:{repo_id}@{commit}", commit
    return source_folder(source, known="folder:PATH or hub:OWNER/NAME@REVISION"), source, None


def read_parquet_split(
    folder: Path, split: str, *, required: Sequence[str], form: str
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The raw rows of a split, in order of file name.

    required: columns, `outer.inner` for a field of a struct; others are not read.
    form: of the files, for the message of the UserError raised where there are none or a column is missing.
    """
    paths = split_paths(folder, split)
    if not paths:
        raise UserError(
            f"{folder} has no files for the split {split}: {holds(folder)}. Expected: {form}, named "
            f"data/{split}-*.parquet or {split}*.parquet as a Hugging Face dataset has them; {READ_ON}"
        )
    lacking = [(path, ", ".join(missing)) for path in paths if (missing := missing_columns(path, required))]
    if lacking:
        lines = [f"{path} lacks {columns}, for all {count_rows(path)} rows" for path, columns in lacking]
        raise UserError(f"columns are missing:\n{listed(lines)}\nExpected: {form}; {READ_ON}")
    columns = dict.fromkeys(name.partition(".")[0] for name in required)
    for path in paths:
        file = path.relative_to(folder).as_posix()
        for number, row in enumerate(with_progress(read_rows(path, list(columns)), file, count_rows(path))):
            yield Place(file, number, "row"), row


def split_paths(folder: Path, split: str) -> list[Path]:
    """`data/{split}-*.parquet`, else `{split}*.parquet`; for `val` also the hub's other names of it."""
    beginnings = ("val", "validation", *VALIDATION[1:]) if split == "val" else (split,)
    names = (name for begin in beginnings for name in (f"data/{begin}-*.parquet", f"{begin}*.parquet"))
    return next((paths for name in names if (paths := given_files(folder, name))), [])


def with_progress(rows: Iterator[dict[str, Any]], name: str, count: int) -> Iterator[dict[str, Any]]:
    # disable=None shows it on a terminal only.
    yield from tqdm(rows, desc=name, total=count, unit=" rows", leave=False, disable=None)


def files_by_split(files: Sequence[Path]) -> dict[str, list[Path]]:
    """The files that are named train*, and those of the first of VALIDATION; without `val` where there are none."""
    named = {begin: [path for path in files if path.name.startswith(begin)] for begin in ("train", *VALIDATION)}
    val = next((named[begin] for begin in VALIDATION if named[begin]), None)
    return {"train": named["train"]} | ({"val": val} if val else {})


def holds(folder: Path) -> str:
    """The files in a folder, by kind: `it holds 12 .jpg files (1.jpg, ...)`. Links are not followed."""
    walked = (Path(here, name) for here, _, names in os.walk(folder) for name in names)
    files = list(islice(walked, MAX_FILES))
    if not files:
        return "it is empty"
    by_suffix: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(files):
        by_suffix[path.suffix.lower()].append(path)
    kinds = [
        _kind(suffix, paths, folder) for suffix, paths in sorted(by_suffix.items(), key=lambda kind: -len(kind[1]))
    ]
    more = " and others" if len(kinds) > MAX_NAMED or len(files) == MAX_FILES else ""
    return f"it holds {', '.join(kinds[:MAX_NAMED])}{more}"


def _kind(suffix: str, paths: list[Path], folder: Path) -> str:
    names = [path.relative_to(folder).as_posix() for path in paths[:MAX_NAMED]]
    shown = ", ".join(names) + (", ..." if len(paths) > MAX_NAMED else "")
    what = f"{suffix or 'other'} file"
    return f"{counted(len(paths), what)} ({shown})"
