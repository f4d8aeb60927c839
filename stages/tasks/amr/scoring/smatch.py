"""Smatch, exactly: how many triples two AMR graphs share under the best possible mapping of their nodes.

Source: Cai and Knight, "Smatch: an Evaluation Metric for Semantic Feature Structures", ACL 2013. Which triples a graph
has follows the `smatch` package, 1.0.4: one for each concept, constant and relation, and one for the top; relations
`-of` are turned round, and `mod` is `domain` turned round. The package climbs hills from random starts and finds a
lower bound that moves with its seed; here the mapping is proven to be the best one. A triple that a graph has twice
counts twice, and matches as often as the other graph has it.
"""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp
from scipy.sparse import coo_matrix

from stages.tasks.amr.samples.graphs import Node, Reference

NOT_INVERSE = frozenset({"prep-on-behalf-of", "prep-out-of", "consist-of"})
"""Roles that merely end like an inverse one."""
TIME_LIMIT_S = 60.0
"""For one pair of graphs; the largest of ViSemPar take about 0.1 s."""

Pair = tuple[int, int]
"""A node of one graph, mapped to a node of the other."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Triples:
    concepts: tuple[str, ...]
    """One a node."""
    attributes: Counter[tuple[int, str, str]]
    """(node, role, constant)."""
    relations: Counter[tuple[int, str, int]]
    """(node, role, node)."""

    @property
    def size(self) -> int:
        return len(self.concepts) + self.attributes.total() + self.relations.total()


@dataclass(frozen=True)
class Match:
    matched: int
    """Triples in common under the best mapping found."""
    proven: bool
    """Whether no mapping has more."""


def as_written(word: str) -> str:
    """What the `smatch` package compares: case and quotes do not count."""
    return word.strip('"').lower()


def normalized(word: str) -> str:
    """Beyond `as_written`, `_` is a space, and letters are the same however Unicode composes them."""
    return " ".join(unicodedata.normalize("NFC", word.strip('"')).casefold().replace("_", " ").split())


def triples_of(graph: Node, word: Callable[[str], str]) -> Triples:
    """The triples of a graph, every concept and constant as `word` makes it."""
    concepts: list[str] = []
    attributes: Counter[tuple[int, str, str]] = Counter({(0, "top", "top"): 1})
    relations: Counter[tuple[int, str, int]] = Counter()

    def visit(node: Node) -> int:
        number = len(concepts)
        concepts.append(word(node.concept))
        for role, target in node.edges:
            name = role.removeprefix(":").lower()
            if isinstance(target, str):
                attributes[number, name, word(target)] += 1
                continue
            other = target.node if isinstance(target, Reference) else visit(target)
            if name.endswith("-of") and name not in NOT_INVERSE:
                relations[other, name.removesuffix("-of"), number] += 1
            elif name == "mod":
                relations[other, "domain", number] += 1
            else:
                relations[number, name, other] += 1
        return number

    visit(graph)
    return Triples(tuple(concepts), attributes, relations)


def best_match(ours: Triples, theirs: Triples, *, time_limit_s: float = TIME_LIMIT_S) -> Match:
    """The most triples that any one-to-one mapping of nodes makes common to both graphs.

    A good mapping that reaches an upper bound is the best one; where it does not, an integer program decides. The
    answer does not depend on the machine unless the limit cuts the program short, and then it is not `proven`.
    """
    gains = _gains(ours, theirs)
    if not gains.single:
        return Match(0, proven=True)
    found, bound = _assigned(ours, theirs, gains)
    if found >= bound:
        return Match(found, proven=True)
    return _program(gains, at_least=found, at_most=bound, time_limit_s=time_limit_s)


@dataclass(frozen=True)
class _Gains:
    """What a mapping earns: triples for each pair of nodes that it maps, and for each two pairs that it maps both."""

    single: dict[Pair, int]
    """Every pair that can earn anything, alone or with another."""
    double: dict[tuple[Pair, Pair], int]

    def total(self, mapping: Mapping[int, int]) -> int:
        alone = sum(self.single.get(pair, 0) for pair in mapping.items())
        together = sum(
            gain
            for ((u, v), (s, t)), gain in self.double.items()
            if mapping.get(u) == v and mapping.get(s) == t
        )  # fmt: skip
        return alone + together


def _gains(ours: Triples, theirs: Triples) -> _Gains:
    single: defaultdict[Pair, int] = defaultdict(int)
    double: defaultdict[tuple[Pair, Pair], int] = defaultdict(int)
    concepts = _grouped((concept, number) for number, concept in enumerate(theirs.concepts))
    for number, concept in enumerate(ours.concepts):
        for other in concepts.get(concept, ()):
            single[number, other] += 1
    attributes = _grouped(((role, value), (node, count)) for (node, role, value), count in theirs.attributes.items())
    for (node, role, value), count in ours.attributes.items():
        for other, other_count in attributes.get((role, value), ()):
            single[node, other] += min(count, other_count)
    relations = _grouped((role, (s, t, count)) for (s, role, t), count in theirs.relations.items())
    for (source, role, target), count in ours.relations.items():
        for s, t, other_count in relations.get(role, ()):
            gain = min(count, other_count)
            if source == target and s == t:
                single[source, s] += gain
            elif source != target and s != t:
                one, other_pair = sorted(((source, s), (target, t)))
                double[one, other_pair] += gain
                single[one] += 0
                single[other_pair] += 0
    return _Gains(dict(single), dict(double))


def _grouped[K, V](items: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = {}
    for key, value in items:
        groups.setdefault(key, []).append(value)
    return groups
