"""AMR graphs, and the PENMAN notation that they are read from.

A graph is a tree of nodes in the order of its text, with a reference wherever a node is mentioned again. A reference
names its node by number, so that two graphs are equal whatever their variables were called.

The grammar is that of the penman library, and what the annotators of ViSemPar write beside it: concepts and values of
several words (`chủ tịch`), words with the characters of the notation in them (`km/h`, `10:30`), roles and variables
without space around them (`:pivot(t/tôi)`). Alignments (`~e.4`) are dropped. The same reader refuses a broken text, or
drops its faults.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from stages.data.texts import composed

MAX_DEPTH = 100
"""Limit of nested nodes: a model that repeats itself would nest without end. People stay below 20."""


class MalformedGraph(ValueError):
    """Raised for a text that is no graph; the message is the reason."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line
        """Counted from 0 within the text; None for a fault of the whole text."""


@dataclass(frozen=True)
class Reference:
    node: int
    """Number of the node, counted from 0 in reading order."""


@dataclass(frozen=True)
class Node:
    """A node with everything below it; a graph is its topmost node."""

    concept: str
    """The words as written, separated by one space; quotes are kept."""
    edges: tuple[tuple[str, Node | Reference | str], ...] = ()
    """(role with its colon, target); a target that is text is a constant."""

    def walk(self) -> Iterator[Node]:
        """This node and all below it, in reading order."""
        yield self
        for _, target in self.edges:
            if isinstance(target, Node):
                yield from target.walk()

    def constants(self) -> set[str]:
        """Targets that are neither nodes nor references, undefined variables included; as written."""
        return {target for node in self.walk() for _, target in node.edges if isinstance(target, str)}

    def referred(self) -> list[int]:
        """Numbers of the nodes that are mentioned again, ascending."""
        targets = (target for node in self.walk() for _, target in node.edges)
        return sorted({target.node for target in targets if isinstance(target, Reference)})


def read_graph(text: str, *, variables: bool = True) -> Node:
    """The one graph in a text, as `parse_graph` reads it. Raises MalformedGraph for the first fault."""
    graph, fault = parse_graph(text, variables=variables)
    if fault:
        raise fault
    assert graph is not None, text
    return graph


def canonical(graph: Node) -> Node:
    """The graph with its words in Unicode's NFC, and `_` for the spaces in those that are not quoted."""

    def word(text: str) -> str:
        text = composed(text)
        return text if text.startswith('"') else text.replace(" ", "_")

    return _mapped(graph, word, word)


def linked(graph: Node, names: Sequence[str]) -> Node:
    """The graph with a reference for every constant that is the name of a node.

    names: one per node; a name that several nodes share means the first of them.
    """
    references = {composed(name): Reference(number) for number, name in reversed(list(enumerate(names)))}
    return _mapped(graph, str, lambda constant: references.get(composed(constant), constant))


def _mapped(graph: Node, concept: Callable[[str], str], constant: Callable[[str], str | Reference]) -> Node:
    edges: list[tuple[str, Node | Reference | str]] = []
    for role, target in graph.edges:
        if isinstance(target, Node):
            edges.append((role, _mapped(target, concept, constant)))
        else:
            edges.append((role, constant(target) if isinstance(target, str) else target))
    return Node(concept(graph.concept), tuple(edges))


def variable_names(graph: Node, *, taken: AbstractSet[str] = frozenset()) -> list[str]:
    """A variable for each node: the first letter of its concept, numbered from the second node with that letter on:
    t, t2, t3.

    taken: names to skip. It must contain the graph's constants if the names are written beside constants, because a
    constant that looks like a variable would become a reference.
    """
    counts: dict[str, Iterator[int]] = {}
    names = []
    for node in graph.walk():
        letter = next((char for char in node.concept.lower() if char.isalpha()), "x")
        numbers = counts.setdefault(letter, itertools.count(1))
        numbered = (f"{letter}{number}" if number > 1 else letter for number in numbers)
        names.append(next(name for name in numbered if name not in taken))
    return names


def linear(graph: Node, heads: Sequence[str], names: Sequence[str], *, indent: str = "") -> str:
    """The graph as text. heads: the text behind each node's parenthesis. names: the text of references to it.

    indent: that of the edges below each node, each on a line of its own; empty for one line.
    """
    numbers = itertools.count()

    def write(node: Node, space: str) -> str:
        parts = [heads[next(numbers)]]
        for role, target in node.edges:
            if isinstance(target, Node):
                parts.append(f"{role} {write(target, space + indent)}")
            else:
                parts.append(f"{role} {names[target.node] if isinstance(target, Reference) else target}")
        return f"({space.join(parts)})"

    return write(graph, f"\n{indent}" if indent else " ")


