"""Graphs and texts for hypothesis to draw, with all that Vietnamese corpora have in them."""

from __future__ import annotations

import unicodedata

from hypothesis import strategies as st

from stages.tasks.amr.samples.graphs import Node, Reference, linear, variable_names

CONCEPTS = st.one_of(
    st.sampled_from(["tôi", "t", "đi", "chủ tịch", "chủ_tịch", "ông hoàng nhỏ", "contrast-01", "amr-unknown", "1900"]),
    st.sampled_from(['"Hà Nội"', '"km/h"', '"10:30"', '"#1"', '"nói \\"không\\""', "-", "*OR*", "__and", "Ừ"]),
    st.sampled_from(["ngày", "ấy"]).map(lambda word: unicodedata.normalize("NFD", word)),
)
CONSTANTS = st.sampled_from(
    ["-", "+", "1", "3.14", "interrogative", "t", "t2", "t3", "đ", "n2", "v0", "v1", '"t"', '"#1"', "chúng ta", '""']
)
ROLES = st.sampled_from(
    [":agent", ":agent-of", ":ARG0", ":op1", ":mod", ":domain", ":prep-out-of", ":polite+", ":quant", ":đích"]
)


@st.composite
def graphs(draw: st.DrawFn, *, max_nodes: int = 8, concepts: st.SearchStrategy[str] = CONCEPTS) -> Node:
    """Nodes, constants and references in any order: forward, to the top, to itself, and several to one."""
    num_nodes = draw(st.integers(1, max_nodes))
    parents = [draw(st.integers(0, number - 1)) for number in range(1, num_nodes)]
    references = st.integers(0, num_nodes - 1).map(Reference)

    def node(number: int) -> Node:
        edges: list[tuple[str, Node | Reference | str]] = [
            (draw(ROLES), node(child)) for child, parent in enumerate(parents, start=1) if parent == number
        ]
        edges += draw(st.lists(st.tuples(ROLES, st.one_of(CONSTANTS, references)), max_size=2))
        return Node(draw(concepts), tuple(draw(st.permutations(edges))))

    return node(0)


def as_drawn(graph: Node, *, indent: str = "") -> str:
    """PENMAN with the words as they are, not canonical."""
    names = variable_names(graph, taken={unicodedata.normalize("NFC", each) for each in graph.constants()})
    heads = [f"{name} / {node.concept}" for name, node in zip(names, graph.walk(), strict=True)]
    return linear(graph, heads, names, indent=indent)


PIECES = [
    *("(", ")", ")) ", "(t / tôi", "(đ/đi ", "(#1 / x)", " / ", " :agent", ":theme(", "::", " t", " #1", "#2 ", "# "),
    *('"', ' "a b"', "\\", "-", "chủ tịch", "~e.4", "10:30", "http://x", ": ", "\n---\n", "\r\n", "\N{NO-BREAK SPACE}"),
]
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
"""Completions: mostly broken, sometimes a graph."""
