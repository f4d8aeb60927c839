"""AMR graphs, and the PENMAN notation they are read from.

A graph is a tree of nodes in the order of its text, with references where a node is mentioned again. A reference
names its node by number, so that two graphs are equal whatever their variables were called.

The grammar is that of the penman library. What the annotators of ViSemPar write and it refuses is put right first,
without inventing anything: concepts and values of several words (`chủ tịch`), words with the characters of the
notation in them (`km/h`, `10:30`), roles and variables without space around them (`:pivot(t/tôi)`), alignments
(`~e.4`, dropped). References to a node before it is defined are PENMAN already.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import penman

MAX_DEPTH = 100
"""Nodes within nodes; a model that repeats itself would nest without end, and people stay below 20."""


class MalformedGraph(ValueError):
    """A text that is no graph; says why."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line
        """Counted from 0 within the text; None where the fault has no one place."""


@dataclass(frozen=True)
class Reference:
    node: int
    """Which node is meant, counted from 0 in reading order."""


@dataclass(frozen=True)
class Node:
    """A node with all that hangs on it; a graph is its topmost node."""

    concept: str
    """As written: words are separated by one space, quotes are kept."""
    edges: tuple[tuple[str, Node | Reference | str], ...] = ()
    """(role with its colon, target); a target that is text is a constant."""

    def walk(self) -> Iterator[Node]:
        """This node and all below it, in reading order."""
        yield self
        for _, target in self.edges:
            if isinstance(target, Node):
                yield from target.walk()

    def words(self) -> set[str]:
        """All concepts and constants, as written."""
        return {node.concept for node in self.walk()} | self.constants()

    def constants(self) -> set[str]:
        """What hangs on nodes and is none, undefined variables too; as written."""
        return {target for node in self.walk() for _, target in node.edges if isinstance(target, str)}

    def referred(self) -> list[int]:
        """The nodes that are mentioned again, each once, in the order in which they are defined."""
        return sorted(
            {target.node for node in self.walk() for _, target in node.edges if isinstance(target, Reference)}
        )


def read_graph(text: str) -> Node:
    """The one graph in a PENMAN text; words come back as they were written.

    A value that is no variable of the graph is a constant: an undefined variable cannot be told from one.
    Raises MalformedGraph.
    """
    return _parse(_balanced(tokenized(text)))


def read_without_variables(text: str) -> Node:
    """The graph in a text of the form `(nói :agent (tôi #1) :topic (đi :agent #1))`.

    A node that is referred to carries a pointer, `#` and a number, behind its concept. Raises MalformedGraph.
    """
    return _parse(_with_variables(_balanced(tokenized(text, variables=False))))


def canonical(graph: Node) -> Node:
    """The same graph with its words in Unicode's NFC, and `_` for the spaces within those that are not quoted."""
    return _changed(graph, _canonical_word, _canonical_word)


def linked(graph: Node, names: Sequence[str]) -> Node:
    """The graph with a reference for every constant that is the name of a node.

    names: one a node; of nodes that share a name, the first is meant.
    """
    references = {_nfc(name): Reference(number) for number, name in reversed(list(enumerate(names)))}
    return _changed(graph, str, lambda constant: references.get(_nfc(constant), constant))


def _changed(graph: Node, concept: Callable[[str], str], constant: Callable[[str], str | Reference]) -> Node:
    edges: list[tuple[str, Node | Reference | str]] = []
    for role, target in graph.edges:
        if isinstance(target, Node):
            edges.append((role, _changed(target, concept, constant)))
        else:
            edges.append((role, constant(target) if isinstance(target, str) else target))
    return Node(concept(graph.concept), tuple(edges))


def variable_names(graph: Node, *, taken: AbstractSet[str] = frozenset()) -> list[str]:
    """A variable for each node: the first letter of its concept, and from the second node with that letter on its
    number: t, t2, t3.

    taken: names to pass over. The graph's constants must be among them wherever the names stand beside constants, or
    a constant that looks like a variable would become a reference.
    """
    counts: dict[str, Iterator[int]] = {}
    names = []
    for node in graph.walk():
        letter = next((char for char in node.concept.lower() if char.isalpha()), "x")
        numbers = counts.setdefault(letter, itertools.count(1))
        named = (f"{letter}{number}" if number > 1 else letter for number in numbers)
        names.append(next(name for name in named if name not in taken))
    return names


def linear(graph: Node, heads: Sequence[str], names: Sequence[str]) -> str:
    """The graph in one line; for each node, what stands first within its parentheses, and how it is referred to."""
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
    """PENMAN over several lines, four spaces a level, as people read it."""
    return str(penman.format(penman.parse(penman_line(canonical(graph))), indent=4))


class Token(NamedTuple):
    kind: str
    """open, close, variable, role, word, string, pointer; quote for one without a partner, stray for `:`, `/` or `#`
    that belongs to no role, variable, pointer or word."""
    text: str
    line: int
    """Counted from 0."""


