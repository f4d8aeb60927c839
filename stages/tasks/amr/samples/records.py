"""What one sample is: a sentence and its graph."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from stages.kit.data.tables import read_rows
from stages.kit.errors import UserError
from stages.tasks.amr.samples.graphs import Node, canonical, penman_line, read_graph

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("sentence", pa.string()),
        ("graph", pa.string()),
        ("canonical", pa.string()),
        ("file", pa.string()),
        ("line", pa.int64()),
    ]
)
"""Of a prepared split."""


@dataclass(frozen=True)
class Record:
    id: str
    """The corpus' own, or FILE:LINE where it has none, or one that is not its alone."""
    sentence: str
    graph: str
    """PENMAN as it was read, whatever its form."""
    canonical: str
    """PENMAN in one line, the variables renamed and the words canonical."""
    file: str
    """Where it was read, relative to the dataset's folder."""
    line: int
    """Of the sentence, counted from 1."""

    def parsed(self) -> Node:
        """The canonical graph."""
        return read_graph(self.canonical)


def parse_record(sample_id: str, sentence: str, graph: str, *, file: str, line: int) -> Record:
    """Raises graphs.MalformedGraph where the graph is none."""
    return Record(sample_id, sentence, graph, penman_line(canonical(read_graph(graph))), file, line)


def to_row(record: Record) -> dict[str, Any]:
    """A record as a row of SCHEMA."""
    return dict(vars(record))


def read_split(prepared_dir: Path, split: str) -> list[Record]:
    """The records of a prepared split, in their order.

    Raises UserError where prepare has not run.
    """
    path = prepared_dir / f"{split}.parquet"
    if not path.is_file():
        raise UserError(f"no prepared data at {path}; run: dvc repro prepare@{prepared_dir.name}")
    return [Record(**row) for row in read_rows(path)]
