"""Predictions for a file of sentences, in the form in which ViSemPar is published."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import UserError, pluralize
from stages.core.records import shown
from stages.data.conversation import Conversation
from stages.data.texts import UnreadableText, markup_problem
from stages.tasks.amr.samples import decode, question
from stages.tasks.amr.samples.blocks import FIELD, Block, read_blocks, read_lines
from stages.tasks.amr.samples.graphs import Node, penman

log = logging.getLogger(__name__)

_NO_SENTENCE = re.compile(r"""#\s*::|\{\s*"|\[\s*\{|[{}\[\]],?\Z|\(\s*[^\s()/]+\s+/\s|.*[\t\x00]""")
"""A comment with a field, JSON, a graph, columns, binary."""

EMPTY = Node("amr-empty")
"""Replaces a completion without any graph, because a block has to hold one."""


@dataclass(frozen=True)
class Submission:
    text: str
    """One block per sentence, in their order, with CRLF line ends."""
    num_repaired: int
    """Completions that were no graph and could be repaired."""
    num_empty: int
    """Completions replaced by EMPTY."""

    def summary(self) -> str:
        return f"{pluralize(self.num_repaired, 'completion')} repaired, {self.num_empty} replaced by an empty graph"


def read_inputs(path: Path) -> list[str]:
    """The sentences of a file: its `#::snt` lines if it has any (graphs are skipped), or else its lines that are not
    blank.

    Raises UserError if the file is missing, empty or not UTF-8, for a block without a sentence, for a line that is
    neither a sentence nor of a graph, and for a sentence with a field.
    """
    try:
        lines = read_lines(path)
    except UnreadableText as error:
        raise UserError(f"{path}: {error}; expected one sentence a line, or #::snt lines") from None
    blocks = list(read_blocks(lines))
    if any(block.sentence is not None for block in blocks):
        numbered = [(block.line, block.sentence) for block in blocks]
        if stray := next(filter(None, map(_outside_graphs, blocks)), None):
            raise UserError(
                f"{path} line {lines.index(stray) + 1}: neither a graph nor marked as a sentence, as others are; "
                "expected #::snt SENTENCE"
            )
    else:
        numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
        if other := next((line for line in lines if _NO_SENTENCE.match(line.strip())), None):
            expected = "expected one a line, or #::snt SENTENCE above each graph"
            raise UserError(f"{path} line {lines.index(other) + 1}: no sentence, {shown(other)}; {expected}")
        if blank := numbered[-1][0] - len(numbered):
            log.warning("%s: %s between sentences skipped", path, pluralize(blank, "blank line"))
    for number, sentence in numbered:
        if not sentence:
            found = "no sentence above this" if sentence is None else "an empty sentence"
            raise UserError(f"{path} line {number}: {found}; expected #::snt SENTENCE")
        if field := FIELD.search(sentence):
            raise UserError(f"{path} line {number}: a sentence with the field {field[0]}; put it on a line of its own")
        if problem := markup_problem(sentence):
            raise UserError(f"{path} line {number}: {problem}")
    return [str(sentence) for _, sentence in numbered]


def _outside_graphs(block: Block) -> str | None:
    """The first line of a block that begins where no bracket is open, and opens none."""
    depth = 0
    for line in block.graph:
        if depth <= 0 and line and not line.lstrip().startswith("("):
            return line
        brackets = re.sub(r'"[^"]*"', "", line)
        depth += brackets.count("(") - brackets.count(")")
    return None


def conversation(sentence: str, *, answer_format: str) -> Conversation:
    return question(sentence, sentence, answer_format)


def submission(sentences: Sequence[str], completions: Sequence[str], *, answer_format: str) -> Submission:
    """The blocks to submit, one for each sentence, in their order.

    A broken completion is repaired, or replaced by EMPTY if no concept of it is left.
    """
    blocks, num_repaired, num_empty = [], 0, 0
    for sentence, completion in zip(sentences, completions, strict=True):
        decoded = decode(completion, answer_format)
        num_repaired += decoded.graph is None and decoded.repaired is not None
        num_empty += decoded.repaired is None
        graph = penman(decoded.repaired or EMPTY, indented=True)
        # In ViSemPar there is no space between a role and its node.
        lines = re.sub(r"^( *:[^\s()]+) \(", r"\1(", graph, flags=re.MULTILINE)
        blocks.append(f"#::snt {sentence}\n{lines}\n")
    return Submission("\n".join(blocks).replace("\n", "\r\n"), num_repaired, num_empty)
