"""AMR corpora as text: sentences in comment lines, each followed by its graph.

ViSemPar writes `#::snt SENTENCE` above each graph, with CRLF line ends; the corpora of the LDC write `# ::id ID` and
`# ::snt SENTENCE`. Blank lines separate graphs, or do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stages.kit.data.texts import read_text

_COMMENT = re.compile(r"\s*#")
_SENTENCE = re.compile(r"\s*#\s*::snt(?:\s+(?P<sentence>.*))?\Z", re.DOTALL)
_ID = re.compile(r"\s*#\s*::id\s+(?P<id>\S+)")
# A quote that nothing closes on its line is none: what stands behind it is looked at as a whole, or each of many such
# quotes would search the whole line.
_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|(?P<open_end>\\?\Z))|(?P<bracket>[()])')


@dataclass
class Block:
    """A sentence with its graph, as far as the file has both."""

    line: int
    """Where it starts, counted from 1."""
    id: str | None = None
    sentence: str | None = None
    graph_line: int = 0
    graph: list[str] = field(default_factory=list)
    """Its lines from `graph_line` on."""
    opened: int = 0
    closed: int = 0
    """Parentheses so far, those in quotes left out."""

    def add(self, number: int, line: str) -> None:
        """A line of its graph."""
        self.graph_line = self.graph_line or number
        self.graph.append(line)
        for match in _BRACKETS.finditer(line):
            counted = match[0] if match["bracket"] or match["open_end"] is not None else ""
            self.opened += counted.count("(")
            self.closed += counted.count(")")

    def graph_text(self) -> str:
        return "\n".join(self.graph).strip()

    def finished(self) -> bool:
        """Whether all parentheses of its graph are closed again."""
        return self.opened + self.closed > 0 and self.opened <= self.closed


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, whatever ends them. Raises as read_text does."""
    return re.split(r"\r\n|\r|\n", read_text(path))  # not splitlines(), which also breaks a sentence at U+2028


def read_blocks(lines: list[str]) -> Iterator[Block]:
    """Sentences with their graphs, in order, faulty or not.

    A block ends before the next sentence or id, and where its graph is closed and a blank line or a comment follows;
    a blank line within a graph does not end it.
    """
    block: Block | None = None
    for number, line in enumerate(lines, start=1):
        sentence, sample_id = _SENTENCE.match(line), _ID.match(line)
        is_text = bool(line.strip()) and not _COMMENT.match(line)
        if block and _ends(block, starts_sentence=bool(sentence), starts_id=bool(sample_id), is_text=is_text):
            yield block
            block = None
        if sentence:
            block = block or Block(number)
            block.line, block.sentence = number, (sentence["sentence"] or "").strip()
        elif sample_id:
            block = block or Block(number)
            block.id = sample_id["id"]
        elif is_text:
            block = block or Block(number)
            block.add(number, line)
        elif block and block.graph:
            block.graph.append("")  # so that what follows keeps its line number
    if block:
        yield block


def _ends(block: Block, *, starts_sentence: bool, starts_id: bool, is_text: bool) -> bool:
    if starts_sentence:
        return bool(block.graph) or block.sentence is not None
    if starts_id:
        return bool(block.graph) or block.id is not None
    return bool(block.graph) and not is_text and block.finished()
