"""Simulated rates of claiming what is not so, and of finding what is.

Reads   nothing
Writes  nothing; prints the tables of docs/tables/simulation.txt
Run     python -m tests.benchmarks.false_claims --reports 1000

A simulated report has six recipes on the same samples and ten questions, those of detection, and what matters is
MATTERS. Recipes differ in which samples they happen to be good at, trainings of a recipe by luck, samples in how hard
they are; on average all recipes are equally good, or the first is better.

First table, a report: `false claims` is the share of reports with any claim though nothing differs; `beside a true one`
that of reports with a false one where the first recipe is better; `found` the share of the five questions about that
recipe in which it is shown. Second table, a race: `wrong` is the share of races that name a recipe which is worse than
the best by what matters; `decided` that of races that name one by the last look, and `a best one named` the share of
these that name the best or an equal; `without a race` is the number of trainings of equally many seeds of each recipe
that decide as often, and `fewer` what a race saves against it. Where models are compared (one seed), luck
of training would be a true difference between them: there it is left out.

Third table, a report on 128 samples in groups of one `size`, or of `unequal` ones around it: `alike` is the share of
the variance between samples that is between groups, and `ignored` the share of reports with a false claim if each
sample counts as its own. Trainings of a recipe hardly differ, so that a claim rests on the samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from stages.evaluation.statistics import Floats, Groups, Statistic, corpus_f1, perplexity, sample_mean
from stages.reporting.evidence import (
    LOOK_LEVELS,
    LOOKS,
    SHARE_OF_DIFFERENCES,
    Evidence,
    Race,
    as_family,
    closed_testing,
    difference,
    equality_sets,
    holm,
    summarize,
)

RECIPES = 6
QUESTIONS = (*((recipe, 0) for recipe in range(1, RECIPES)), (1, 2), (1, 3), (2, 3), (3, 4), (4, 5))
SETS = equality_sets(QUESTIONS) or ()
LUCK = 0.25
"""Standard deviation between trainings, in logits: some 0.03 of a mean IoU."""
SHIFT = 0.6
"""Advantage of the better recipe, in logits."""
FAILED = 2.6
"""Logits that a failed training loses."""
FIXED = tuple(range(LOOKS[0], LOOKS[-1] + 1))
"""Seeds of each recipe without a race."""
CHUNK = 2_000_000
"""Scores drawn at once."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: str
    statistic: Statistic
    higher_is_better: bool
    matters: float
    """The smallest difference that matters: about a third of what SHIFT gives."""
    draw: Callable[[np.random.Generator, Floats, Floats], Floats]
    """(ability in logits (..., samples), hardness (..., samples)) -> scores (..., samples, columns)."""


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
    Kind(name="IoU", statistic=sample_mean, higher_is_better=True, matters=0.03, draw=draw_ious),
    Kind(name="corpus F1", statistic=corpus_f1, higher_is_better=True, matters=0.025, draw=draw_counts),
    Kind(name="perplexity", statistic=perplexity, higher_is_better=False, matters=0.13, draw=draw_nats),
)


def spread_of(rng: np.random.Generator, name: str, reports: int) -> Floats:
    """Standard deviation between trainings of each recipe, in logits: (reports, recipes). name: of SPREADS."""
    luck = np.full((reports, RECIPES), LUCK)
    match name:
        case "lognormal 0.5":
            return luck * np.exp(rng.normal(0, 0.5, luck.shape))
        case "one four times":
            return rng.permuted(luck * np.array([2.0] + [0.5] * (RECIPES - 1)), axis=1)
        case "half nearly none":
            return rng.permuted(np.where(np.arange(RECIPES) % 2, luck, luck * 0.2), axis=1)
        case "hardly any":
            return luck * 0.1
    return luck


SPREADS = ("equal", "lognormal 0.5", "one four times", "half nearly none", "15% failed")


@dataclass(frozen=True, kw_only=True)
class Grouping:
    groups: Groups
    alike: float
    """Share of the variance between samples that is between groups."""


def sizes_of(size: int, samples: int, *, equal: bool) -> Groups:
    """The group of each sample: all of a size, or of sizes around it, by the geometric distribution."""
    if equal:
        return np.arange(samples) // size
    return np.repeat(np.arange(samples), np.random.default_rng(size).geometric(1 / size, samples))[:samples]


def normal(rng: np.random.Generator, shape: tuple[int, ...], grouping: Grouping | None) -> Floats:
    """Standard normal numbers (..., samples), as alike within groups as the grouping has it."""
    own = rng.normal(0, 1, shape)
    if grouping is None:
        return own
    of_groups = rng.normal(0, 1, (*shape[:-1], grouping.groups[-1] + 1))[..., grouping.groups]
    return np.sqrt(grouping.alike) * of_groups + np.sqrt(1 - grouping.alike) * own


