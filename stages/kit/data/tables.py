"""Parquet tables of a dataset's splits: finding, reading and writing them, whatever their columns mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.kit.errors import UserError

# Rows held in memory at once. Groups of a fixed size also give the same file for the same rows.
ROW_GROUP = 64


@dataclass(frozen=True, order=True)
class RowAt:
    """Where a row was read."""

    file: str
    """Relative to the dataset's folder, so that it reads the same on every machine."""
    row: int | None = None
    """Counted from 0; None for a fault of the whole file."""

    def __str__(self) -> str:
        return self.file if self.row is None else f"{self.file} row {self.row}"


def split_files(folder: Path, split: str) -> list[Path]:
    """The parquet files of a split, in order of name: `data/{split}-*.parquet`, else `{split}*.parquet`.

    Raises UserError where the folder or the split's files are missing.
    """
    if not folder.is_dir():
        raise UserError(f"no dataset folder {folder}; point the dataset's `source` in params.yaml at one that exists")
    files = sorted(folder.glob(f"data/{split}-*.parquet")) or sorted(folder.glob(f"{split}*.parquet"))
    if not files:
        raise UserError(
            f"{folder} has no files for the split {split}; "
            f"expected data/{split}-*.parquet or {split}*.parquet, as a Hugging Face dataset has them"
        )
    return files


def count_rows(path: Path) -> int:
    """Raises UserError where the file is not parquet."""
    with _open(path) as file:
        return int(file.metadata.num_rows)


def missing_columns(path: Path, required: Sequence[str]) -> list[str]:
    """Those of `required` that the file does not have; `outer.inner` names a field of a struct column.

    Raises UserError where the file is not parquet.
    """
    with _open(path) as file:
        schema = file.schema_arrow
    return [name for name in required if not _has_column(pa.struct(list(schema)), name.split("."))]


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of one file in their order, as plain Python values, a few at a time.

    Raises UserError where the file is not parquet or is damaged.
    """
    with _open(path) as file:
        batches = file.iter_batches(batch_size=ROW_GROUP, columns=list(columns) if columns else None)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise UserError(f"{path} is damaged: {error}; fetch or copy it again") from error
            if batch is None:
                return
            yield from batch.to_pylist()


def write_rows(rows: Iterable[dict[str, Any]], path: Path, schema: pa.Schema) -> None:
    """Write rows as they come; the file appears under its name only when it is whole.

    The same rows give the same bytes (with the same pyarrow).
    """
    aside = path.with_name(path.name + ".partial")
    try:
        # Encoded pictures do not compress further, and plain bytes do not change with a codec's version.
        with pq.ParquetWriter(aside, schema, compression="none") as writer:
            group: list[dict[str, Any]] = []
            for row in rows:
                group.append(row)
                if len(group) == ROW_GROUP:
                    writer.write_table(pa.Table.from_pylist(group, schema=schema))
                    group = []
            if group:
                writer.write_table(pa.Table.from_pylist(group, schema=schema))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}") from error


def _has_column(struct: pa.StructType, steps: Sequence[str]) -> bool:
    index = int(struct.get_field_index(steps[0]))  # -1 where there is none
    if index < 0 or len(steps) == 1:
        return index >= 0
    inner = struct.field(index).type
    return bool(pa.types.is_struct(inner)) and _has_column(inner, steps[1:])
