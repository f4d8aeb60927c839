"""AMR graphs, and the PENMAN notation that they are read from.

A graph is a tree of nodes in the order of its text, with a reference wherever a node is mentioned again. A reference
names its node by number, so that two graphs are equal whatever their variables were called.

The grammar is that of the penman library. Text that the annotators of ViSemPar write and penman refuses is rewritten
first, without inventing anything: concepts and values of several words (`chủ tịch`), words with the characters of the
notation in them (`km/h`, `10:30`), roles and variables without space around them (`:pivot(t/tôi)`), alignments
(`~e.4`, dropped). References to a node before its definition are PENMAN already.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import penman

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

    def words(self) -> set[str]:
        """All concepts and constants, as written."""
        return {node.concept for node in self.walk()} | self.constants()

    def referred(self) -> list[int]:
        """Numbers of the nodes that are mentioned again, ascending."""
        targets = (target for node in self.walk() for _, target in node.edges)
        return sorted({target.node for target in targets if isinstance(target, Reference)})


def read_graph(text: str) -> Node:
    """The one graph in a PENMAN text; words are returned as they were written.

    A value that is no variable of the graph is a constant, as is an undefined variable.
    Raises MalformedGraph.
    """
    return _parse(_balanced(_tokenized(text)))


def read_without_variables(text: str) -> Node:
    """The graph in a text of the form `(nói :agent (tôi #1) :topic (đi :agent #1))`.

    A node that is referred to carries a pointer, `#` and a number, behind its concept. Raises MalformedGraph.
    """
    return _parse(_with_variables(_balanced(_tokenized(text, variables=False))))


def canonical(graph: Node) -> Node:
    """The graph with its words in Unicode's NFC, and `_` for the spaces in those that are not quoted."""

    def word(text: str) -> str:
        composed = _nfc(text)
        return composed if composed.startswith('"') else composed.replace(" ", "_")

    return _mapped(graph, word, word)


def linked(graph: Node, names: Sequence[str]) -> Node:
    """The graph with a reference for every constant that is the name of a node.

    names: one per node; a name that several nodes share means the first of them.
    """
    references = {_nfc(name): Reference(number) for number, name in reversed(list(enumerate(names)))}
    return _mapped(graph, str, lambda constant: references.get(_nfc(constant), constant))


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


def linear(graph: Node, heads: Sequence[str], names: Sequence[str]) -> str:
    """The graph in one line. heads: the text behind each node's parenthesis. names: the text of references to it."""
    numbers = itertools.count()

    def write(node: Node) -> str:
        parts = [heads[next(numbers)]]
        for role, target in node.edges:
            if isinstance(target, Node):
                parts.append(f"{role} {write(target)}")
            else:
                parts.append(f"{role} {names[target.node] if isinstance(target, Reference) else target}")
        return f"({' '.join(parts)})"

    return write(graph)


def penman_line(graph: Node) -> str:
    """PENMAN in one line, the variables renamed."""
    names = variable_names(graph, taken={_nfc(constant) for constant in graph.constants()})
    return linear(graph, [f"{name} / {node.concept}" for name, node in zip(names, graph.walk(), strict=True)], names)


def penman_lines(graph: Node) -> str:
    """PENMAN over several lines, indented by four spaces a level."""
    return str(penman.format(penman.parse(penman_line(canonical(graph))), indent=4))


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
_VARIABLE = r'[^\s()":/]+\s*/'
_ALIGNMENT = re.compile(r"~(?:[a-z]\.?)?[0-9]+(?:,[0-9]+)*$")
_PLAIN = re.compile(r"[^\s()\"/:~#][^\s()\"/:~]*(?:\N{NO-BREAK SPACE}[^\s()\"/:~]+)*")
# Holds the words of a concept together for penman, to which only ASCII whitespace separates.
_JOINT = "\N{NO-BREAK SPACE}"