def penman(graph: Node, *, indented: bool = False) -> str:
    """PENMAN of the canonical graph, its variables renamed: in one line, or indented by four spaces a level."""
    graph = canonical(graph)
    names = variable_names(graph, taken=graph.constants())
    heads = [f"{name} / {node.concept}" for name, node in zip(names, graph.walk(), strict=True)]
    return linear(graph, heads, names, indent="    " if indented else "")


class Token(NamedTuple):
    kind: str
    """open, close, variable, role, word, string or pointer; quote for an unmatched one, stray for `:`, `/` or `#` that
    belongs to no role, variable, pointer or word."""
    text: str
    line: int
    """Counted from 0."""


_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
# A colon opens a role only before a letter; within 10:30 or http://x it is part of the word.
_ROLE = r':[^\W\d_][^\s()":/~]*'
_WORD = r'(?:[^\s()":]|:(?![^\W\d_]))+'
# Joined to the words around it, this would make a graph of (c / / x), and of a comment behind a word (c / x # why).
_STRAY = r':[^\s()"]*|[/#]+(?=[\s()":]|\Z)'
_VARIABLE = r'(?<=\()\s*(?P<variable>[^\s()":/]+)\s*/'
_ALIGNMENT = re.compile(r"~(?:[a-z]\.?)?[0-9]+(?:,[0-9]+)*$")
_PLAIN = re.compile(r"[^\s()\"/:~#][^\s()\"/:~]*(?: [^\s()\"/:~]+)*")


@cache
def _pattern(*, variables: bool, strings: bool = True) -> re.Pattern[str]:
    name = _VARIABLE if variables else rf'(?P<pointer>\#[0-9]+(?=[\s()"]|{_ROLE}|\Z))'
    string = rf"(?P<string>{_STRING})|" if strings else ""
    return re.compile(
        rf"{name}|{string}(?P<open>\()|(?P<close>\))|(?P<role>{_ROLE})|(?P<stray>{_STRAY})|(?P<word>{_WORD})"
        '|(?P<quote>")',
        re.DOTALL,
    )


def _matches(text: str, *, variables: bool) -> Iterator[re.Match[str]]:
    for match in _pattern(variables=variables).finditer(text):
        yield match
        if match["quote"]:
            # It is unmatched, and so are all quotes behind it: a search from each would take the text's length squared.
            yield from _pattern(variables=variables, strings=False).finditer(text, match.end())
            return


def _tokenized(text: str, *, variables: bool) -> list[Token]:
    """The tokens: words joined by one space and quoted if PENMAN needs it, alignments dropped.

    variables: whether every node starts with one. Without them a node may carry a pointer.
    """
    tokens: list[Token] = []
    line, end = 0, 0
    for match in _matches(text, variables=variables):
        line, end = line + text.count("\n", end, match.start()), match.start()
        kind = str(match.lastgroup)
        piece = match[kind]
        if kind == "string":
            piece = " ".join(piece.split())
        elif kind == "word":
            piece = _ALIGNMENT.sub("", piece)
        if kind == "word" and piece and tokens and tokens[-1].kind == "word":
            tokens[-1] = tokens[-1]._replace(text=f"{tokens[-1].text} {piece}")
        elif piece:
            tokens.append(Token(kind, piece, line))
    return [token._replace(text=_quoted(token.text)) if token.kind == "word" else token for token in tokens]


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\")
    return word if _PLAIN.fullmatch(word) else f'"{escaped}"'


@dataclass
class _Draft:
    """A node as far as it was read."""

    name: str = ""
    """Its variable or pointer."""
    concept: str | None = None
    role: str | None = None
    """The last role read, until its target follows."""
    edges: list[tuple[str, _Draft | str]] = field(default_factory=list)

    def take(self, token: Token) -> None:
        """Read a token that is no parenthesis."""
        if token.kind == "role":
            self.role = token.text
        elif token.kind == "variable":
            self.name = token.text
        elif token.kind == "pointer" and self.role is None:
            self.name = self.name or token.text
        elif token.kind in ("word", "string", "pointer"):
            if self.concept is None and not self.edges and self.role is None:
                self.concept = token.text
            else:
                self.add(token.text)

    def add(self, target: _Draft | str) -> None:
        """Add a target for the last role; dropped if there is none."""
        if self.role is not None and not (isinstance(target, _Draft) and target.concept is None):
            self.edges.append((self.role, target))
        self.role = None

    def walk(self) -> Iterator[_Draft]:
        yield self
        for _, target in self.edges:
            if isinstance(target, _Draft):
                yield from target.walk()


