"""AMR on a page: a sentence in, its graph out, drawn and as PENMAN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.tasks.amr.predictions import conversation, submission
from stages.tasks.amr.samples.graphs import Node, Reference, read_graph
from tools.try_it.asking import Field, Shown, Subject, required_text

if TYPE_CHECKING:
    from stages.kit.evaluation.answer import Answerer


class Form:
    fields = (Field(kind="line", label="A sentence"),)
    draws: Final = "text"

    def __init__(self, subject: Subject) -> None:
        assert subject.answer_format is not None, "plans and baselines of this task have one"
        self.answer_format = subject.answer_format

    def question(self, *given: str) -> Conversation:
        sentence = required_text(given[0], "a sentence")
        if len(sentence.splitlines()) > 1:
            raise UserError("one sentence at a time, on one line")
        return conversation(sentence, answer_format=self.answer_format)

    def shown(self, question: Conversation, answer: str, answerer: Answerer) -> Shown:
        """The graph of a submission: the answer's, or a repaired one, or an empty one, and which of these."""
        made = submission([question.sample_id], [answer], answer_format=self.answer_format)
        _, graph = made.text.replace("\r\n", "\n").split("\n", 1)
        notes = ["The answer is no graph; this is what could be repaired of it.\n"] if made.repaired else []
        notes += ["Nothing can be made of the answer; `predict` writes an empty graph.\n"] if made.empty else []
        drawn = "\n".join(mermaid(read_graph(graph)))
        fence = "```"
        while fence in graph:
            fence += "`"
        return Shown(text=f"{''.join(notes)}\n```mermaid\n{drawn}\n```\n\n{fence}\n{graph.rstrip()}\n{fence}\n")


def mermaid(graph: Node) -> Iterator[str]:
    """The graph as a flowchart of Mermaid, which Gradio's Markdown draws: concepts in boxes, constants in round ones.

    Nodes are called n0, n1, ... in reading order, as references number them.
    """
    yield "flowchart TD"
    numbers = {id(node): number for number, node in enumerate(graph.walk())}
    for node in graph.walk():
        number = numbers[id(node)]
        yield f'n{number}["{escaped(node.concept)}"]'
        for position, (role, target) in enumerate(node.edges):
            if isinstance(target, str):
                other = f"n{number}c{position}"
                yield f'{other}(["{escaped(target)}"])'
            else:
                other = f"n{target.node if isinstance(target, Reference) else numbers[id(target)]}"
            yield f'n{number} -- "{escaped(role)}" --> {other}'


def escaped(text: str) -> str:
    """All but letters and digits as Mermaid writes characters, so that none has a meaning of its own."""
    return "".join(char if char.isalnum() else f"#{ord(char)};" for char in text)
