"""Sources of models and datasets: a repository of the hub or a folder, and the files of a dataset's splits."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from stages.core.errors import UserError, join_truncated, listed, pluralize
from stages.core.given_files import require_own
from stages.core.params.schema import SplitParams
from stages.data.parquet import count_rows, missing_columns, read_rows

READ_ON = "see docs/data.md"
VALIDATION = ("val", "dev", "test")
"""Splits to validate on; the first that any file has counts."""
_NAMES = {"train": "train|training", "val": "val|valid|validation", "dev": "dev", "test": "test|testing"}
"""Words with which the names of a split's files begin."""
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


def fetch_snapshot(
    repo_type: Literal["model", "dataset"], repo_id: str, revision: str, *, patterns: Sequence[str]
) -> tuple[Path, str]:
    """Download the files of a hub repository that match `patterns`, or find them in the local cache.

    revision: a full commit, the first 7 or more hex digits of one, or a branch or tag.
    Returns the folder and the full commit it holds. Only a full commit can be found in the cache without a network.
    Raises UserError if the repository or the revision does not exist, or the hub cannot be reached.
    """
    # Slow to import, and needed for this source only.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    try:
        commit = _full_commit(repo_type, repo_id, revision)
        folder = snapshot_download(repo_id, repo_type=repo_type, revision=commit, allow_patterns=list(patterns))
    # OSError: no such repository, not in the cache, offline mode. HTTPError: no connection, whatever library makes it.
    except (OSError, HTTPError, HFValidationError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"could not fetch the {repo_type} {repo_id}@{revision} from the hub: {reason.strip().rstrip('.')}. "
            "Check the name, the revision and the network (HF_HUB_OFFLINE must be unset), "
            "or use a copy on disk with folder:PATH"
        ) from error
    return Path(folder), commit


def _full_commit(repo_type: str, repo_id: str, revision: str) -> str:
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    from huggingface_hub import HfApi

    if not re.fullmatch("[0-9a-f]{7,39}", revision):
        commit = HfApi().repo_info(repo_id, revision=revision, repo_type=repo_type).sha
        assert commit is not None, f"the hub gave no commit for {repo_id}@{revision}"
        return commit
    # The hub resolves branches and full commits only.
    commits = [commit.commit_id for commit in HfApi().list_repo_commits(repo_id, repo_type=repo_type)]
    matching = [commit for commit in commits if commit.startswith(revision)]
    if len(matching) != 1:
        count = pluralize(len(matching), "commit")
        raise UserError(
            f"{count} of {repo_id} on the hub start with {revision}, expected one; the newest is {commits[0]}"
        )
    return matching[0]


def source_folder(source: str, *, known: str = "folder:PATH or hub:OWNER/NAME@REVISION") -> Path:
    """The folder of `folder:PATH`. Raises UserError for another source, and if the folder does not exist.

    known: the sources that the task reads, for the message.
    """
    kind, _, path = source.partition(":")
    if kind != "folder" or not path:
        raise UserError(f"unknown source {source!r}; expected {known}")
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