_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
# A colon opens a role where a letter follows it; within 10:30 or http://x it is part of the word.
_ROLE = r':[^\W\d_][^\s()":/~]*'
_WORD = r'(?:[^\s()":]|:(?![^\W\d_]))+'
# Joined to the words around it, this would make a graph of (c / / x), and of a comment behind a word (c / x # why).
_STRAY = r':[^\s()"]*|[/#]+(?=[\s()":]|\Z)'
_VARIABLE = r'[^\s()":/]+\s*/'
_ALIGNMENT = re.compile(r"~(?:[a-z]\.?)?[0-9]+(?:,[0-9]+)*$")
_PLAIN = re.compile(r"[^\s()\"/:~#][^\s()\"/:~]*(?:\N{NO-BREAK SPACE}[^\s()\"/:~]+)*")
# Holds words together on their way through penman, to which only ASCII whitespace is a space.
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


def _pieces(text: str, *, variables: bool) -> Iterator[re.Match[str]]:
    for match in _pattern(variables=variables).finditer(text):
        yield match
        if match["quote"]:
            # Nothing closes this quote, and so none behind it: to search for that at each takes the square of the text.
            yield from _pattern(variables=variables, strings=False).finditer(text, match.end())
            return


def tokenized(text: str, *, variables: bool = True) -> list[Token]:
    """The text in pieces that penman accepts: words joined, quoted where they have to be, alignments dropped.

    variables: whether every node starts with one. Without them a node may carry a pointer.
    """
    tokens: list[Token] = []
    line, end = 0, 0
    for match in _pieces(text, variables=variables):
        line, end = line + text.count("\n", end, match.start()), match.start()
        kind = "open" if match["open"] else str(match.lastgroup)
        if kind == "string":
            tokens.append(Token(kind, " ".join(match[0].split()), line))
        elif kind == "open":
            tokens.append(Token(kind, "(", line))
            if variables and match["variable"]:
                tokens.append(Token("variable", match["variable"].removesuffix("/").strip(), line))
        elif kind == "word":
            tokens += _word_token(tokens, _ALIGNMENT.sub("", match[0]), line)
        else:
            tokens.append(Token(kind, match[0], line))
    return [token._replace(text=_quoted(token.text)) if token.kind == "word" else token for token in tokens]


def _word_token(tokens: list[Token], text: str, line: int) -> list[Token]:
    """What to append for a word: nothing for a mere alignment, and the last token too, taken off, if that is a word."""
    if not text:
        return []
    if tokens and tokens[-1].kind == "word":
        last = tokens.pop()
        return [last._replace(text=last.text + _JOINT + text)]
    return [Token("word", text, line)]


def _quoted(word: str) -> str:
    if _PLAIN.fullmatch(word):
        return word
    escaped = word.replace(_JOINT, " ").replace("\\", "\\\\")
    return f'"{escaped}"'


def _balanced(tokens: list[Token]) -> list[Token]:
    """The same tokens. Raises for all that penman does not see, or sees by running out of its stack."""
    depth = 0
    for index, token in enumerate(tokens):
        if token.kind == "quote":
            raise MalformedGraph("a quote is opened and never closed", token.line)
        if depth == 0 and index > 0:
            raise MalformedGraph(f"there is text after the graph: {spaced(token.text)}", token.line)
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
    """Every node given a variable that is no word of the text, and every pointer replaced by its node's."""
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
    given: list[Token] = []
    for index, (token, variable) in enumerate(zip(tokens, variables, strict=True)):
        if token.kind == "pointer":
            if token.text not in pointed:
                raise MalformedGraph(f"no node carries the pointer {token.text}", token.line)
            given += [] if index in heads else [Token("word", pointed[token.text], token.line)]
        else:
            given.append(token)
            given += [Token("variable", variable, token.line)] if variable else []
    return given


def _refuse_gaps(tokens: Sequence[Token]) -> None:
    """What penman lets pass with a warning."""
    for token, following in itertools.pairwise(tokens):
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


def _parse(tokens: Sequence[Token]) -> Node:
    _refuse_gaps(tokens)
    lines: list[list[str]] = [[] for _ in range(tokens[-1].line + 1)]
    for token in tokens:
        lines[token.line] += [token.text, "/"] if token.kind == "variable" else [token.text]
    try:
        tree = penman.parse("\n".join(" ".join(line) for line in lines))
    except penman.DecodeError as error:
        line = int(error.lineno or 1) - 1
        around = spaced(" ".join(lines[line]))
        raise MalformedGraph(f"{str(error.message).lower()}, found {around}", line) from None
    names = [_nfc(str(variable)) for variable, _ in tree.nodes()]
    if again := next((name for name, count in Counter(names).items() if count > 1), None):
        raise MalformedGraph(f"variable {again} is defined twice")
    return linked(_node(tree.node), names)


def _node(tree: Any) -> Node:
    """A node of penman's, `(variable, [("/", concept), (role, target), ...])`; variables are left as constants."""
    _, ((_, concept), *branches) = tree
    edges = ((role, spaced(target) if isinstance(target, str) else _node(target)) for role, target in branches)
    return Node(spaced(concept), tuple(edges))


def spaced(word: str) -> str:
    """A word of a token as it was written."""
    return word.replace(_JOINT, " ")


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _canonical_word(word: str) -> str:
    composed = _nfc(word)
    return composed if composed.startswith('"') else composed.replace(" ", "_")
