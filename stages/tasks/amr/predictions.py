"""Predictions for a file of sentences, in the form in which ViSemPar is published."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import UserError, counted
from stages.kit.data.conversation import Conversation
from stages.kit.data.texts import UnreadableText, markup_problem
from stages.tasks.amr.samples.graphs import Node, penman_lines
from stages.tasks.amr.samples.questions import question
from stages.tasks.amr.samples.targets import decode, repaired
from stages.tasks.amr.sources.corpora import read_blocks, read_lines

log = logging.getLogger(__name__)

EMPTY = Node("amr-empty")
"""Stands for an answer of which nothing can be made: a block has to hold a graph."""


@dataclass(frozen=True)
class Submission:
    text: str
    """One block a sentence, in their order, with CRLF line ends."""
    repaired: tuple[int, ...]
    """Which sentences, counted from 0, had an answer that was no graph and could be repaired."""
    empty: tuple[int, ...]
    """Which had one of which nothing could be made."""

    def summary(self) -> str:
        return f"{counted(len(self.repaired), 'answer')} repaired, {len(self.empty)} replaced by an empty graph"


def read_inputs(path: Path) -> list[str]:
    """The sentences of a file: those of its `#::snt` lines where it has any (graphs are passed over), or else its
    lines. Blank lines are passed over, and said to be where they are within a list of sentences.

    Raises UserError where the file is missing, empty or not UTF-8, and for what is no sentence among #::snt lines.
    """
    try:
        lines = read_lines(path)
    except UnreadableText as error:
        raise UserError(f"{path}: {error}; expected one sentence a line, or #::snt lines") from None
    blocks = list(read_blocks(lines))
    if not any(block.sentence is not None for block in blocks):
        last = max(number for number, line in enumerate(lines) if line.strip())
        if blank := sum(not line.strip() for line in lines[:last]):
            log.warning("%s: %s between sentences passed over", path, counted(blank, "blank line"))
        for number, line in enumerate(lines, start=1):
            if problem := markup_problem(line):
                raise UserError(f"{path} line {number}: {problem}")
        return [line.strip() for line in lines if line.strip()]
    for block in blocks:
        if not block.sentence:
            what = "no sentence above this" if block.sentence is None else "an empty sentence"
            raise UserError(f"{path} line {block.line}: {what}; expected #::snt SENTENCE")
        if problem := markup_problem(block.sentence):
            raise UserError(f"{path} line {block.line}: {problem}")
    return [str(block.sentence) for block in blocks]


def conversation(sentence: str, *, answer_format: str) -> Conversation:
    """The sentence and the question."""
    return question(sentence, sentence, answer_format)


def submission(sentences: Sequence[str], answers: Sequence[str], *, answer_format: str) -> Submission:
    """The blocks to hand in, always as many as there are sentences.

    A broken answer is repaired, and replaced by EMPTY where nothing is left of it; `Submission` says which ones.
    """
    assert len(sentences) == len(answers), f"{len(answers)} answers for {len(sentences)} sentences"
    blocks: list[str] = []
    mended: list[int] = []
    empty: list[int] = []
    for index, (sentence, answer) in enumerate(zip(sentences, answers, strict=True)):
        graph = decode(answer, answer_format).graph
        if graph is None:
            graph = repaired(answer, answer_format)
            (empty if graph is None else mended).append(index)
        blocks.append(f"#::snt {sentence}\n{_block_graph(EMPTY if graph is None else graph)}\n")
    return Submission("\n".join(blocks).replace("\n", "\r\n"), tuple(mended), tuple(empty))


def _block_graph(graph: Node) -> str:
    """PENMAN over several lines; between a role and its node there is no space."""
    return re.sub(r"^( *:[^\s()]+) \(", r"\1(", penman_lines(graph), flags=re.MULTILINE)
