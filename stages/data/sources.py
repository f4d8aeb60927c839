"""Sources of datasets: a folder or a repository of the hub, and the files of the splits."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stages.core.errors import UserError, join_truncated, pluralize
from stages.core.given_files import require_own
from stages.core.params.schema import SplitParams
from stages.core.records import shown
from stages.data.hub import fetch_snapshot
from stages.data.parquet import count_rows, read_rows

READ_ON = "see docs/data.md"
VALIDATION = ("val", "dev", "test")
"""Splits to validate on; the first that any file has counts."""
SPLIT_WORDS = {name: name for name in ("train", *VALIDATION)}
SPLIT_WORDS |= {"training": "train", "testing": "test"}
SPLIT_WORDS |= dict.fromkeys(("valid", "validation", "eval", "evaluation", "holdout"), "val")
SPLIT_WORDS |= {f"{word}{behind}": split for word, split in [*SPLIT_WORDS.items()] for behind in ("set", "data")}
_FLAGS = {"holdout": "val", **{f"is_{word}": split for word, split in SPLIT_WORDS.items()}}
_FLAGS |= dict.fromkeys(("deleted", "skip", "exclude"), "none")
SPLIT_FIELDS = dict.fromkeys(("split", "subset", "partition", "fold", "set"), SPLIT_WORDS)
SPLIT_FIELDS |= {name: dict.fromkeys(("true", "1", "yes"), split) for name, split in _FLAGS.items()}
"""Fields that say the split of a row, with the split of each value."""
MAX_FILES, MAX_NAMED = 10_000, 3


@dataclass(frozen=True)
class Place:
    """The place of a sample in a dataset."""

    file: str
    """Relative to the dataset's folder, so that it reads the same on every machine."""
    number: int | str | None = None
    """Number of the line, counted from 1, or of the row, counted from 0, or an entry's own id; None: the whole file."""
    unit: str = "line"

    def __str__(self) -> str:
        return self.file if self.number is None else f"{self.file} {self.unit} {self.number}"


def source_folder(source: str, *, known: str = "folder:PATH or hub:OWNER/NAME@REVISION") -> Path:
    """The folder of `folder:PATH`. Raises UserError for another source, and if the folder does not exist.

    known: the sources that the task reads, for the message.
    """
    kind, _, path = source.partition(":")
    if kind != "folder" or not path:
        raise UserError(f"unknown source {source!r}; expected {known}")
    if Path(path).is_file():
        raise UserError(f"{path} is a file; give the folder that holds it")
    if not Path(path).is_dir():
        raise UserError(f"no dataset folder {path}; point the dataset's `source` in params.yaml at one that exists")
    return Path(path)


def parquet_folder(source: str) -> tuple[Path, str]:
    """The folder of `folder:PATH` or `hub:OWNER/NAME@REVISION`, and the source with the full commit.

    Raises UserError as source_folder, and if the hub does not have it.
    """
    kind, _, rest = source.partition(":")
    repo_id, at, revision = rest.partition("@")
    if kind == "hub" and at:
        folder, commit = fetch_snapshot("dataset", repo_id, revision, patterns=["data/*.parquet"])
        return folder, f"hub:{repo_id}@{commit}"
    return source_folder(source), source


