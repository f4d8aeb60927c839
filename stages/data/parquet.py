"""Parquet tables of any columns: reading them within limits of memory, and writing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.core.errors import UserError

ROW_GROUP = 64
"""Rows that are in memory at once. Groups of a fixed size also give the same file for the same rows."""
MAX_BYTES = 2**30
"""Bytes of one column's values that are in memory at once, unless a single value has more."""

ROW_GROUP_BYTES = MAX_BYTES // 16
"""A row group has fewer rows than ROW_GROUP if these would take more. Several images a row count as many times in the
limit on what is read at once, as each might be the largest."""

MAX_LISTED = MAX_BYTES // 64
"""List items of one column of a row group: an empty list takes 56 bytes, and 8 in the list around it. A few kilobytes
of a file can represent billions of them, all in one row."""

READING_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)
"""Errors that pyarrow raises on a damaged file; the last for names and texts that are not UTF-8."""
_FETCH = "fetch or copy it again"


def count_rows(path: Path) -> int:
    """Raises UserError if the file is not parquet."""
    with _open(path) as file:
        return int(file.metadata.num_rows)


def column_names(columns: Iterable[pa.Field], outer: str = "") -> Iterator[str]:
    """The name of each column, and `outer.inner` of each field of a struct, or of a list of structs or such lists."""
    for column in columns:
        yield f"{outer}{column.name}"
        inner = column.type
        while pa.types.is_list(inner) or pa.types.is_large_list(inner):
            inner = inner.value_type
        yield from column_names(inner, f"{outer}{column.name}.") if pa.types.is_struct(inner) else ()


def read_schema(path: Path, *, fix: str = _FETCH) -> pa.Schema:
    """fix: as for read_rows."""
    with _open(path, fix) as file:
        return file.schema_arrow


def read_rows(path: Path, columns: Sequence[str] | None = None, *, fix: str = _FETCH) -> Iterator[dict[str, Any]]:
    """The rows of one file in their order, as plain Python values, a few at a time.

    fix: for the message of the UserError raised if the file is not parquet or is damaged, or a row takes more memory
    than any image or text.
    """
    with _open(path, fix) as file:
        try:
            # Rows as mappings would keep the value of the last one.
            if twice := [name for name, count in Counter(column_names(file.schema_arrow)).items() if count > 1]:
                raise UserError(f"{path} has the column {twice[0]!r} twice; rename or remove one of them")
            rows = _rows_at_once(file, columns, path)
            for batch in file.iter_batches(batch_size=rows, columns=list(columns) if columns else None):
                batch.validate(full=True)
                yield from batch.to_pylist()
        except READING_ERRORS as error:
            raise UserError(f"{path} is damaged: {error}; {fix}") from error


def write_rows(rows: Iterable[dict[str, Any]], path: Path, schema: pa.Schema) -> None:
    """Write rows as they come; the file appears under its name only when it is whole.

    The same rows give the same bytes (with the same pyarrow). Each page has a checksum, which reading compares: an
    image with a flipped bit is an image too.
    """
    aside, left = path.with_name(path.name + ".partial"), iter(rows)
    try:
        # Encoded images do not compress further, and plain bytes do not change with a codec's version.
        with pq.ParquetWriter(aside, schema, compression="none", write_page_checksum=True) as writer:
            while group := list(islice(left, ROW_GROUP)):
                table = pa.Table.from_pylist(group, schema=schema)
                writer.write_table(table, row_group_size=max(1, len(group) * ROW_GROUP_BYTES // max(1, table.nbytes)))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _rows_at_once(file: pq.ParquetFile, columns: Sequence[str] | None, path: Path) -> int:
    """The number of rows that fit MAX_BYTES in any case: a file can hold a large value once, and a few bytes for each
    of many rows, or items of a row's list, that have it. Raises UserError if a single row would not fit.
    """
    largest = 1
    for number in range(file.metadata.num_row_groups):
        # Reads no row, but raises where the sizes of columns contradict each other: `column` would end the process.
        next(file.reader.iter_batches(0, [number]), None)
        group = file.metadata.row_group(number)
        for chunk in (group.column(index) for index in range(group.num_columns)):
            if columns and chunk.path_in_schema.partition(".")[0] not in columns:
                continue
            listed, a_row = chunk.num_values - group.num_rows, chunk.num_values / max(1, group.num_rows)
            size = chunk.total_uncompressed_size * (max(1, a_row) if chunk.physical_type == "BYTE_ARRAY" else 1)
            if listed > MAX_LISTED or (listed > 0 and size > MAX_BYTES):
                raise UserError(
                    f"{path} has {chunk.num_values:,} values of {chunk.path_in_schema} in {group.num_rows:,} rows, "
                    "which would take more memory than any image; leave such rows out"
                )
            largest = max(largest, int(size))
    return max(1, min(ROW_GROUP, MAX_BYTES // largest))


def _open(path: Path, fix: str = _FETCH) -> pq.ParquetFile:
    try:
        # Buffered ahead, a file of 500 MB takes 500 MB more, and four times as long.
        file = pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
        str(file.schema_arrow)  # names are decoded where they are looked at
    except READING_ERRORS as error:
        raise UserError(f"{path} cannot be read as parquet: {error}; {fix}") from error
    return file
