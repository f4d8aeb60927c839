"""Simulated rates of claiming a difference that is not there, and of finding one that is.

Reads   nothing
Writes  nothing; prints the table of docs/statistics.md
Run     python -m tests.benchmarks.false_claims --reports 1000

A simulated report has six recipes on the same samples and ten questions, those of detection. Recipes differ in which
samples they happen to be good at, trainings of a recipe by luck, samples in how hard they are; on average all recipes
are equally good. `false claims` is the share of reports with any claim; `found` the share of the five questions about a
recipe that is truly better in which that is shown; `crossed bootstrap` the false claims of what redraws seeds and
samples, corrected too. Where models are compared (one seed), luck of training would be a true difference between
them: there it is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import click
import numpy as np

from stages.kit.statistics import Floats, Statistic, as_family, corpus_f1, difference, holm, perplexity, sample_mean

SAMPLES = (7, 20, 50, 128)
SEEDS = (1, 2, 3, 5)
RECIPES = 6
QUESTIONS = (*((recipe, 0) for recipe in range(1, RECIPES)), (1, 2), (1, 3), (2, 3), (3, 4), (4, 5))
LUCK = 0.25
"""Standard deviation between trainings, in logits: some 0.03 of a mean IoU."""
SHIFT = 0.6
"""Advantage of the better recipe, in logits."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: str
    statistic: Statistic
    higher_is_better: bool
    draw: Callable[[np.random.Generator, Floats, Floats], Floats]
    """(ability in logits (..., samples), hardness (samples,)) -> scores (..., samples, columns)."""


def draw_ious(rng: np.random.Generator, ability: Floats, hardness: Floats) -> Floats:
    """Mostly good boxes, and misses of 0."""
    share = 1 / (1 + np.exp(-ability))
    scores = rng.beta(np.maximum(8 * share, 0.2), np.maximum(8 * (1 - share), 0.2))
    scores[rng.random(scores.shape) < 0.24 * (1 - share)] = 0
    return scores[..., None]


def draw_counts(rng: np.random.Generator, ability: Floats, hardness: Floats) -> Floats:
    """Matched, predicted and expected triples of sentences of quite different length."""
    expected = np.broadcast_to(np.round(np.exp(2.5 - 0.3 * hardness)) + 2, ability.shape)
    predicted = rng.poisson(0.95 * expected)
    matched = rng.binomial(np.minimum(expected, predicted).astype(int), 1 / (1 + np.exp(-ability)))
    return np.stack([matched, predicted, expected], axis=-1).astype(np.float64)


def draw_nats(rng: np.random.Generator, ability: Floats, hardness: Floats) -> Floats:
    """Nats and tokens of answers of quite different length."""
    tokens = np.broadcast_to(np.round(np.exp(3 - 0.4 * hardness)) + 1, ability.shape)
    return np.stack([tokens * np.exp(0.3 - 0.15 * (ability - 1.2)), tokens], axis=-1)


KINDS = (
    Kind(name="IoU", statistic=sample_mean, higher_is_better=True, draw=draw_ious),
    Kind(name="corpus F1", statistic=corpus_f1, higher_is_better=True, draw=draw_counts),
    Kind(name="perplexity", statistic=perplexity, higher_is_better=False, draw=draw_nats),
)


@click.command(help=__doc__)
@click.option("--reports", default=1000, show_default=True, help="Simulated for each row.")
@click.option("--limits", is_flag=True, help="Simulate what the tests do not hold for instead.")
def main(reports: int, limits: bool) -> None:
    if limits:
        print_limits(reports)
    else:
        print_table(reports)


