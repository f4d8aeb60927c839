"""Prepared datasets, as training and evaluation read them.

A prepared folder holds stats.json and a parquet file of each split: train, val, and test or selection if there is one
(stages/data/prepared.py writes them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import pyarrow as pa
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from stages.core.errors import UserError
from stages.core.records import obtain, read_record, rebuild
from stages.data.parquet import read_rows, read_schema

STATS_FILE = "stats.json"
IMAGE_COLUMN = "images"
"""The column of the images that conversations show, one or several a row."""

T = TypeVar("T")


_COLUMN_TYPES = {str: pa.string(), bytes: pa.binary(), int: pa.int64(), float: pa.float64()}


def schema_of(record: type, *names: str) -> pa.Schema:
    """The columns of the fields of a record, of all or of these, in this order."""
    kinds = get_type_hints(record)
    return pa.schema([(name, _column_type(kinds[name])) for name in names or kinds])


def _column_type(kind: Any) -> pa.DataType:
    """The type of a column: a list for a tuple, a struct for a NamedTuple; a text may be None, or one of several."""
    if get_origin(kind) is tuple:
        return pa.list_(_column_type(get_args(kind)[0]))
    if hasattr(kind, "_fields"):
        return pa.struct(list(schema_of(kind)))
    return pa.string() if kind == str | None or get_origin(kind) is Literal else _COLUMN_TYPES[kind]


def to_rows(records: Iterable[Any], schema: pa.Schema) -> Iterator[dict[str, Any]]:
    """Records as rows of a prepared split: their attributes of the columns' names, structs as tuples."""
    names = schema.names
    structs = {
        column.name: attrgetter(*(inner.name for inner in column.type.value_type))
        for column in schema
        if pa.types.is_list(column.type) and pa.types.is_struct(column.type.value_type)
    }
    for record in records:
        row = {name: getattr(record, name) for name in names}
        yield {**row, **{name: [*map(values, row[name])] for name, values in structs.items()}}


def _parser(kind: Any) -> Callable[[Any], Any] | None:
    """Parses a column's value as a field of this kind: a list as a tuple, a struct as a record or NamedTuple; None if
    the value stays as it is."""
    if get_origin(kind) is tuple:
        parse = _parser(get_args(kind)[0])
        return (lambda values: tuple(map(parse, values))) if parse else tuple
    return (lambda fields: kind(**fields)) if isinstance(kind, type) and kind not in _COLUMN_TYPES else None


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True))
class Part:
    """A dataset of a mix."""

    source: str
    asked: int | None
    """Training samples to take at most; None for all."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True))
class Origin:
    """The source of a prepared dataset."""

    source: str
    """With the full commit of a hub dataset."""
    parts: dict[str, Part] = Field(default_factory=dict)
    """The datasets of a mix, by name."""


def read_origin(prepared_dir: Path) -> Origin:
    """Reads stats.json. Raises UserError if it is missing or damaged."""
    return read_record(Origin, prepared_dir / STATS_FILE, fix=rebuild(f"prepare@{prepared_dir.name}"))


def read_prepared(
    prepared_dir: Path, split: str, record: type[T], schema: pa.Schema, *, may_have: Sequence[pa.Field] = ()
) -> list[T]:
    """The records of a split that `write_prepared` wrote, in their order, at least one.

    A value is null only in a column of a field of type `str | None`. may_have: further columns at the end of some
    files, in this order.
    Raises UserError if the split is not prepared, damaged, or another task's.
    """
    stage = f"prepare@{prepared_dir.name}"
    path, fix = prepared_dir / f"{split}.parquet", f"rebuild it with: {rebuild(stage)}"
    if not path.is_file():
        if (prepared_dir / STATS_FILE).is_file() and split == "test":
            where = f"splits.test of the dataset {prepared_dir.name}"
            raise UserError(f"{prepared_dir} has no test split; name its files in params.yaml, below {where}")
        raise UserError(f"no prepared data at {path}; {obtain(stage)}")
    found = read_schema(path, fix=fix)
    for column in may_have:
        schema = schema.append(column) if column.name in found.names else schema
    if not found.equals(schema):
        wrong = [f"{column.name} ({column.type})" for column in found if column not in [*schema]]
        wrong += [f"no {column.name} ({column.type})" for column in schema if column not in [*found]]
        raise UserError(f"{path} is not of this task: it has {', '.join(wrong) or 'other columns'}; {fix}")
    records, kinds = [], get_type_hints(record)
    nullable = {name for name in schema.names if kinds[name] == str | None}
    parsers = {name: parse for name in schema.names if (parse := _parser(kinds[name]))}
    for number, row in enumerate(read_rows(path, fix=fix)):
        if missing := [name for name, value in row.items() if value is None and name not in nullable]:
            raise UserError(f"{path} row {number}: {', '.join(missing)} is missing; {fix}")
        records.append(record(**{**row, **{name: parse(row[name]) for name, parse in parsers.items()}}))
    if not records:
        raise UserError(f"{path} has no row; {fix}")
    return records
