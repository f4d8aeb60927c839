"""Parquet files, as a dataset of the hub has them: in Open Food Facts' schema, or with the columns that params name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.core.documents import shown
from stages.core.errors import UserError
from stages.kit.data.parquet import read_schema
from stages.kit.data.sources import read_parquet_split, split_paths
from stages.tasks.detection.sources.folders.files import RawSample, Splits, held_out_images, objects
from stages.tasks.detection.sources.rows import REQUIRED, Columns

EXPECTED = f"parquet files with the columns {', '.join(REQUIRED)}"


def read_tables(folder: Path, columns: Columns | None) -> Splits:
    """The files of `train` and `val`, or of what the hub calls its validation split.

    Raises UserError where the files of a split or one of their columns are missing.
    """
    required: Sequence[str] = REQUIRED
    if columns is None:
        expected = EXPECTED
    else:
        named = (columns.image_id, columns.image, columns.boxes, columns.category)
        required = tuple(name for name in named if name is not None)
        expected = f"parquet files with the columns {', '.join(required)}, as `columns` of the dataset names them"
    splits = ["train", "val"] if columns is None or split_paths(folder, "val") else ["train"]
    return Splits(
        samples={split: _samples(folder, split, required, expected, columns) for split in splits},
        validation=None if "val" in splits else held_out_images(),
    )


def _samples(
    folder: Path, split: str, required: Sequence[str], expected: str, columns: Columns | None
) -> Iterator[RawSample]:
    names: dict[str, list[str] | None] = {}
    for place, row in read_parquet_split(folder, split, required=required, expected=expected):
        if columns is None:
            yield place, row
            continue
        if place.file not in names:
            names[place.file] = class_names(folder / place.file, columns.category)
        yield place, _row(row, str(place), columns, names[place.file])


def _row(row: Mapping[str, Any], place: str, columns: Columns, names: list[str] | None) -> dict[str, Any]:
    image, image_id = _at(row, columns.image), _at(row, columns.image_id) if columns.image_id else place
    boxes, categories = _at(row, columns.boxes), _at(row, columns.category)
    problems: list[str] = []
    if isinstance(categories, list):
        categories = [_name(each, names, problems) for each in categories]
    return {
        "image_id": str(image_id) if isinstance(image_id, int) else image_id,
        "image": {"bytes": image} if isinstance(image, bytes) else image,
        "objects": {"bbox": boxes, "category_name": categories} if boxes is not None else objects([], []),
        "problems": problems,
    }


def _name(category: Any, names: list[str] | None, problems: list[str]) -> Any:
    if not isinstance(category, int):
        return category
    if names is None:
        problems.append(f"category {category} is a number, and the file says nothing of what it means")
    elif not 0 <= category < len(names):
        problems.append(f"category {category} is not one of the {len(names)} that the file names")
    else:
        return names[category]
    return "?"


def _at(value: Any, path: str) -> Any:
    """The value of a field, or those of a list of structs."""
    for step in path.split("."):
        if isinstance(value, list):
            value = [each.get(step) if isinstance(each, Mapping) else None for each in value]
        else:
            value = value.get(step) if isinstance(value, Mapping) else None
    return value


def class_names(path: Path, column: str) -> list[str] | None:
    """The names behind the numbers of a column, from what the library `datasets` writes into the file (ClassLabel).

    None where it says nothing. Raises UserError where that is no JSON of this form.
    """
    metadata = read_schema(path).metadata or {}
    if b"huggingface" not in metadata:
        return None
    try:
        here: Any = json.loads(metadata[b"huggingface"])["info"]["features"]
        for step in column.split("."):
            here = _inner(_inner(here)[step])
        names = here.get("names") if here.get("_type") == "ClassLabel" else None
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: the description of its columns (huggingface) cannot be read: {shown(error)}"
        ) from None
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f"{path}: the names of {column} are {shown(names)}, expected a list of names")
    return names


def _inner(feature: Any) -> Any:
    """What a list is of: datasets writes {"feature": ..., "_type": "List"}, or [...]."""
    if isinstance(feature, list):
        return _inner(feature[0])
    lists = ("List", "LargeList", "Sequence")
    return _inner(feature["feature"]) if isinstance(feature, dict) and feature.get("_type") in lists else feature
