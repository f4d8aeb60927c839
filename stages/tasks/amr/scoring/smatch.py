"""Exact Smatch: the number of triples that two AMR graphs share under the best possible mapping of their nodes.

Source: Cai and Knight, "Smatch: an Evaluation Metric for Semantic Feature Structures", ACL 2013. The triples of a graph
are those of the `smatch` package, 1.0.4: one for each concept, constant and relation, and one for the top; relations
`-of` are inverted, and `mod` is the inverse of `domain`. The package climbs hills from random starts and finds a lower
bound that depends on its seed; here the mapping is proven to be the best one. A triple that a graph has twice counts
twice, and matches as often as the other graph has it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp
from scipy.sparse import coo_matrix

from stages.data.texts import composed
from stages.evaluation.statistics import Floats
from stages.tasks.amr.samples.graphs import Node, Reference

NOT_INVERSE = frozenset({"prep-on-behalf-of", "prep-out-of", "consist-of"})
"""Roles that end like an inverse one, and are none."""
TIME_LIMIT_S = 60.0
"""Limit for one pair of graphs; the largest of ViSemPar take about 0.1 s."""
MAX_PAIRS = 500_000
"""Pairs of relations above which no program is written down, as that alone would take minutes and gigabytes. Graphs of
ViSemPar have hundreds."""


@dataclass(frozen=True)
class Triples:
    """The triples of a graph, its nodes numbered from the top, which is 0."""

    concepts: tuple[str, ...]
    """One per node."""
    attributes: Counter[tuple[int, str, str]]
    """(node, role, constant)."""
    relations: Counter[tuple[int, str, int]]
    """(node, role, node)."""

    @property
    def size(self) -> int:
        return len(self.concepts) + self.attributes.total() + self.relations.total()


@dataclass(frozen=True)
class Match:
    """Numbers of triples of two graphs."""

    matched: int
    """In common under the best mapping found."""
    predicted: int
    gold: int
    proven: bool = True
    """Whether this mapping is proven to be the best."""


def as_written(word: str) -> str:
    """The word as the `smatch` package compares it: without case and quotes."""
    return word.strip('"').lower()


def normalized(word: str) -> str:
    """The word without case and quotes, in Unicode's NFC, with spaces for `_`."""
    return " ".join(composed(word.strip('"')).casefold().replace("_", " ").split())


def triples_of(graph: Node, word: Callable[[str], str]) -> Triples:
    """word: maps concepts and constants to the form in which they are compared."""
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


def best_match(predicted: Triples, gold: Triples) -> Match:
    """The most triples that any one-to-one mapping of nodes makes common to both graphs.

    A mapping that reaches an upper bound is the best one; otherwise an integer program decides. The result does not
    depend on the machine, unless TIME_LIMIT_S is reached: then it is not `proven`, and may be too low.
    """
    gains = _gains(predicted, gold)
    bound = (_kinds(predicted) & _kinds(gold)).total()  # of each kind, as many as the graph with fewer has
    matched = _climbed(gains, bound)
    proven = matched == bound
    if not proven and len(gains.weights) <= MAX_PAIRS:
        matched, proven = _program(gains, matched, bound)
    return Match(matched, predicted.size, gold.size, proven)


@dataclass(frozen=True)
class _Gains:
    """The gain of a mapping of n nodes to m nodes, in triples."""

    single: Floats
    """(n, m): gain of each mapped pair of nodes."""
    double: NDArray[np.int64]
    """(4, k): u v s t of each two pairs (u, v) and (s, t) that gain something together."""
    weights: Floats
    """(k,): the gains of these."""