def table_rows(
    folder: Path, path: Path, columns: Sequence[str] | None = None
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The rows of a parquet file, or these columns of them, with the place of each."""
    file = path.relative_to(folder).as_posix()
    # disable=None shows it on a terminal only.
    rows = tqdm(read_rows(path, columns), file, count_rows(path), leave=False, unit=" rows", disable=None)
    return ((Place(file, number, "row"), row) for number, row in enumerate(rows))


class WrongSplit(UserError):
    """Raised for an entry of a dataset's `splits` or `repeat` with files that are not there, or another split's too;
    the message begins with its path below the dataset's."""


def named_files(folder: Path, splits: SplitParams) -> dict[Path, str]:
    """The files that the dataset's `splits` names, with the split of each. Raises WrongSplit."""
    found: dict[Path, str] = {}
    for split, pattern in ((split, pattern) for split, some in splits.patterns().items() for pattern in some):
        here, forms = f"splits.{split}: {pattern!r}", {unicodedata.normalize(form, pattern) for form in ("NFC", "NFD")}
        try:
            matching = {path for each in {pattern, *forms} for path in folder.glob(each) if not path.is_dir()}
        except (ValueError, NotImplementedError) as error:  # a path that is absolute, or `**` within a name
            raise WrongSplit(f"{here} is no pattern of paths below a folder: {error}") from None
        if not matching:
            raise WrongSplit(f"{here} matches no file of {folder}: {describe_folder(folder)}")
        for path in sorted(matching):
            require_own(path, folder)
            if path in found:
                raise WrongSplit(f"splits.{split}: {path} is matched by another pattern too")
            found[path] = split
    return found


def files_by_split(
    folder: Path, files: Sequence[Path], splits: SplitParams, *, expected: str, named_train: bool = True
) -> dict[str, list[Path]]:
    """The files of each split: those that `splits` names; of the other `files`, those named train...,
    and those of the first of VALIDATION. Without `val` if there are none.

    named_train: whether files to train on are called so; else, without any train*, those that begin with no word are.
    expected: describes the files, for the message of the UserError raised if there are none to train on, or if one of
        several has the word of a split within its name.
    """
    split_named = named_files(folder, splits)
    named, by_word = defaultdict[str, list[Path]](list), defaultdict[str, list[Path]](list)
    for path, split in split_named.items():
        named[split].append(path)
    others = [path for path in files if path not in split_named]
    for path in others:
        first_word, *_ = re.split("[^a-z]", path.name.lower(), maxsplit=1)  # empty for 1.jsonl
        by_word[SPLIT_WORDS.get(first_word, "")].append(path)
    if not (named_train or by_word["train"] or "train" in named):
        by_word["train"] = by_word.pop("", [])
        for path in by_word["train"]:
            if (words := SPLIT_WORDS.keys() & re.split("[^a-z]+", path.stem.lower())) and len(others) > 1:
                raise UserError(
                    f"{path.name} begins with no word of a split, and has {min(words)!r}; begin its name with the "
                    f"word, or name the files of {folder} in `splits`; {READ_ON}"
                )
    validation = next((name for name in VALIDATION if by_word[name] and name not in named), None)
    found = {"train": by_word["train"], **({"val": by_word[validation]} if validation else {}), **named}
    if not found["train"]:
        raise UserError(
            f"{folder} has no training files: {describe_folder(folder)}. Expected: {expected}; `splits` names others, "
            f"{READ_ON}"
        )
    return found


def other_split(row: Mapping[str, Any], split: str) -> str | None:
    """The problem of a row with a field that says it is of no split, or of train where `split` is another, or the other
    way round; None without one. A row of val may be of test: its file says where it is scored."""
    for key, value in row.items():
        says = (values := SPLIT_FIELDS.get(key.lower())) and values.get(str(value).strip().lower())
        if says == "none" or (says and (says == "train") != (split == "train")):
            return f"{key} is {shown(value)} in a row of {split}; put such rows into a file of their own"
    return None


def is_set(value: Any) -> bool:
    """Whether a field has a value: tables have nulls and empty lists where JSON has no key."""
    return value is not None and value not in ("", [], {})


def describe_folder(folder: Path) -> str:
    """The files in a folder, by kind: `it holds 12 .jpg files (1.jpg, 2.jpg, 3.jpg and 9 more)`.
    Links are not followed."""
    walked = (Path(here, name) for here, _, names in os.walk(folder) for name in names)
    by_suffix: dict[str, list[str]] = defaultdict(list)
    for path in sorted(islice(walked, MAX_FILES)):
        by_suffix[path.suffix.lower() or "other"].append(path.relative_to(folder).as_posix())
    kinds = [
        f"{pluralize(len(names), suffix + ' file')} ({join_truncated(names, MAX_NAMED)})"
        for suffix, names in sorted(by_suffix.items(), key=lambda kind: -len(kind[1]))
    ]
    return f"it holds {join_truncated(kinds, MAX_NAMED)}" if kinds else "it is empty"
