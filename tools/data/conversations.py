"""A folder of conversations: their form, and the dataset that reads them."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import Any

from stages.core.errors import UserError, join_truncated
from stages.core.params.schema import DatasetParams, SplitParams
from stages.core.records import cut
from stages.data.folder import Folder
from stages.data.parquet import column_names, read_rows, read_schema
from stages.data.sources import READ_ON, VALIDATION, describe_folder, files_by_split, is_set, parquet_folder
from stages.data.texts import UnreadableText, json_objects, read_text
from stages.tasks.chat.sources.forms import FORMS, form_of
from stages.tasks.detection.sources import FORMS as IMAGE_FORMS

KEYS = re.compile(rb'"(%s)"\s*:' % "|".join(key for form in FORMS for key in form.needed).encode())
"""A key of a conversation in JSON: a file that has none in its first HEAD bytes holds something else, such as boxes."""
HEAD = 65_536
FIRST = 64
"""Rows of which the first that is a conversation has the form of a file."""
HIDDEN = re.compile(r"\.|__MACOSX").match


def conversations(source: str) -> tuple[DatasetParams, str] | None:
    """The dataset of a folder, and a line on the form of each file, empty for a file that is empty or broken, which
    `prepare` refuses by line; None for a folder of images without a conversation.

    Raises UserError for JSON Lines, or a table without boxes, of another form, and for a folder without any images too.
    """
    folder, _ = parquet_folder(source)
    visible = [path for path in sorted(folder.rglob("*")) if not any(map(HIDDEN, path.relative_to(folder).parts))]
    rows = {path: _typical_row(path) for path in visible if path.is_file()}
    forms = {path: form for path, row in rows.items() if row and (form := form_of(row))}
    if not forms:
        files, expected = Folder(folder, SplitParams()), ", or ".join(map(str, FORMS))
        others = [(path, row) for path, row in rows.items() if row == {} or (row and path.suffix.lower() != ".json")]
        photos = files.images and not others  # its annotations, a file an image, take long to look for
        if photos or any(form.annotation_files(files) for form in IMAGE_FORMS.values()):
            return None
        if files.with_suffix(".arrow"):
            raise UserError(
                f"{folder} is of save_to_disk: load_from_disk, and each split's to_parquet('data/train.parquet')"
            )
        for path, row in others:
            if path.name == "metadata.jsonl" and "objects" in row:
                raise UserError(f"{path} has an imagefolder's boxes: write them as COCO's JSON; {READ_ON}")
            if row == {}:
                return DatasetParams(task="chat", source=source, splits=_splits(folder, [path])), ""
            if not (path.suffix.lower() == ".parquet" and "box" in "".join(column_names(read_schema(path))).lower()):
                keys = cut(", ".join(key for key, value in row.items() if is_set(value)))
                raise UserError(f"{path} has {keys} in a row; expected {expected}. Rename them; {READ_ON}")
        if not files.images and not files.with_suffix(".parquet"):
            raise UserError(
                f"{folder} has neither conversations nor images: {describe_folder(folder)}. Expected .jsonl, .json or "
                f".parquet files, each object or row with {expected}; {READ_ON}"
            )
        return None
    form_names = [f"{form}, as in {form.name}: {path.relative_to(folder).as_posix()}" for path, form in forms.items()]
    return DatasetParams(task="chat", source=source, splits=_splits(folder, list(forms))), join_truncated(form_names, 4)


def _typical_row(path: Path) -> Mapping[str, Any] | None:
    """The first conversation, or else the first object, of a file that may hold conversations; an empty one if it is
    empty or broken."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _typical(read_rows(path))
    if suffix not in (".jsonl", ".json"):
        return None
    with path.open("rb") as file:
        head = file.read(HEAD)
    if suffix == ".json" and head.strip(b"[] \t\r\n") and not KEYS.search(head):
        return None
    try:
        _, objects = json_objects(read_text(path))
    except UnreadableText:
        return {}
    return _typical(each for _, each in objects if isinstance(each, dict)) or {}


def _typical(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    first = None
    for row in islice(rows, FIRST):  # which may hold images
        if form_of(row):
            return row
        first = first or row
    return first


def _splits(folder: Path, paths: list[Path]) -> SplitParams:
    """The splits to name: none where the files' names and places say them."""
    tables = [path for path in paths if path.suffix.lower() == ".parquet" and path.parent == folder / "data"]
    beside = tables or [path for path in paths if path.parent == folder]
    try:
        read = files_by_split(folder, beside, SplitParams(), expected="")
    except UserError:
        read = {}
    found = {split: [path.relative_to(folder).as_posix() for path in some] for split, some in read.items()}
    named = Folder(folder, SplitParams()).by_split([path.relative_to(folder).as_posix() for path in paths])
    validation = next((split for split in VALIDATION if split in named), "val")
    given = {"train": named["train"] or named[None], "val": named[validation]}
    if set(found["val"]) <= set(given["val"]) if "val" in found else {**found, "val": []} == given:
        return SplitParams()
    given |= {"test": named["test"]} if validation != "test" else {}
    return SplitParams(**{split: tuple(_patterns(folder, sorted(some))) for split, some in given.items()})


def _patterns(folder: Path, paths: list[str]) -> Iterator[str]:
    """These files, those of a folder by one pattern if nothing else matches it."""
    for (parent, suffix), same in groupby(paths, lambda path: (PurePosixPath(path).parent, PurePosixPath(path).suffix)):
        names = [*same]
        pattern = f"{glob.escape(str(parent))}/*{suffix}".removeprefix("./")
        yield from [pattern] if len([*folder.glob(pattern)]) == len(names) > 1 else map(glob.escape, names)
