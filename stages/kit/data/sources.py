"""The folder that a dataset comes from: its files, and where it is not as a task reads it, what there is instead."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from stages.core.errors import UserError, counted
from stages.core.given_files import given_files

READ_ON = "docs/data.md says more"
MAX_FILES, MAX_NAMED = 10_000, 3
_HEAD_BYTES = 65_536
_COCO = (b'"images"', b'"annotations"', b'"categories"')
"""Keys of COCO's JSON (cocodataset.org, Data format), of which its beginning has at least one."""


def split_files(folder: Path, split: str, *, form: str) -> list[Path]:
    """The parquet files of a split, in order of name: `data/{split}-*.parquet`, else `{split}*.parquet`.

    form: of what they hold, for the message of the UserError raised where the folder or the split's files are missing.
    Raises it too where a file may not be read (given_files.py).
    """
    if not folder.is_dir():
        raise UserError(f"no dataset folder {folder}; point the dataset's `source` in params.yaml at one that exists")
    files = given_files(folder, f"data/{split}-*.parquet") or given_files(folder, f"{split}*.parquet")
    if not files:
        raise UserError(
            f"{folder} has no files for the split {split}: {holds(folder)}. Expected: {form}, named "
            f"data/{split}-*.parquet or {split}*.parquet as a Hugging Face dataset has them; {READ_ON}"
        )
    return files


def holds(folder: Path) -> str:
    """The files in a folder, by kind, in words: `it holds 12 .jpg files (1.jpg, ...)`. Links are not followed."""
    walked = (Path(here, name) for here, _, names in os.walk(folder) for name in names)
    files = list(islice(walked, MAX_FILES))
    if not files:
        return "it is empty"
    by_suffix: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(files):
        by_suffix[path.suffix.lower()].append(path)
    said = [_kind(suffix, paths, folder) for suffix, paths in sorted(by_suffix.items(), key=lambda kind: -len(kind[1]))]
    more = " and others" if len(said) > MAX_NAMED or len(files) == MAX_FILES else ""
    return f"it holds {', '.join(said[:MAX_NAMED])}{more}"


def _kind(suffix: str, paths: list[Path], folder: Path) -> str:
    names = [path.relative_to(folder).as_posix() for path in paths[:MAX_NAMED]]
    shown = ", ".join(names) + (", ..." if len(paths) > MAX_NAMED else "")
    coco = ": annotations of COCO, by their keys" if any(map(_is_coco, paths[:MAX_NAMED])) else ""
    what = f"{suffix or 'other'} file"
    return f"{counted(len(paths), what)} ({shown}{coco})"


def _is_coco(path: Path) -> bool:
    if path.suffix.lower() != ".json" or path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return any(key in head for key in _COCO)


def about_invalid(valid: Mapping[str, int], expected: str) -> str:
    """The sentence below a list of invalid samples.

    valid: by split, how many samples are valid. expected: what a source of this task is.
    """
    if all(valid.values()):
        return "Correct them, or leave them out with data.skip_invalid: true in params.yaml"
    empty = " and ".join(split for split, count in valid.items() if not count)
    return f"Nothing of {empty} is valid, so data.skip_invalid is no help. Expected: {expected}; {READ_ON}"
