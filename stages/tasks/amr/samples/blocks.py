"""Text files of AMR: sentences in comment lines, each followed by its graph.

ViSemPar writes `#::snt SENTENCE` above each graph, with CRLF line ends; the corpora of the LDC write `# ::id ID` and
`# ::snt SENTENCE`. Blank lines may separate graphs.
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
# A quote that is not closed on its line counts as none. One match takes the rest of the line, or each of many such
# quotes would search it again.
_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|(?P<open_end>\\?\Z))|(?P<bracket>[()])')


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
    opened: int = 0
    closed: int = 0
    """Parentheses so far, except those in quotes."""

    def add(self, number: int, line: str) -> None:
        """Append a line of the graph."""
        self.graph_line = self.graph_line or number
        self.graph.append(line)
        for match in _BRACKETS.finditer(line):
            unquoted = match[0] if match["bracket"] or match["open_end"] is not None else ""
            self.opened += unquoted.count("(")
            self.closed += unquoted.count(")")

    def graph_text(self) -> str:
        return "\n".join(self.graph).strip()

    def ends(self, *, starts_sentence: bool, starts_id: bool, is_text: bool) -> bool:
        """Whether the block ends before a line of that kind."""
        if starts_sentence:
            return bool(self.graph) or self.sentence is not None
        if starts_id:
            return bool(self.graph) or self.id is not None
        return bool(self.graph) and not is_text and self.opened + self.closed > 0 and self.opened <= self.closed


def read_lines(path: Path) -> list[str]:
    """The lines of a text file with any line ends. Raises as read_text does."""
    return re.split(r"\r\n|\r|\n", read_text(path))  # not splitlines(), which also splits a sentence at U+2028


def read_blocks(lines: list[str]) -> Iterator[Block]:
    """Sentences with their graphs, in order, faulty or not.

    A block ends before the next sentence or id, and before a blank line or a comment that follows a closed graph; a
    blank line within a graph does not end it.
    """
    block: Block | None = None
    for number, line in enumerate(lines, start=1):
        sentence, sample_id = _SENTENCE.match(line), _ID.match(line)
        is_text = bool(line.strip()) and not _COMMENT.match(line)
        if block and block.ends(starts_sentence=bool(sentence), starts_id=bool(sample_id), is_text=is_text):
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
            block.graph.append("")  # keeps the line numbers of what follows
    if block:
        yield block
