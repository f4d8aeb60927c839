"""What a model is trained to write, and back.

full  PENMAN in one line, the variables renamed: (n / nói :agent (t / tôi) :topic (đ / đi :agent t))
ptr   without variables; a node that is mentioned again carries a pointer: (nói :agent (tôi #1) :topic (đi :agent #1))
mtup  first the graph without variables, then SEPARATOR, then the same as full:
      (nói :agent (tôi) :topic (đi :agent t))

`full` and `ptr` lose nothing. In the first step of `mtup` a bare `t` refers to the node that would be called so by
`graphs.variable_names`; a rule restores the graph from it, which goes wrong only where a constant of the sentence
looks like such a name. Source of the two steps: MTUP, the multi-task prompts of the VLSP shared task on AMR.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from stages.tasks.amr.samples.graphs import (
    MalformedGraph,
    Node,
    canonical,
    linear,
    linked,
    penman_line,
    read_graph,
    read_without_variables,
    variable_names,
)
from stages.tasks.amr.samples.repair import mended

ANSWER_FORMATS = ("full", "ptr", "mtup")
SEPARATOR = "\n---\n"
"""Between the two graphs of `mtup`. A graph is on one line, so none holds it."""


@dataclass(frozen=True)
class Decoded:
    graph: Node | None
    """What the answer says; of `mtup`, its second graph."""
    problem: str | None
    """Why there is no graph."""
    restored: Node | None = None
    """The graph that the first step of `mtup` stands for; None where that cannot be read, and for other targets."""

    @property
    def valid(self) -> bool:
        return self.graph is not None


def encode(graph: Node, answer_format: str) -> str:
    """The answer that says this graph, its words made canonical."""
    graph = canonical(graph)
    match answer_format:
        case "full":
            return penman_line(graph)
        case "ptr":
            pointers = {number: f"#{count}" for count, number in enumerate(graph.referred(), start=1)}
            names = [pointers.get(number, "") for number, _ in enumerate(graph.walk())]
            heads = [f"{node.concept} {name}".rstrip() for node, name in zip(graph.walk(), names, strict=True)]
            return linear(graph, heads, names)
        case "mtup":
            names = variable_names(graph, taken=graph.constants())
            return linear(graph, [node.concept for node in graph.walk()], names) + SEPARATOR + penman_line(graph)
    raise AssertionError(answer_format)


def decode(text: str, answer_format: str) -> Decoded:
    """The graph in a model's answer. Never raises for what a model wrote.

    Strict: an answer is its graph and nothing else, whole. What is merely another way to write the same (spaces,
    line breaks, a concept of several words) is read.
    """
    first, separator, second = text.partition(SEPARATOR) if answer_format == "mtup" else ("", "", text)
    restored = _attempt(_restored, first)[0] if answer_format == "mtup" else None
    if answer_format == "mtup" and not separator:
        return Decoded(None, "the first graph is not followed by a line of ---", restored)
    graph, problem = _attempt(read_without_variables if answer_format == "ptr" else read_graph, second)
    return Decoded(graph, problem, restored)


def repaired(text: str, answer_format: str) -> Node | None:
    """The graph that an answer most likely means: its own, or what `repair.mended` makes of it.

    Of `mtup` the second step, or else the first, restored. None where not even a concept is left.
    """
    decoded = decode(text, answer_format)
    if decoded.graph is not None:
        return decoded.graph
    if answer_format != "mtup":
        return mended(text, variables=answer_format == "full")
    first, _, second = text.partition(SEPARATOR)
    if (graph := mended(second, variables=True) or decoded.restored) is not None:
        return graph
    graph = mended(first, variables=False)
    return graph and _named(graph)


_GRAPH_PARTS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[()]', re.DOTALL)


def complete(text: str, answer_format: str) -> bool:
    """Whether an answer's graph is finished, so that there is nothing left to generate.

    That is: all parentheses outside of quotes are closed again, for `mtup` those of the second graph.
    """
    finished, depth = 0, 0
    for match in _GRAPH_PARTS.finditer(text):
        if match[0] == "(":
            depth += 1
        elif match[0] == ")" and depth:
            depth -= 1
            finished += depth == 0
    return finished >= (2 if answer_format == "mtup" else 1)


def _attempt(read: Callable[[str], Node], text: str) -> tuple[Node | None, str | None]:
    try:
        return read(text), None
    except MalformedGraph as malformed:
        return None, str(malformed)


def _restored(text: str) -> Node:
    """The graph of a text without variables, whose references are the names its nodes would have."""
    return _named(read_without_variables(text))


def _named(graph: Node) -> Node:
    return linked(graph, variable_names(canonical(graph)))