def parse_graph(text: str, *, variables: bool) -> tuple[Node | None, MalformedGraph | None]:
    """The one graph in a text, without its faults, and the first fault.

    The graph is None if not even a concept is left. Its words are returned as they were written.

    variables: whether it is PENMAN, in which a value that is no variable of the graph is a constant, as is an undefined
        variable; or else of the form `(nói :agent (tôi #1) :topic (đi :agent #1))`, in which a node that is referred to
        carries a pointer, `#` and a number, behind its concept.
    Text before and after the graph goes, parentheses that are open at the end are closed, and a role without a target,
    a target without a role, a node without a concept and an unmatched bracket or quote are dropped. If two nodes have
    one name, references mean the first.
    """
    fault: MalformedGraph | None = None
    outside = _Draft(role=":root")
    stack = [outside]
    for token in _tokenized(text, variables=variables):
        if fault is None and (reason := _problem(stack, token, variables=variables)):
            fault = MalformedGraph(reason, token.line)
        if outside.role is None or (token.kind == "open" and len(stack) > MAX_DEPTH):
            break
        if token.kind == "open":
            stack.append(_Draft())
        elif token.kind == "close" and len(stack) > 1:
            stack[-2].add(stack.pop())
        elif len(stack) > 1:
            stack[-1].take(token)
    if variables and not stack[-1].name and not stack[-1].edges:
        stack[-1].concept = None  # the text breaks off: `(n` was to be a variable
    if depth := len(stack) - 1:
        reason = "a parenthesis is never closed" if depth == 1 else f"{depth} parentheses are never closed"
        fault = fault or MalformedGraph(reason)
    while len(stack) > 1:
        stack[-2].add(stack.pop())
    return _finished(outside, fault)


def _problem(stack: Sequence[_Draft], token: Token, *, variables: bool) -> str | None:
    """The reason why a token may not be the next one of the innermost node."""
    outside, node, ends = stack[0], stack[-1], token.kind in ("role", "close")
    checks = (
        (token.kind == "quote", "a quote is opened and never closed"),
        (outside.role is None, f"there is text after the graph: {token.text}"),
        (node is outside and token.kind != "open", f"a graph starts with a parenthesis, not with {token.text}"),
        (token.kind == "open" and len(stack) > MAX_DEPTH, f"nodes are nested more than {MAX_DEPTH} deep"),
        (node is outside, None),
        (token.kind == "variable" and not _PLAIN.fullmatch(token.text), f"{token.text} is no variable"),
        (token.kind == "variable", None),
        (variables and not node.name, f"a node has no variable; its parenthesis is followed by {token.text}"),
        (token.kind == "stray", f"{token.text} is neither a role nor a word"),
        (node.concept is None and token.kind in ("word", "string"), None),
        (node.concept is None, f"node {node.name} has no concept"),
        (node.role is not None and ends, f"role {node.role} has no target"),
        (node.role is not None or ends, None),
        (token.kind == "pointer" and not node.name and not node.edges, None),
    )
    return next((reason for found, reason in checks if found), f"expected a role, found {token.text}")


def _finished(outside: _Draft, fault: MalformedGraph | None) -> tuple[Node | None, MalformedGraph | None]:
    """The graph of the first node that was read, its references linked; and the first fault, `fault` if any."""
    root = next((target for _, target in outside.edges if isinstance(target, _Draft)), None)
    if root is None:
        return None, fault or MalformedGraph("there is no graph")
    names = [composed(draft.name) for draft in root.walk()]
    known: set[str] = set()
    for name in filter(None, names):
        if name in known:
            fault = fault or MalformedGraph(f"two nodes are called {name}")
        known.add(name)

    def node(draft: _Draft) -> Node:
        nonlocal fault
        assert draft.concept is not None
        edges: list[tuple[str, Node | Reference | str]] = []
        for role, target in draft.edges:
            if isinstance(target, _Draft):
                edges.append((role, node(target)))
            elif target.startswith("#") and target not in known:
                fault = fault or MalformedGraph(f"no node is called {target}")
            else:
                edges.append((role, target))
        return Node(draft.concept, tuple(edges))

    graph = linked(node(root), names)
    return graph, fault
