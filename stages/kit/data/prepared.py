"""A dataset as `prepare` wrote it: its records, and the origin that its stats.json names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pydantic import ConfigDict

from stages.core.documents import read_json
from stages.core.errors import UserError
from stages.kit.data.parquet import read_rows, read_schema

STATS_FILE = "stats.json"
PICTURES = "images"
"""The column of the pictures that conversations show, one or several a row."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A dataset that a mix was made of."""

    source: str
    asked: int | None
    """Training samples to take of it at most; None for all."""

    __pydantic_config__ = ConfigDict(strict=True)


@dataclass(frozen=True, kw_only=True)
class Origin:
    source: str
    """As it was resolved."""
    parts: dict[str, Part] = field(default_factory=dict)
    """Of a mix, by name."""

    __pydantic_config__ = ConfigDict(strict=True)


def read_origin(prepared_dir: Path) -> Origin:
    """Reads stats.json. Raises UserError if it is missing or damaged."""
    return read_json(Origin, prepared_dir / STATS_FILE, fix=f"dvc repro -f -s prepare@{prepared_dir.name}")


@dataclass(frozen=True)
class PreparedRow:
    """The place of a prepared record."""

    path: Path
    row: int
    """Counted from 0."""

    def damaged(self, problem: str) -> UserError:
        return UserError(f"{self.path} row {self.row}: {problem}; {_rebuild(self.path.parent)}")


def shows_pictures(prepared_dir: Path) -> bool:
    """Whether conversations of a dataset show pictures: where any split has some, all have the column."""
    return PICTURES in read_schema(prepared_dir / "train.parquet", fix=_rebuild(prepared_dir)).names


def to_row(record: Any, schema: pa.Schema) -> dict[str, Any]:
    """A record as a row of a prepared split: its attributes of the columns' names."""
    return {name: getattr(record, name) for name in schema.names}


def read_prepared(
    prepared_dir: Path,
    split: str,
    schema: pa.Schema,
    parse: Callable[[dict[str, Any], PreparedRow], T],
    *,
    may_lack: Collection[str] = (),
    may_have: pa.Field | None = None,
) -> list[T]:
    """The records of a split that `prepare` wrote, in their order, at least one.

    parse: makes a record of a row; raises ValueError or TypeError for a row that is none.
    may_lack: columns whose value may be missing. may_have: a column more, at the end of some files.
    Raises UserError where prepare has not run, and where the file is damaged or another task's.
    """
    path, fix = prepared_dir / f"{split}.parquet", _rebuild(prepared_dir)
    if not path.is_file():
        raise UserError(f"no prepared data at {path}; run: dvc repro prepare@{prepared_dir.name}")
    found = read_schema(path, fix=fix)
    if may_have is not None and may_have.name in found.names:
        schema = schema.append(may_have)
    if not found.equals(schema):
        wrong = [*_beyond(found, schema), *(f"no {column}" for column in _beyond(schema, found))]
        raise UserError(f"{path} is not of this task: it has {', '.join(wrong) or 'other columns'}; {fix}")
    records = []
    for number, row in enumerate(read_rows(path, fix=fix)):
        place = PreparedRow(path, number)
        if missing := [name for name, value in row.items() if value is None and name not in may_lack]:
            raise place.damaged(f"{', '.join(missing)} is missing")
        try:
            records.append(parse(row, place))
        except (ValueError, TypeError) as error:
            raise place.damaged(str(error)) from None
    if not records:
        raise UserError(f"{path} has no row; {fix}")
    return records


def _beyond(one: pa.Schema, other: pa.Schema) -> list[str]:
    """The columns of one that the other has not."""
    return [f"{column.name} ({column.type})" for column in one if not any(map(column.equals, other))]


def _rebuild(prepared_dir: Path) -> str:
    return f"rebuild it with: dvc repro -f -s prepare@{prepared_dir.name}"