@cache
def _pattern(*, variables: bool, strings: bool = True) -> re.Pattern[str]:
    head = rf"(?:\s*(?P<variable>{_VARIABLE}))?" if variables else ""
    pointer = "" if variables else rf'(?P<pointer>\#[0-9]+(?=[\s()"]|{_ROLE}|\Z))|'
    string = rf"(?P<string>{_STRING})|" if strings else ""
    return re.compile(
        rf"{string}(?P<open>\(){head}|(?P<close>\))|(?P<role>{_ROLE})|{pointer}(?P<stray>{_STRAY})|(?P<word>{_WORD})"
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


def _tokenized(text: str, *, variables: bool = True) -> list[Token]:
    """Tokens that penman accepts: words joined, quoted if necessary, alignments dropped.

    variables: whether every node starts with one. Without them a node may carry a pointer.
    """
    tokens: list[Token] = []
    line, end = 0, 0
    for match in _matches(text, variables=variables):
        line, end = line + text.count("\n", end, match.start()), match.start()
        kind = "open" if match["open"] else str(match.lastgroup)
        if kind == "string":
            tokens.append(Token(kind, " ".join(match[0].split()), line))
        elif kind == "open":
            tokens.append(Token(kind, "(", line))
            if variables and match["variable"]:
                tokens.append(Token("variable", match["variable"].removesuffix("/").strip(), line))
        elif kind != "word":
            tokens.append(Token(kind, match[0], line))
        elif word := _ALIGNMENT.sub("", match[0]):
            if tokens and tokens[-1].kind == "word":
                tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + _JOINT + word)
            else:
                tokens.append(Token("word", word, line))
    return [token._replace(text=_quoted(token.text)) if token.kind == "word" else token for token in tokens]


def _quoted(word: str) -> str:
    if _PLAIN.fullmatch(word):
        return word
    escaped = word.replace(_JOINT, " ").replace("\\", "\\\\")
    return f'"{escaped}"'


def _spaced(word: str) -> str:
    """The word of a token as it was written."""
    return word.replace(_JOINT, " ")


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _balanced(tokens: list[Token]) -> list[Token]:
    """The tokens unchanged. Raises MalformedGraph for faults that penman misses, or at which it runs out of stack."""
    depth = 0
    for index, token in enumerate(tokens):
        if token.kind == "quote":
            raise MalformedGraph("a quote is opened and never closed", token.line)
        if depth == 0 and index > 0:
            raise MalformedGraph(f"there is text after the graph: {_spaced(token.text)}", token.line)
        if depth == 0 and token.kind != "open":
            raise MalformedGraph(f"a graph starts with a parenthesis, not with {token.text}", token.line)
        depth += (token.kind == "open") - (token.kind == "close")
        if depth > MAX_DEPTH:
            raise MalformedGraph(f"nodes are nested more than {MAX_DEPTH} deep", token.line)
    if not tokens:
        raise MalformedGraph("there is no graph")
    if depth:
        raise MalformedGraph("a parenthesis is never closed" if depth == 1 else f"{depth} parentheses are never closed")
    return tokens


def _with_variables(tokens: Sequence[Token]) -> list[Token]:
    """Every node given a variable that is no word of the text, and every pointer replaced by its node's variable."""
    words = {token.text for token in tokens if token.kind == "word"}
    fresh = (name for number in itertools.count() if (name := f"v{number}") not in words)
    variables = [next(fresh) if token.kind == "open" else "" for token in tokens]
    pointed: dict[str, str] = {}
    heads = set()
    for index, (token, variable) in enumerate(zip(tokens, variables, strict=True)):
        if variable and index + 2 < len(tokens) and tokens[index + 2].kind == "pointer":
            pointer = tokens[index + 2].text
            if pointer in pointed:
                raise MalformedGraph(f"two nodes carry the pointer {pointer}", token.line)
            pointed[pointer] = variable
            heads.add(index + 2)
    result: list[Token] = []
    for index, (token, variable) in enumerate(zip(tokens, variables, strict=True)):
        if token.kind == "pointer":
            if token.text not in pointed:
                raise MalformedGraph(f"no node carries the pointer {token.text}", token.line)
            result += [] if index in heads else [Token("word", pointed[token.text], token.line)]
        else:
            result.append(token)
            result += [Token("variable", variable, token.line)] if variable else []
    return result


