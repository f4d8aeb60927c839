"""The records of AMR parsing: a sentence and its graph."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from stages.kit.data.prepared import PreparedRow, read_prepared
from stages.kit.data.texts import same_text
from stages.tasks.amr.samples.graphs import MalformedGraph, Node, canonical, penman_line, read_graph

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
    place: PreparedRow | None = field(default=None, compare=False, repr=False)

    def subject(self) -> str:
        """A digest, equal for records that may not be in two splits: of the same sentence."""
        return hashlib.sha256(same_text(self.sentence).encode()).hexdigest()

    def content(self) -> list[str]:
        return [self.sentence, self.graph, self.canonical]

    def parsed(self) -> Node:
        """The canonical graph. Raises UserError where prepared data are damaged."""
        return self._read(self.canonical)

    def as_it_was(self) -> Node:
        """The graph as it was read. Raises likewise."""
        return self._read(self.graph)

    def _read(self, graph: str) -> Node:
        try:
            return read_graph(graph)
        except MalformedGraph as malformed:
            if self.place is None:
                raise
            raise self.place.damaged(str(malformed)) from None


def parse_record(sample_id: str, sentence: str, graph: str, *, file: str, line: int) -> Record:
    """Raises graphs.MalformedGraph where the graph is none."""
    return Record(sample_id, sentence, graph, penman_line(canonical(read_graph(graph))), file, line)


def read_split(prepared_dir: Path, split: str) -> list[Record]:
    """The records of a prepared split, in their order.

    Raises UserError where prepare has not run, or what it wrote is damaged.
    """
    return read_prepared(prepared_dir, split, SCHEMA, lambda row, place: Record(**row, place=place))
