"""Text files of AMR: sentences in comment lines, each followed by its graph.

ViSemPar writes `#::snt SENTENCE` above each graph, with CRLF line ends; the corpora of the LDC write `# ::id ID` and
`# ::snt SENTENCE`. Blank lines may separate graphs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stages.data.texts import read_text

_COMMENT = re.compile(r"\s*#")
_SENTENCE = re.compile(r"\s*#\s*::snt(?:\s+(?P<sentence>.*))?\Z", re.DOTALL)
FIELD = re.compile(r"(?<!\S)::[a-z]\S*")
"""The name of a field within a sentence, which has none."""
_ID = re.compile(r"\s*#\s*::id\s+(?P<id>\S+)")


@dataclass
class Block:
    """A sentence with its graph, either of which may be missing."""

    line: int
    """First line, counted from 1."""
    id: str | None = None
    sentence: str | None = None
    graph_line: int = 0
    graph: list[str] = field(default_factory=list)
    """Lines of the graph, from `graph_line` on."""

    def graph_text(self) -> str:
        return "\n".join(self.graph).strip()


def read_lines(path: Path) -> list[str]:
    """The lines of a text file with any line ends. Raises as read_text does."""
    return re.split(r"\r\n|\r|\n", read_text(path))  # not splitlines(), which also splits a sentence at U+2028


def unread_fields(line: str) -> list[str]:
    """The names of the fields of a comment that are not read, such as `::tok` of the LDC's corpora."""
    named = re.findall(r"(?<!\S)::(\S+)", line) if _COMMENT.match(line) and not _SENTENCE.match(line) else []
    return [f"::{name}" for name in named if name != "id"]


def read_blocks(lines: list[str]) -> Iterator[Block]:
    """Sentences with their graphs, in order, faulty or not. A block ends before the next sentence or id."""
    block: Block | None = None
    for number, line in enumerate(lines, start=1):
        sentence, sample_id = _SENTENCE.match(line), _ID.match(line)
        if block and (
            (sentence and (block.graph or block.sentence is not None))
            or (sample_id and (block.graph or block.id is not None))
        ):
            yield block
            block = None
        if sentence:
            block = block or Block(number)
            block.line, block.sentence = number, (sentence["sentence"] or "").strip()
        elif sample_id:
            block = block or Block(number)
            block.id = sample_id["id"]
        elif line.strip() and not _COMMENT.match(line):
            block = block or Block(number)
            block.graph_line = block.graph_line or number
            block.graph.append(line)
        elif block and block.graph:
            block.graph.append("")  # keeps the line numbers of what follows
    if block:
        yield block