def _parse(tokens: Sequence[Token]) -> Node:
    for token, following in itertools.pairwise(tokens):  # penman only warns of these
        if token.kind == "open" and following.kind != "variable":
            raise MalformedGraph(f"a node has no variable; its parenthesis is followed by {following.text}", token.line)
        if token.kind == "variable" and not _PLAIN.fullmatch(token.text):
            raise MalformedGraph(f"{token.text} is no variable", token.line)
        if token.kind == "variable" and following.kind not in ("word", "string"):
            raise MalformedGraph(f"node {token.text} has no concept", token.line)
        if token.kind == "role" and following.kind in ("role", "close"):
            raise MalformedGraph(f"role {token.text} has no target", token.line)
        if following.kind == "stray":
            raise MalformedGraph(f"{following.text} is neither a role nor a word", following.line)
    lines: list[list[str]] = [[] for _ in range(tokens[-1].line + 1)]
    for token in tokens:
        lines[token.line] += [token.text, "/"] if token.kind == "variable" else [token.text]
    try:
        tree = penman.parse("\n".join(" ".join(line) for line in lines))
    except penman.DecodeError as error:
        line = int(error.lineno or 1) - 1
        around = _spaced(" ".join(lines[line]))
        raise MalformedGraph(f"{str(error.message).lower()}, found {around}", line) from None
    names = [_nfc(str(variable)) for variable, _ in tree.nodes()]
    if again := next((name for name, count in Counter(names).items() if count > 1), None):
        raise MalformedGraph(f"variable {again} is defined twice")
    return linked(_node(tree.node), names)


def _node(tree: Any) -> Node:
    """A node of penman's, `(variable, [("/", concept), (role, target), ...])`; variables are left as constants."""
    _, ((_, concept), *branches) = tree
    edges = ((role, _spaced(target) if isinstance(target, str) else _node(target)) for role, target in branches)
    return Node(_spaced(concept), tuple(edges))


@dataclass
class _OpenNode:
    """A node under repair."""

    name: str = ""
    """Its variable or pointer."""
    concept: str | None = None
    role: str | None = None
    """The last role read, until its target follows."""
    edges: list[tuple[str, _OpenNode | str]] = field(default_factory=list)

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
                self.concept = _spaced(token.text)
            else:
                self.add(_spaced(token.text))

    def add(self, target: _OpenNode | str) -> None:
        """Add a target for the last role; dropped if there is none."""
        if self.role is not None and not (isinstance(target, _OpenNode) and target.concept is None):
            self.edges.append((self.role, target))
        self.role = None

    def walk(self) -> list[_OpenNode]:
        return [self, *(node for _, target in self.edges if isinstance(target, _OpenNode) for node in target.walk())]

    def node(self, names: AbstractSet[str]) -> Node:
        """names: those of all nodes; a pointer that is not among them is dropped."""
        assert self.concept is not None
        edges: list[tuple[str, Node | Reference | str]] = []
        for role, target in self.edges:
            if isinstance(target, _OpenNode):
                edges.append((role, target.node(names)))
            elif target in names or not target.startswith("#"):
                edges.append((role, target))
        return Node(self.concept, tuple(edges))


def repaired_graph(text: str, *, variables: bool) -> Node | None:
    """The graph of a broken text without its faults; None if not even a concept is left.

    Text before and after the graph goes, parentheses that are open at the end are closed, and a role without a target,
    a target without a role, a node without a concept and an unmatched bracket or quote are dropped. If two nodes have
    one name, references mean the first.

    variables: whether nodes have variables, or else pointers.
    """
    outside = _OpenNode(role=":root")
    stack = [outside]
    for token in _tokenized(text, variables=variables):
        if token.kind == "open":
            if len(stack) > MAX_DEPTH:
                break
            stack.append(_OpenNode())
        elif token.kind == "close" and len(stack) > 1:
            _close(stack)
            if len(stack) == 1:
                break
        elif len(stack) > 1:
            stack[-1].take(token)
    if variables and not stack[-1].name and not stack[-1].edges:
        stack[-1].concept = None  # the text breaks off: `(n` was to be a variable
    while len(stack) > 1:
        _close(stack)
    if not outside.edges:
        return None
    _, root = outside.edges[0]
    assert isinstance(root, _OpenNode)
    names = [node.name for node in root.walk()]
    return linked(root.node(frozenset(names)), names)


def _close(stack: list[_OpenNode]) -> None:
    node = stack.pop()
    stack[-1].add(node)