def read_parquet_files(
    folder: Path, paths: Sequence[Path], *, required: Sequence[str], expected: str, also: Sequence[str] = ()
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The raw rows of a folder's files, in their order.

    required: columns, `outer.inner` for a field of a struct. also: columns that a file may lack. Others are not read.
    expected: describes the files, for the message of the UserError raised if a column is missing.
    """
    lacking = [(path, ", ".join(missing)) for path in paths if (missing := missing_columns(path, required))]
    if lacking:
        lines = [f"{path} lacks {columns}, for all {count_rows(path)} rows" for path, columns in lacking]
        raise UserError(f"columns are missing:\n{listed(lines)}\nExpected: {expected}; {READ_ON}")
    columns = dict.fromkeys(name.partition(".")[0] for name in (*required, *also))
    for path in paths:
        file = path.relative_to(folder).as_posix()
        rows = read_rows(path, list(columns))
        # disable=None shows it on a terminal only.
        shown = tqdm(rows, desc=file, total=count_rows(path), unit=" rows", leave=False, disable=None)
        for number, row in enumerate(shown):
            yield Place(file, number, "row"), row


class WrongSplit(UserError):
    """Raised for an entry of a dataset's `splits` whose files are not there, or are another split's too; the message
    begins with its path below the dataset's."""


def named_files(folder: Path, splits: SplitParams) -> dict[str, list[Path]]:
    """The files that the dataset's `splits` names, by split. Raises WrongSplit."""
    found: dict[str, list[Path]] = {}
    for split, patterns in splits.patterns().items():
        found[split] = []
        for pattern in patterns:
            here = f"splits.{split}: {pattern!r}"
            try:
                forms = {pattern, *(unicodedata.normalize(form, pattern) for form in ("NFC", "NFD"))}
                matching = sorted({path for each in forms for path in folder.glob(each) if not path.is_dir()})
            except (ValueError, NotImplementedError) as error:  # a path that is absolute, or `**` within a name
                raise WrongSplit(f"{here} is no pattern of paths below a folder: {error}") from None
            if not matching:
                raise WrongSplit(f"{here} matches no file of {folder}: {describe_folder(folder)}")
            for path in matching:
                require_own(path, folder)
            if twice := [path for path in matching if any(path in paths for paths in found.values())]:
                raise WrongSplit(f"splits.{split}: {twice[0]} is matched by another pattern too")
            found[split] += matching
    return found


def files_by_split(
    folder: Path, files: Sequence[Path], splits: SplitParams, *, expected: str, named_train: bool = True
) -> dict[str, list[Path]]:
    """The files of each split: those that `splits` names; of the others `files` whose names begin with the word train,
    and those of the first of VALIDATION. Without `val` if there are none. devices.jsonl does not begin with dev.

    named_train: whether files to train on are called so; else, without any train*, all others are.
    expected: describes the files, for the message of the UserError raised if there are none to train on.
    """
    named = named_files(folder, splits)
    taken = {path for paths in named.values() for path in paths}

    def beginning_with(begin: str) -> list[Path]:
        word = re.compile(f"({_NAMES[begin]})(?![a-z])", re.IGNORECASE)
        return [path for path in files if word.match(path.name) and path not in taken]

    found = {"train": beginning_with("train")}
    if not (named_train or found["train"] or "train" in named):
        return {"train": [path for path in files if path not in taken], **named}
    if val := next((some for name in VALIDATION if name not in named and (some := beginning_with(name))), None):
        found["val"] = val
    found |= named
    if not found["train"]:
        raise UserError(f"{folder} has no training files: {describe_folder(folder)}. Expected: {expected}; {READ_ON}")
    return found


def is_set(value: Any) -> bool:
    """Whether a field has a value: tables have nulls and empty lists where JSON has no key."""
    return value is not None and value not in ("", [], {})


def describe_folder(folder: Path) -> str:
    """The files in a folder, by kind: `it holds 12 .jpg files (1.jpg, ...)`. Links are not followed."""
    walked = (Path(here, name) for here, _, names in os.walk(folder) for name in names)
    by_suffix: dict[str, list[str]] = defaultdict(list)
    for path in sorted(islice(walked, MAX_FILES)):
        by_suffix[path.suffix.lower() or "other"].append(path.relative_to(folder).as_posix())
    kinds = []
    for suffix, names in sorted(by_suffix.items(), key=lambda kind: -len(kind[1])):
        shown = names[:MAX_NAMED] + ["..."] * (len(names) > MAX_NAMED)
        kinds.append(f"{pluralize(len(names), suffix + ' file')} ({', '.join(shown)})")
    return f"it holds {join_truncated(kinds, MAX_NAMED)}" if kinds else "it is empty"