def drawn(
    rng: np.random.Generator,
    kind: Kind,
    spread: str,
    shape: tuple[int, int, int],
    shifts: Sequence[float],
    grouping: Grouping | None = None,
) -> Iterator[Floats]:
    """Scores (reports, recipes, seeds, samples, columns) of all reports, some at a time.

    shape: (reports, seeds, samples); one seed is a model without luck. shifts: advantage of each recipe, in logits.
    """
    reports, seeds, samples = shape
    at_once = max(1, CHUNK // (RECIPES * seeds * samples))
    for start in range(0, reports, at_once):
        number = min(at_once, reports - start)
        hardness = normal(rng, (number, 1, 1, samples), grouping)
        taste = 0.5 * normal(rng, (number, RECIPES, 1, samples), grouping)
        luck = rng.normal(0, 1, (number, RECIPES, seeds, 1)) * spread_of(rng, spread, number)[..., None, None]
        if spread.endswith("failed"):
            luck -= FAILED * (rng.random(luck.shape) < 0.15)
        noise = 0.7 * normal(rng, (number, RECIPES, seeds, samples), grouping)
        ability = 1.2 - hardness + taste + (luck if seeds > 1 else 0) + noise + np.reshape(shifts, (-1, 1, 1))
        yield kind.draw(rng, ability, hardness)


@click.command(help=__doc__)
@click.option("--reports", default=1000, help="Simulated reports and races a row; fewer of models.")
@click.option("--limits", is_flag=True, help="Print what the promise does not hold for.")
@click.option("--only", type=click.Choice(["reports", "races", "groups"]), help="One of the three tables.")
def main(reports: int, limits: bool, only: str | None) -> None:
    if limits:
        print_limits(reports)
        return
    for name, printed in {"reports": print_reports, "races": print_races, "groups": print_groups}.items():
        if only in (None, name):
            printed(reports)


def print_reports(reports: int) -> None:
    click.echo(
        "| score | spread between seeds | seeds | samples | false claims | beside a true one | better by | found |"
    )
    click.echo("|---|---|---:|---:|---:|---:|---:|---:|")
    cells = [*(("none", 1, samples) for samples in (7, 20, 50, 128)), ("equal", 2, 128)]
    cells += [(spread, seeds, samples) for spread in SPREADS for seeds in (3, 5) for samples in (50, 128, 400)]
    first = np.array([0 in question for question in QUESTIONS])
    for kind, (spread, seeds, samples) in itertools.product(KINDS, cells):
        rng = np.random.default_rng((seeds, samples))
        number, claims = (reports, claims_of_recipes) if seeds > 1 else (reports // 8, claims_of_models)
        draw = partial(drawn, rng, kind, "equal" if spread == "none" else spread)
        different, as_good, _ = claims(kind, draw((number, seeds, samples), [0] * RECIPES))
        false = different.any(axis=1).mean()
        different, as_good, better = claims(kind, draw((number // 2, seeds, samples), [SHIFT] + [0] * (RECIPES - 1)))
        beside = (different[:, ~first].any(axis=1) | as_good[:, first].any(axis=1)).mean()
        figures = f"{false:.1%} | {beside:.1%} | {better:+.3f} | {different[:, first].mean():.0%}"
        click.echo(f"| {kind.name} | {spread} | {seeds} | {samples} | {figures} |")


Claims = tuple[NDArray[np.bool_], NDArray[np.bool_], float]
"""Questions answered by a difference, and by "as good", (reports, questions); how much better the first recipe is."""


def claims_of_recipes(kind: Kind, reports: Iterable[Floats], groups: Groups | None = None) -> Claims:
    found = []
    for scores in reports:
        evidence = summarize([scores[:, recipe] for recipe in range(RECIPES)], kind.statistic, groups)
        gaps, spread = evidence.gaps(*np.transpose(QUESTIONS))
        differ = closed_testing(SETS, spread.p_value(gaps), SHARE_OF_DIFFERENCES) <= 0.05
        p_values = np.maximum(*(spread.p_at_least(sign * gaps, kind.matters) for sign in (1, -1)))
        as_good = ~differ & (holm(p_values) / (1 - SHARE_OF_DIFFERENCES) <= 0.05)
        found.append((differ, as_good, evidence.means[:, 0] - evidence.means[:, 1]))
    differ, as_good, better = map(np.concatenate, zip(*found, strict=True))
    return differ, as_good, float(better.mean())


def claims_of_models(kind: Kind, reports: Iterable[Floats], groups: Groups | None = None) -> Claims:
    found, better = [], []
    for scores in (report for some in reports for report in some):
        answers = [
            difference(
                list(scores),
                pair,
                statistic=kind.statistic,
                groups=groups,
                higher_is_better=kind.higher_is_better,
                resamples=500,
            )
            for pair in QUESTIONS
        ]
        found.append([answer.verdict in ("better", "worse") for answer in as_family(answers)])
        better.append(-answers[0].mean)
    return np.array(found), np.zeros_like(found), float(np.mean(better))


GROUPED_SAMPLES = 128
GROUPED = (*itertools.product((3, 5), (2, 4, 8), (0.1, 0.3)), (1, 8, 0.3))
"""Seeds, mean size of a group, and how alike its samples are."""


def print_groups(reports: int) -> None:
    click.echo("| score | seeds | size | sizes | groups | alike | ignored | false claims | beside a true one | found |")
    click.echo("|---|---:|---:|---|---:|---:|---:|---:|---:|---:|")
    first = np.array([0 in question for question in QUESTIONS])
    for kind, (seeds, size, alike), equal in itertools.product(KINDS, GROUPED, (True, False)):
        grouping = Grouping(groups=sizes_of(size, GROUPED_SAMPLES, equal=equal), alike=alike)
        number = reports if seeds > 1 else reports // 5
        ignored, false = (false_claims(kind, seeds, grouping, number, known) for known in (None, grouping.groups))
        different, as_good, _ = grouped_claims(kind, seeds, grouping, number // 2, grouping.groups, SHIFT)
        beside = (different[:, ~first].any(axis=1) | as_good[:, first].any(axis=1)).mean()
        cells = kind.name, seeds, size, "equal" if equal else "unequal", grouping.groups[-1] + 1, alike
        rates = f"{ignored:.1%} | {false:.1%} | {beside:.1%} | {different[:, first].mean():.0%}"
        click.echo(f"| {' | '.join(map(str, cells))} | {rates} |")


def false_claims(kind: Kind, seeds: int, grouping: Grouping, reports: int, known: Groups | None) -> float:
    """Share of the reports with any claim though nothing differs. known: the groups that the tests are given."""
    return float(grouped_claims(kind, seeds, grouping, reports, known)[0].any(axis=1).mean())


def grouped_claims(
    kind: Kind, seeds: int, grouping: Grouping, reports: int, known: Groups | None, shift: float = 0.0
) -> Claims:
    """shift: the advantage of the first recipe, in logits."""
    rng = np.random.default_rng((seeds, grouping.groups[-1], bool(shift)))
    shape, shifts = (reports, seeds, len(grouping.groups)), [shift] + [0.0] * (RECIPES - 1)
    claims = claims_of_recipes if seeds > 1 else claims_of_models
    return claims(kind, drawn(rng, kind, "hardly any", shape, shifts, grouping), known)


SCENES = {
    "nothing differs": (0.0,) * RECIPES,
    "one better": (SHIFT, *[0.0] * (RECIPES - 1)),
    "a ladder": (SHIFT, 0.75 * SHIFT, SHIFT / 2, SHIFT / 4, 0.0, SHIFT),
}
"""Advantage of each recipe in logits."""


def print_races(races: int) -> None:
    click.echo(
        "| score | spread between seeds | samples | truth | matters | wrong | decided | a best one named | trainings | "
        "without a race | fewer |"
    )
    click.echo("|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for kind in KINDS:
        cells = [(spread, 128, 1.0) for spread in SPREADS]
        cells += [("equal", 50, 1.0), ("equal", 400, 1.0), ("equal", 128, 1 / 3)] if kind is KINDS[0] else []
        for (spread, samples, part), (scene, shifts) in itertools.product(cells, SCENES.items()):
            truth, size = true_scores(kind, shifts), np.abs(np.diff(true_scores(kind, SCENES["one better"])[:2]))[0]
            rng = np.random.default_rng(samples)
            looks = [
                evidence_by_seeds(kind, some) for some in drawn(rng, kind, spread, (races, FIXED[-1], samples), shifts)
            ]
            matters = part * size

            def run(plan: Sequence[tuple[int, float]]) -> tuple[NDArray[np.bool_], NDArray[np.int64], Floats]:
                each = [raced(kind, evidence, matters, plan) for evidence in looks]  # noqa: B023 - used at once
                done, leader, trainings = map(np.concatenate, zip(*each, strict=True))
                return done, leader, trainings

            done, leader, trainings = run(list(zip(LOOKS, LOOK_LEVELS, strict=True)))
            behind = np.max(truth) - truth[leader]
            fixed = np.maximum.accumulate([run([(seeds, 0.05)])[0].mean() for seeds in FIXED])
            enough = (fixed >= done.mean() - 0.005) & (done.mean() > 0.05)
            as_often = RECIPES * FIXED[int(np.argmax(enough))]
            fewer = f"{as_often} | {1 - trainings.mean() / as_often:.0%}" if enough.any() else "over 72 | –"
            click.echo(
                f"| {kind.name} | {spread} | {samples} | {scene} | {matters:.3f} | "
                f"{(done & (behind >= matters - 1e-9)).mean():.1%} | {done.mean():.0%} | "
                f"{(done & (behind < 1e-9)).sum() / max(done.sum(), 1):.0%} | {trainings.mean():.1f} | {fewer} |"
            )


@cache
def true_scores(kind: Kind, shifts: tuple[float, ...]) -> Floats:
    """(recipes,), higher being better; equal for equal advantages."""
    scores = drawn(np.random.default_rng(99), kind, "equal", (1000, 2, 400), shifts)
    found = np.concatenate([kind.statistic(some.mean(axis=3)).mean(axis=2) for some in scores]).mean(axis=0)
    same = {shift: found[[other == shift for other in shifts]].mean() for shift in shifts}
    return np.array([same[shift] for shift in shifts]) * (1 if kind.higher_is_better else -1)


def evidence_by_seeds(kind: Kind, scores: Floats) -> list[Evidence]:
    """The evidence of the first so many seeds, for each of FIXED."""
    return [summarize([scores[:, recipe, :seeds] for recipe in range(RECIPES)], kind.statistic) for seeds in FIXED]


def raced(
    kind: Kind, by_seeds: Sequence[Evidence], matters: float, plan: Sequence[tuple[int, float]]
) -> tuple[NDArray[np.bool_], NDArray[np.int64], Floats]:
    """(whether it was decided, the recipe named, trainings) of each race, (races,). plan: seeds and level by look."""
    races = len(by_seeds[0].means)
    race = Race(RECIPES, matters, kind.higher_is_better, races)
    seeds = np.zeros((races, RECIPES), np.int64)
    for number, level in plan:
        seeds = np.where(race.racing & ~race.done[:, None], number, seeds)
        at = np.maximum(seeds, FIXED[0]) - FIXED[0]

        def chosen(field: str) -> Any:
            stacked = np.stack([getattr(evidence, field) for evidence in by_seeds])
            index = at if stacked.ndim == 3 else at[..., None]  # noqa: B023 - used at once
            return np.take_along_axis(stacked, index[None], axis=0)[0]

        arrays = (each.name for each in fields(Evidence) if np.ndim(getattr(by_seeds[0], each.name)))
        race.look(replace(by_seeds[0], **{name: chosen(name) for name in arrays}), level)
    return race.done, race.leader, seeds.sum(axis=1)


def print_limits(pairs: int) -> None:
    """Questions of two of the same mean that are called different too often, p of a question alone."""
    rng = np.random.default_rng(0)
    for samples in (20, 50, 128):
        steady = rng.normal(0.76, 0.05, (pairs, 1, samples))
        erratic = np.where(rng.random((pairs, 1, samples)) < 0.05, 0, rng.normal(0.8, 0.05, (pairs, 1, samples)))
        both = zip(steady, erratic, strict=True)
        called = np.mean([difference(pair, resamples=500).p_value <= 0.05 for pair in both])
        click.echo(f"one steady, one with 5% misses, {samples} samples: {called:.1%}")
    failed = rng.random((pairs, 5, 1)) < 0.15
    trained = np.where(failed, 0.2, 0.6) + rng.normal(0, 0.02, (pairs, 5, 1)) + rng.normal(0, 0.1, (pairs, 5, 128))
    base = 0.85 * 0.6 + 0.15 * 0.2 + rng.normal(0, 0.1, (pairs, 1, 128))
    called = np.mean([difference(pair).p_value <= 0.05 for pair in zip(trained, base, strict=True)])
    click.echo(f"15% of trainings fail, 5 seeds against a base, 128 samples: {called:.1%}")
    for recipes in (2, 3):
        spread = np.where(np.arange(recipes), 0.01, 0.04)[:, None, None]
        luck = rng.normal(0, 1, (20 * pairs, recipes, 3, 1)) * spread
        scores = luck + rng.normal(0, 0.02, (20 * pairs, recipes, 3, 50))
        asked = tuple(itertools.combinations(range(recipes), 2))
        gaps, errors = summarize(list(np.moveaxis(scores[..., None], 1, 0)), sample_mean).gaps(*np.transpose(asked))
        called = (closed_testing(equality_sets(asked) or (), errors.p_value(gaps)) <= 0.05).any(axis=1).mean()
        click.echo(f"{recipes} recipes, one four times as much between seeds, 3 seeds: {called:.1%}")


if __name__ == "__main__":
    main()
