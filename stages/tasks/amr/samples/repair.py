"""The best that can be made of a broken answer."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from stages.tasks.amr.samples.graphs import MAX_DEPTH, Node, Reference, Token, linked, spaced, tokenized


@dataclass
class _Open:
    """A node whose parenthesis is open."""

    name: str = ""
    """Its variable or pointer."""
    concept: str | None = None
    role: str | None = None
    """The last one read, as long as it has no target."""
    edges: list[tuple[str, _Open | str]] = field(default_factory=list)

    def add(self, target: _Open | str) -> None:
        """Put under the role that waits for a target; dropped where none does."""
        if self.role is not None and not (isinstance(target, _Open) and target.concept is None):
            self.edges.append((self.role, target))
        self.role = None

    def walk(self) -> list[_Open]:
        return [self, *(node for _, target in self.edges if isinstance(target, _Open) for node in target.walk())]

    def node(self, names: AbstractSet[str]) -> Node:
        """names: of all nodes; a pointer that is not among them points nowhere and is dropped."""
        assert self.concept is not None
        edges: list[tuple[str, Node | Reference | str]] = []
        for role, target in self.edges:
            if isinstance(target, _Open):
                edges.append((role, target.node(names)))
            elif target in names or not target.startswith("#"):
                edges.append((role, target))
        return Node(self.concept, tuple(edges))


def mended(text: str, *, variables: bool) -> Node | None:
    """What is left of an answer when its faults are cut out; None where not even a concept is left.

    Text before and after the graph goes, what is open at the end is closed, and a role without a target, a target
    without a role, a node without a concept and a bracket or quote without a partner are dropped. Of two nodes with
    one name, references mean the first.

    variables: whether nodes have them, or else pointers.
    """
    root: _Open | None = None
    stack: list[_Open] = []
    for token in tokenized(text, variables=variables):
        if token.kind == "open":
            if len(stack) == MAX_DEPTH:
                break
            stack.append(_Open())
            root = root or stack[0]
        elif stack and token.kind == "close":
            _close(stack)
            if not stack:
                break
        elif stack:
            _take(stack[-1], token)
    if stack and variables and not stack[-1].name and not stack[-1].edges:
        stack[-1].concept = None  # where the text breaks off, `(n` was to be a variable
    while stack:
        _close(stack)
    if root is None or root.concept is None:
        return None
    names = [node.name for node in root.walk()]
    return linked(root.node(frozenset(names)), names)


def _close(stack: list[_Open]) -> None:
    node = stack.pop()
    if stack:
        stack[-1].add(node)


def _take(node: _Open, token: Token) -> None:
    """Let an open node have a token that is no parenthesis."""
    if token.kind == "role":
        node.role = token.text
    elif token.kind == "variable":
        node.name = token.text
    elif token.kind == "pointer" and node.role is None:
        node.name = node.name or token.text
    elif token.kind in ("word", "string", "pointer"):
        if node.concept is None and not node.edges and node.role is None:
            node.concept = spaced(token.text)
        else:
            node.add(spaced(token.text))
