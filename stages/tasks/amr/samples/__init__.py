"""Sentences with AMR graphs: the records, the question to a model, and the forms of the answer.

full  PENMAN in one line, the variables renamed: (n / nói :agent (t / tôi) :topic (đ / đi :agent t))
ptr   without variables; a node that is mentioned again carries a pointer: (nói :agent (tôi #1) :topic (đi :agent #1))
mtup  first the graph without variables, then SEPARATOR, then the same as full:
      (nói :agent (tôi) :topic (đi :agent t))

`full` and `ptr` lose nothing. In the first step of `mtup` a bare `t` refers to the node that `graphs.variable_names`
would call so. A rule restores the graph from it, and fails only if a constant of the sentence looks like such a name.
Source of the two steps: MTUP, the multi-task prompts of the VLSP shared task on AMR.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import UserError
from stages.core.families import require_text
from stages.data.conversation import Conversation, message
from stages.data.splits import read_prepared, schema_of
from stages.data.texts import composed, same_text
from stages.tasks.amr.samples.blocks import read_blocks, read_lines
from stages.tasks.amr.samples.graphs import (
    MalformedGraph,
    Node,
    canonical,
    linear,
    linked,
    parse_graph,
    penman,
    read_graph,
    variable_names,
)

PROMPTS = {
    "full": "Phân tích câu sau thành đồ thị AMR, viết theo ký pháp PENMAN trên một dòng.",
    "ptr": "Phân tích câu sau thành đồ thị AMR trên một dòng, không dùng biến; "
    "nút được nhắc lại thì đánh dấu bằng con trỏ #1, #2, ...",
    "mtup": "Phân tích câu sau thành đồ thị AMR theo hai bước: trước hết viết đồ thị không có biến, "
    "sau dòng --- viết lại đồ thị đầy đủ có biến theo ký pháp PENMAN.",
}
"""The instruction for each answer format, in Vietnamese."""
ANSWER_FORMATS = tuple(PROMPTS)
SEPARATOR = "\n---\n"
"""Separates the two graphs of `mtup`, each of which is on one line."""

_DOCUMENT = re.compile(r"(.*_\d+)\.\d+")
"""An id of a sentence: its document, which ends in a number, and the sentence's number."""

_PROBES = (
    ("Nó không đọc sách .", "(đ / đọc :agent (n / nó) :patient (s / sách) :polarity -)"),
    ("Cậu bé muốn mua hoa .", "(m / muốn :agent (c / cậu_bé) :theme (m2 / mua :agent c :patient (h / hoa)))"),
)


@dataclass(frozen=True)
class Record:
    id: str
    """The corpus' own, or FILE:LINE if it has none or a repeated one."""
    sentence: str
    graph: str
    """PENMAN as it was read."""
    canonical: str
    """PENMAN in one line, the variables renamed and the words canonical."""
    file: str
    """Path of the source, relative to the dataset's folder."""
    line: int
    """Line of the sentence, counted from 1."""

    @property
    def group(self) -> str:
        """The document, if the id is that of the LDC's corpora, such as PROXY_AFP_ENG_20020105_0162.12; else empty."""
        return found[1] if (found := _DOCUMENT.fullmatch(self.id)) else ""

    def subject(self) -> str:
        """A digest, equal for records that may not be in two splits: those of the same sentence."""
        return _subject(self.sentence)

    def content(self) -> list[str]:
        return [self.sentence, self.graph, self.canonical]

    def parsed(self) -> Node:
        """The canonical graph."""
        return read_graph(self.canonical)


SCHEMA = schema_of(Record)
"""Columns of a prepared split."""


def _subject(sentence: str) -> str:
    return hashlib.sha256(same_text(sentence).encode()).hexdigest()


def parse_record(sample_id: str, sentence: str, graph: str, *, file: str, line: int) -> Record:
    """Raises graphs.MalformedGraph for a text that is no graph."""
    return Record(sample_id, sentence, graph, penman(read_graph(graph)), file, line)


def read_split(prepared_dir: Path, split: str) -> list[Record]:
    """The records of a prepared split, in their order. Raises UserError if it is not prepared, or damaged."""
    return read_prepared(prepared_dir, split, Record, SCHEMA)