def _gains(ours: Triples, theirs: Triples) -> _Gains:
    single = np.array([[float(one == other) for other in theirs.concepts] for one in ours.concepts])
    constants = defaultdict(list)
    for (node, role, value), count in theirs.attributes.items():
        constants[role, value].append((node, count))
    for (node, role, value), count in ours.attributes.items():
        for other, other_count in constants[role, value]:
            single[node, other] += min(count, other_count)

    by_role = defaultdict(list)
    for (source, role, target), count in theirs.relations.items():
        by_role[role].append((source, target, count))
    double: Counter[tuple[int, int, int, int]] = Counter()
    for (source, role, target), count in ours.relations.items():
        for other_source, other_target, other_count in by_role[role]:
            gain = min(count, other_count)
            if source == target and other_source == other_target:
                single[source, other_source] += gain
            elif source != target and other_source != other_target:
                one, two = sorted(((source, other_source), (target, other_target)))
                double[*one, *two] += gain
    pairs = np.array(list(double), dtype=np.int64).reshape(-1, 4).T
    return _Gains(single, pairs, np.array(list(double.values()), dtype=np.float64))


def _kinds(triples: Triples) -> Counter[tuple[str, ...]]:
    """The triples without their nodes."""
    kinds: Counter[tuple[str, ...]] = Counter((concept,) for concept in triples.concepts)
    kinds.update((role, value) for _, role, value in triples.attributes.elements())
    kinds.update(("", role, "loop" if one == other else "") for one, role, other in triples.relations.elements())
    return kinds


def _climbed(gains: _Gains, bound: int) -> int:
    """The gain of a good mapping.

    Each step assigns nodes by the gain of each pair beside the previous mapping (integer projected fixed point:
    Leordeanu et al., NeurIPS 2009), until nothing improves.
    """
    u, v, s, t = gains.double
    mapped = np.full(gains.single.shape, 1 / max(gains.single.shape))
    best = -1
    while best < bound:
        earned = gains.single.copy()
        np.add.at(earned, (u, v), gains.weights * mapped[s, t])
        np.add.at(earned, (s, t), gains.weights * mapped[u, v])
        mapped = np.zeros_like(earned)
        mapped[linear_sum_assignment(earned, maximize=True)] = 1
        total = round(float((gains.single * mapped).sum() + (gains.weights * mapped[u, v] * mapped[s, t]).sum()))
        if total <= best:
            break
        best = total
    return best


def _program(gains: _Gains, climbed: int, bound: int) -> tuple[int, bool]:
    """The gain of the best mapping by integer programming (HiGHS), and whether it is proven to be the best.

    x: 1 for each mapped pair of nodes. y: 1 for each two mapped pairs that gain together.
    For a pair (u, v) and one node s, at most one of the (u, v)-(s, t) can be 1, and only if x of (u, v) is: summed
    over t, this tightens the relaxation far more than y <= x for each alone. The same holds for one node t, and for
    (s, t).
    """
    u, v, s, t = gains.double
    num_ours, num_theirs = gains.single.shape
    width = num_ours + num_theirs
    useful = gains.single > 0
    useful[u, v] = useful[s, t] = True
    column_of = np.cumsum(useful).reshape(useful.shape) - 1
    first, second = column_of[u, v], column_of[s, t]
    ours, theirs = np.nonzero(useful)
    x, y = np.arange(len(ours)), len(ours) + np.arange(len(gains.weights))
    ties = np.concatenate([first * width + s, second * width + u])
    ties = np.concatenate([ties, first * width + num_ours + t, second * width + num_ours + v])
    tied, tie_of = np.unique(ties, return_inverse=True)
    # One constraint a row: for each of our nodes, each of theirs, and each tie; the x of a tie has the coefficient -1.
    rows = np.concatenate([ours, num_ours + theirs, width + tie_of, width + np.arange(len(tied))])
    columns = np.concatenate([x, x, np.tile(y, 4), tied // width])
    values = np.repeat([1, -1], [len(rows) - len(tied), len(tied)])
    matrix = coo_matrix((values, (rows, columns)), shape=(width + len(tied), len(x) + len(y)))
    # The optimum is a whole number and at most `bound`: less than one triple below it is the optimum.
    result = milp(
        -np.concatenate([gains.single[useful], gains.weights]),
        integrality=np.repeat([1, 0], [len(x), len(y)]),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix.tocsr(), -np.inf, np.repeat([1, 0], [width, len(tied)])),
        options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": 0.999 / bound},
    )
    if result.x is None:
        return climbed, False
    return max(climbed, round(-result.fun)), result.status == 0