def print_table(reports: int) -> None:
    click.echo("| score | seeds | samples | false claims | better by | found | crossed bootstrap |")
    click.echo("|---|---:|---:|---:|---:|---:|---:|")
    for kind, seeds, samples in itertools.product(KINDS, SEEDS, SAMPLES):
        rng = np.random.default_rng((seeds, samples))
        nothing = [draw_report(rng, kind, seeds, samples, shift=0) for _ in range(reports)]
        false = np.mean([any(claims(scores, kind)) for scores in nothing])
        better = [draw_report(rng, kind, seeds, samples, shift=SHIFT) for _ in range(reports // 5)]
        found = np.mean([claims(scores, kind)[0 : RECIPES - 1] for scores in better])
        true = np.mean([kind.statistic(scores[:2].mean(axis=2)).mean(axis=1) @ [1, -1] for scores in better])
        crossed = "–"
        if seeds > 1:
            crossed = f"{np.mean([crossed_bootstrap_claims(rng, each, kind) for each in nothing[: reports // 10]]):.0%}"
        cells = (kind.name, seeds, samples, f"{false:.1%}", f"{true:+.3f}", f"{found:.0%}", crossed)
        click.echo("| " + " | ".join(map(str, cells)) + " |")


def print_limits(pairs: int) -> None:
    """Questions of two of the same mean that are called different too often, p of a question alone."""
    rng = np.random.default_rng(0)
    for samples in (20, 50, 128):
        steady = rng.normal(0.76, 0.05, (pairs, 1, samples))
        erratic = np.where(rng.random((pairs, 1, samples)) < 0.05, 0, rng.normal(0.8, 0.05, (pairs, 1, samples)))
        called = np.mean(
            [difference(*pair, resamples=500).p_value <= 0.05 for pair in zip(steady, erratic, strict=True)]
        )
        click.echo(f"one steady, one with 5% misses, {samples} samples: {called:.1%}")
    failed = rng.random((pairs, 5, 1)) < 0.15
    trained = np.where(failed, 0.2, 0.6) + rng.normal(0, 0.02, (pairs, 5, 1)) + rng.normal(0, 0.1, (pairs, 5, 128))
    base = 0.85 * 0.6 + 0.15 * 0.2 + rng.normal(0, 0.1, (pairs, 1, 128))
    called = np.mean([difference(*pair).p_value <= 0.05 for pair in zip(trained, base, strict=True)])
    click.echo(f"15% of trainings fail, 5 seeds against a base, 128 samples: {called:.1%}")


def draw_report(rng: np.random.Generator, kind: Kind, seeds: int, samples: int, *, shift: float) -> Floats:
    """Scores (recipes, seeds, samples, columns); the first recipe is better by `shift`."""
    hardness = rng.normal(0, 1, samples)
    taste = rng.normal(0, 0.5, (RECIPES, 1, samples))
    luck = rng.normal(0, LUCK if seeds > 1 else 0, (RECIPES, seeds, 1))
    ability = 1.2 - hardness + taste + luck + rng.normal(0, 0.7, (RECIPES, seeds, samples))
    ability[0] += shift
    return kind.draw(rng, ability, hardness)


def claims(scores: Floats, kind: Kind) -> list[bool]:
    """Whether anything is claimed, for each question."""
    compare = partial(difference, statistic=kind.statistic, higher_is_better=kind.higher_is_better, resamples=500)
    answers = [compare(scores[ours], scores[theirs]) for ours, theirs in QUESTIONS]
    return [answer.verdict in ("better", "worse") for answer in as_family(answers)]


def crossed_bootstrap_claims(rng: np.random.Generator, scores: Floats, kind: Kind) -> bool:
    """Whether a bootstrap of seeds and samples claims anything."""
    _, seeds, samples, _ = scores.shape
    p_values: list[float] = []
    for ours, theirs in QUESTIONS:
        redrawn = []
        for _ in range(500):
            rows = rng.integers(0, samples, samples)
            values = [
                kind.statistic(scores[recipe][rng.integers(0, seeds, seeds)][:, rows].mean(axis=1)).mean()
                for recipe in (ours, theirs)
            ]
            redrawn.append(values[0] - values[1])
        above = float(np.mean(np.array(redrawn) > 0))
        p_values.append(2 * min(above, 1 - above))
    return min(holm(p_values)) <= 0.05


if __name__ == "__main__":
    main()