def read_completions(path: Path, records: Sequence[Record], answer_format: str) -> Iterator[tuple[int, str, str]]:
    """(line, sample, graph) of each block of a file in the form of the corpora, which is that of the format `full`.

    The sample is the id of the record with that sentence, or the sentence if there is none. If several records share
    it, blocks are theirs in order.
    """
    if answer_format != "full":
        raise UserError(f"{path} has #::snt lines and graphs in PENMAN, the answer_format full; found {answer_format}")
    waiting: dict[str, list[str]] = {}
    for record in records:
        waiting.setdefault(record.subject(), []).append(record.id)
    for block in read_blocks(read_lines(path)):
        ids = waiting.get(_subject(block.sentence or ""), [block.sentence or "without a sentence"])
        yield block.line, ids.pop(0) if len(ids) > 1 else ids[0], block.graph_text()


def check(model_type: str) -> None:
    """Raises UserError for a model that takes more than text."""
    require_text(model_type, "AMR parsing")


def conversation(record: Record, *, answered: bool, answer_format: str) -> Conversation:
    """The question about a sentence; with `answered`, the true graph is the assistant's answer."""
    return question(record.id, record.sentence, answer_format, answer=record.parsed() if answered else None)


def probes(answer_format: str) -> list[Conversation]:
    """Two answered conversations to compare models on, without and with a node that is mentioned again."""
    return [
        question(f"probe-{index}", sentence, answer_format, answer=read_graph(graph))
        for index, (sentence, graph) in enumerate(_PROBES)
    ]


def question(sample_id: str, sentence: str, answer_format: str, *, answer: Node | None = None) -> Conversation:
    text = f"{PROMPTS[answer_format]}\n{composed(sentence)}"
    answered = [] if answer is None else [message("assistant", encode(answer, answer_format))]
    return Conversation(sample_id=sample_id, messages=[message("user", text), *answered])


def encode(graph: Node, answer_format: str) -> str:
    """The answer that stands for a graph. Its words become canonical."""
    graph = canonical(graph)
    match answer_format:
        case "full":
            return penman(graph)
        case "ptr":
            pointers = {number: f"#{count}" for count, number in enumerate(graph.referred(), start=1)}
            names = [pointers.get(number, "") for number, _ in enumerate(graph.walk())]
            heads = [f"{node.concept} {name}".rstrip() for node, name in zip(graph.walk(), names, strict=True)]
            return linear(graph, heads, names)
        case "mtup":
            names = variable_names(graph, taken=graph.constants())
            return linear(graph, [node.concept for node in graph.walk()], names) + SEPARATOR + penman(graph)
    raise AssertionError(answer_format)


@dataclass(frozen=True)
class Decoded:
    graph: Node | None
    """The graph of a completion, None if it has none; for `mtup`, the second one."""
    problem: str | None
    """The reason if there is no graph."""
    repaired: Node | None
    """The graph that the completion most likely means: its own, or the one without its faults; for `mtup` that of the
    second step, or else of the first. None if not even a concept is left."""
    restored: Node | None
    """For `mtup`, the graph that the first step stands for; None if that cannot be read."""


def decode(text: str, answer_format: str) -> Decoded:
    """The graph of a completion. Never raises.

    Strict: a completion is a whole graph and nothing else. Other spellings of the same graph (spaces, line breaks, a
    concept of several words) are read.
    """
    if answer_format != "mtup":
        graph, fault = parse_graph(text, variables=answer_format == "full")
        return Decoded(None if fault else graph, str(fault) if fault else None, repaired=graph, restored=None)
    first, separator, second = text.partition(SEPARATOR)
    graph, fault = parse_graph(second, variables=True)
    if not separator:
        fault = MalformedGraph("the first graph is not followed by a line of ---")
    step, fault_of_step = parse_graph(first, variables=False)
    # References are restored from the names that the nodes would have.
    restored = step and linked(step, variable_names(canonical(step)))
    return Decoded(
        graph=None if fault else graph,
        problem=str(fault) if fault else None,
        repaired=graph or restored,
        restored=None if fault_of_step else restored,
    )


_GRAPH_PARTS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[()]', re.DOTALL)


def complete(text: str, answer_format: str) -> bool:
    """Whether a partial completion is complete, so that generation can stop: all parentheses outside of quotes are
    closed again; for `mtup` those of the second graph."""
    finished, depth = 0, 0
    for match in _GRAPH_PARTS.finditer(text):
        if match[0] == "(":
            depth += 1
        elif match[0] == ")" and depth:
            depth -= 1
            finished += depth == 0
    return finished >= (2 if answer_format == "mtup" else 1)
