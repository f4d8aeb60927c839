"""Tests of differences and of families, against scipy and by simulation; races."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import ndtri, stdtrit

from stages.evaluation.statistics import Floats, Interval, bootstrap, corpus_f1, perplexity, sample_mean
from stages.reporting import evidence
from stages.reporting.evidence import (
    LOOK_LEVELS,
    LOOKS,
    SHARE_OF_DIFFERENCES,
    Difference,
    Race,
    as_family,
    closed_testing,
    difference,
    equality_sets,
    holm,
    pool_variances,
    score,
    summarize,
)
from tests.benchmarks.false_claims import KINDS, Grouping, false_claims, sizes_of
from tests.damage import quick

PAIRS = tuple(itertools.combinations(range(4), 2))


def ious(rng: np.random.Generator, recipes: int, seeds: int, samples: int, *, between_seeds: float = 0.04) -> Floats:
    """(recipes, seeds, samples) of recipes that are equally good, on samples that are hard or easy for all."""
    hardness = rng.normal(0.6, 0.15, samples)
    taste = rng.normal(0, 0.08, (recipes, 1, samples))  # which samples a recipe happens to be good at
    luck = rng.normal(0, between_seeds, (recipes, seeds, 1))
    return np.clip(hardness + taste + luck + rng.normal(0, 0.1, (recipes, seeds, samples)), 0, 1)


def scores(
    rng: np.random.Generator, reports: int, seeds: int, means: list[float], spreads: list[float], taste: float = 0.0
) -> list[Floats]:
    """Scores of each recipe, (reports, seeds, 60 samples, 1); taste: spread of what a recipe is good at."""
    hardness = rng.normal(0, 0.1, (reports, 1, 60))
    found = []
    for mean, spread in zip(means, spreads, strict=True):
        luck, noise = rng.normal(0, spread, (reports, seeds, 1)), rng.normal(0, 0.1, (reports, seeds, 60))
        found.append((mean + hardness + rng.normal(0, taste, (reports, 1, 60)) + luck + noise)[..., None])
    return found


def p_values(recipes: list[Floats]) -> Floats:
    gaps, spread = summarize(recipes, sample_mean).gaps(*np.transpose(PAIRS))
    return spread.p_value(gaps)


def counts(rng: np.random.Generator, rate: float, shape: tuple[int, ...]) -> Floats:
    """(..., 3): matched, predicted and expected counts of sentences of quite different length."""
    expected = rng.geometric(0.1, shape) + 1
    predicted = rng.poisson(expected) + 1
    matched = rng.binomial(np.minimum(predicted, expected), rate)
    return np.stack([matched, predicted, expected], axis=-1).astype(np.float64)


def found(interval: Interval | None) -> Interval:
    assert interval is not None
    return interval


LIMIT = 0.05 + 2 * math.sqrt(0.05 * 0.95 / 300)


def test_null_reports_of_models_claim_a_difference_in_at_most_one_of_twenty() -> None:
    rng, reports, claims = np.random.default_rng(1), 300, 0
    for _ in range(reports):
        drawn = ious(rng, 4, 1, 30, between_seeds=0)  # the luck of one training is a true difference between two models
        pairs = [difference([drawn[one], drawn[other]], resamples=500) for one, other in PAIRS]
        claims += any(pair.verdict in ("better", "worse") for pair in as_family(pairs))
    assert claims / reports <= LIMIT


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("spreads", [[0.04] * 4, [0.01, 0.01, 0.01, 0.04]], ids=["equal", "one four times"])
def test_null_reports_of_recipes_claim_a_difference_in_at_most_one_of_twenty(seeds: int, spreads: list[float]) -> None:
    drawn = scores(np.random.default_rng(seeds), 2000, seeds, [0.6] * 4, spreads, taste=0.15)
    claims = closed_testing(equality_sets(PAIRS) or (), p_values(drawn)) <= 0.05
    assert claims.any(axis=1).mean() <= 0.055


def test_recipes_that_share_their_spread_find_more() -> None:
    drawn = scores(np.random.default_rng(2), 1000, 3, [0.66, 0.6, 0.6, 0.6], [0.02] * 4)
    of_best = [index for index, pair in enumerate(PAIRS) if 0 in pair]
    together = closed_testing(equality_sets(PAIRS) or (), p_values(drawn))[:, of_best] <= 0.05
    variances = np.stack([each.mean(axis=(2, 3)).var(axis=1, ddof=1) for each in drawn], axis=1)
    errors = np.sqrt((variances[:, :1] + variances[:, 1:]) / 3)
    gaps = np.stack([drawn[0].mean(axis=(1, 2, 3)) - each.mean(axis=(1, 2, 3)) for each in drawn[1:]], axis=1)
    alone = 2 * scipy.stats.t.sf(gaps / errors, 4) * len(PAIRS) <= 0.05  # each pair by its own, corrected by number
    assert together.mean() > 1.5 * alone.mean() > 0.1


def test_null_reports_with_unequal_seeds_claim_no_more() -> None:
    rng, reports, claims = np.random.default_rng(1), 300, 0
    for _ in range(reports):
        few, many = ious(rng, 2, 2, 60, between_seeds=0.06), ious(rng, 2, 5, 60, between_seeds=0.01)
        pairs = [(0, 2), (0, 3), (1, 2), (1, 3)]
        found = as_family([difference([*few, *many], pair) for pair in pairs], pairs)
        claims += any(each.verdict in ("better", "worse") for each in found)
    assert claims / reports <= LIMIT


VARIANCES = arrays(np.float64, (5, 4), elements=st.floats(0, 10))


@given(VARIANCES, st.integers(2, 6))
@quick(50)
def test_sharing_adds_freedom_and_never_takes_spread_away(variances: Floats, trainings: int) -> None:
    counts = np.full(variances.shape, float(trainings))
    moderated, freedom = pool_variances(variances, counts)
    assert np.isfinite(moderated).all()
    assert (moderated >= variances).all()
    assert ((freedom >= trainings - 1) & (freedom <= 4 * (trainings - 1) + 1e-9)).all()
    if trainings < 3:
        assert (freedom == 1).all(), "two trainings that failed alike are no evidence of steadiness"


@given(arrays(np.float64, (50, 3), elements=st.floats(0, 1e-3)))
@quick(20)
def test_nothing_is_shared_where_one_recipe_was_trained_twice(variances: Floats) -> None:
    moderated, freedom = pool_variances(variances, np.broadcast_to([4.0, 4, 2], variances.shape))
    assert moderated == pytest.approx(variances)
    assert (freedom == [3, 3, 1]).all()


def test_recipes_share_the_pooled_variance_and_a_base_has_no_part() -> None:
    counts = np.array([3.0, 3, 3, 1])
    moderated, freedom = pool_variances(np.array([2.0, 2, 2, 0]), counts)
    assert moderated.tolist() == pytest.approx([2, 2, 2, 0])
    assert freedom.tolist() == pytest.approx([6, 6, 6, np.inf])
    moderated, freedom = pool_variances(np.array([0.0, 0, 9, 0]), counts)
    assert moderated.tolist() == pytest.approx([2, 2, 9, 0]), "4/6 of the pooled 3, 2/6 of its own; or its own"
    assert freedom.tolist() == pytest.approx([6, 6, 2, np.inf]), "nothing that the others know explains it"
    unlike = pool_variances(np.array([1.0, 1, 10]), counts[:3])[1]
    assert unlike.tolist() == pytest.approx([6, 6, 1 / (0.1**3 / 6 + 0.9**3 / 2)])
    with np.errstate(divide="raise", invalid="raise"):
        assert pool_variances(np.zeros(3), np.ones(3))[1].tolist() == [np.inf] * 3, "models alone"


def test_the_sets_of_equalities_that_can_be_true() -> None:
    assert set(equality_sets((("a", "b"), ("a", "c"), ("b", "c"))) or ()) == {(0,), (1,), (2,), (0, 1, 2)}
    apart = equality_sets(((("x", "a"), ("x", "b")), (("y", "a"), ("y", "b"))))
    assert set(apart or ()) == {(0,), (1,), (0, 1)}, "equal by one metric is not equal by another"
    star = tuple(("base", number) for number in range(14))
    assert equality_sets(star) is None
    found = [difference([np.full((1, 10), 0.1 * each), np.zeros((1, 10))]) for each in range(14)]
    assert as_family(found, star)[3].adjusted_p == holm([each.p_value for each in found])[3]


@given(arrays(np.float64, (3, len(PAIRS)), elements=st.floats(0, 0.2)))
@quick(50)
def test_closed_testing_is_between_no_correction_and_holm(p: Floats) -> None:
    corrected = closed_testing(equality_sets(PAIRS) or (), p)
    assert (corrected >= p).all()
    assert (corrected <= holm(p) + 1e-12).all()


def test_recipes_are_as_good_only_within_what_matters() -> None:
    rng = np.random.default_rng(3)
    drawn = scores(rng, 1, 8, [0.6, 0.602, 0.7], [0.005] * 3)
    recipes, pairs = [each[0] for each in drawn], [(0, 1), (0, 2)]

    def verdicts(matters: float | None) -> list[str]:
        found = as_family([difference(recipes, pair, matters=matters) for pair in pairs], pairs)
        return [each.verdict for each in found]

    assert verdicts(0.05) == ["as good", "worse"]
    for pair in ((0, 2), (2, 0)):
        assert difference(recipes, pair, matters=0.05).p_as_good > 0.95, "whichever of the two is ahead"
    assert verdicts(0.001) == verdicts(None) == ["no difference shown", "worse"]


def test_a_claim_is_false_in_at_most_one_report_of_twenty_whichever_kind_it_is() -> None:
    """Two recipes are equal, and two differ from them by just what matters."""
    evidence_of = summarize(scores(np.random.default_rng(4), 4000, 5, [0.6, 0.6, 0.65, 0.65], [0.01] * 4), sample_mean)
    gaps, spread = evidence_of.gaps(*np.transpose(PAIRS))
    differ = closed_testing(equality_sets(PAIRS) or (), spread.p_value(gaps), SHARE_OF_DIFFERENCES) <= 0.05
    small = np.maximum(spread.p_at_least(gaps, 0.05), spread.p_at_least(-gaps, 0.05))
    as_good = ~differ & (holm(small) / (1 - SHARE_OF_DIFFERENCES) <= 0.05)
    equal = np.array([pair in ((0, 1), (2, 3)) for pair in PAIRS])
    assert as_good[:, equal].mean() > 0.3
    assert (differ[:, equal].any(axis=1) | as_good[:, ~equal].any(axis=1)).mean() <= 0.055


def test_the_looks_of_a_race_spend_five_percent() -> None:
    rng, seeds = np.random.default_rng(5), np.array(LOOKS)
    steps = rng.standard_normal((400_000, len(LOOKS))) * np.sqrt(np.diff(seeds, prepend=0))
    scaled = np.cumsum(steps, axis=1) / np.sqrt(seeds)
    assert float((scaled > -ndtri(LOOK_LEVELS)).any(axis=1).mean()) == pytest.approx(0.05, abs=0.0015)


def raced(means: list[float], matters: float, races: int = 400) -> tuple[Race, Floats]:
    drawn = scores(np.random.default_rng(6), races, LOOKS[-1], means, [0.02] * len(means))
    race, trainings = Race(len(means), matters, num_races=races), np.zeros(races)
    for seeds, level, more in zip(LOOKS, LOOK_LEVELS, np.diff(LOOKS, prepend=0), strict=True):
        trainings += more * (race.racing & ~race.done[:, None]).sum(axis=1)
        race.look(summarize([each[:, :seeds] for each in drawn], sample_mean), level)
    return race, trainings


def test_a_race_names_the_best_with_fewer_trainings() -> None:
    race, trainings = raced([0.7, 0.65, 0.55, 0.55], 0.05)
    assert race.done.mean() > 0.95
    assert (race.leader[race.done] == 0).mean() > 0.95
    assert trainings.mean() < 0.6 * 4 * LOOKS[-1]
    assert not race.racing[:, 2:].any(axis=1).mean() > 0.05


def test_a_race_names_a_recipe_that_is_worse_by_what_matters_in_at_most_one_of_twenty() -> None:
    race, _ = raced([0.6, 0.57, 0.57, 0.57], 0.03)
    assert (race.done & (race.leader != 0)).mean() <= 0.05
    alike, _ = raced([0.6] * 4, 0.01)
    assert alike.done.mean() < 0.5, "alike as they are, nothing so small can be decided"


def test_two_trainings_each_count_with_the_freedom_of_one() -> None:
    rng = np.random.default_rng(5)
    ours, theirs = rng.normal(0.7, 0.02, 2), rng.normal(0.6, 0.05, 2)
    shown = difference([np.repeat(ours[:, None], 20, 1), np.repeat(theirs[:, None], 20, 1)])
    error = math.sqrt((ours.var(ddof=1) + theirs.var(ddof=1)) / 2)
    assert shown.p_value == pytest.approx(2 * scipy.stats.t.sf(shown.mean / error, 1))
    assert found(shown.interval).high == pytest.approx(shown.mean + scipy.stats.t.ppf(0.975, 1) * error)


def test_the_luck_of_a_training_is_no_evidence_for_a_recipe() -> None:
    rng = np.random.default_rng(3)
    lucky, unlucky = ious(rng, 1, 3, 100)[0] + [[0.06], [0.0], [0.03]], ious(rng, 1, 3, 100)[0]
    models = difference([lucky[:1], unlucky[:1]])
    assert (models.verdict, models.of_recipes) == ("better", False)
    assert difference([lucky, unlucky]).verdict == "no difference shown"


def test_a_true_difference_between_recipes_is_found() -> None:
    scores = ious(np.random.default_rng(4), 2, 5, 100, between_seeds=0.01)
    shown = difference([scores[0] + 0.1, scores[1]])
    assert shown.verdict == "better"
    assert 0.1 in found(shown.interval)
    assert (shown.trainings, shown.samples) == ((5, 5), 100)


def test_one_training_beside_several_is_a_fixed_model() -> None:
    ours = np.repeat(np.array([0.70, 0.74, 0.72])[:, None], 20, 1)
    shown = difference([ours, np.full((1, 20), 0.5)])
    assert shown.p_value == pytest.approx(scipy.stats.ttest_1samp(ours[:, 0], 0.5).pvalue)
    assert shown.of_recipes


@pytest.mark.parametrize("statistic", [corpus_f1, perplexity])
def test_ratios_of_sums_cover_the_true_difference(statistic: Callable[[Floats], Floats]) -> None:
    rng, trials, covered = np.random.default_rng(7), 300, 0
    columns = 3 if statistic is corpus_f1 else 2  # matched, predicted, expected; or nats, tokens

    def draw(rate: float, shape: tuple[int, ...]) -> Floats:
        return counts(rng, rate, shape)[..., :columns] + (0 if columns == 3 else [0, 1])

    truth = float(statistic(draw(0.7, (200_000,)).mean(axis=0)) - statistic(draw(0.6, (200_000,)).mean(axis=0)))
    for _ in range(trials):
        covered += truth in found(difference([draw(0.7, (3, 60)), draw(0.6, (3, 60))], statistic=statistic).interval)
    assert covered / trials >= 0.93


@pytest.mark.parametrize(("statistic", "columns"), [(sample_mean, 1), (corpus_f1, 3), (perplexity, 2)])
@pytest.mark.parametrize("seeds", [1, 3])
def test_copies_of_a_sample_are_no_evidence(seeds: int, statistic: Callable[[Floats], Floats], columns: int) -> None:
    rng = np.random.default_rng(12)
    recipes = [counts(rng, rate, (seeds, 20))[..., :columns] + 1 for rate in (0.7, 0.6, 0.6)]
    copies = [np.tile(each, (1, 4, 1)) for each in recipes]
    groups = np.tile(np.arange(20), 4)

    def figures(shown: Difference) -> list[float]:
        interval, errors = found(shown.interval), np.ravel(shown.spread.errors() if shown.spread else [])
        return [shown.mean, interval.low, interval.high, shown.p_value, shown.p_as_good, *errors]

    alone, grouped = (
        difference(each, statistic=statistic, groups=known, matters=0.3)
        for each, known in ((recipes, None), (copies, groups))
    )
    assert figures(grouped) == pytest.approx(figures(alone))
    assert (grouped.samples, grouped.groups, grouped.ahead) == (80, 20, 4 * alone.ahead)
    one, other = (score(each[0], statistic, known) for each, known in ((recipes, None), (copies, groups)))
    assert (found(one.interval).low, one.mean) == pytest.approx((found(other.interval).low, other.mean))
    ignored = difference(copies, statistic=statistic)
    assert found(ignored.interval).high - found(ignored.interval).low < figures(grouped)[2] - figures(grouped)[1]


@pytest.mark.parametrize("seeds", [1, 5])
def test_grouped_null_reports_claim_a_difference_in_at_most_one_of_twenty(seeds: int) -> None:
    """All rows: `python -m tests.benchmarks.false_claims --only groups`."""
    grouping = Grouping(groups=sizes_of(8, 64, equal=False), alike=0.3)
    reports = 2000 if seeds > 1 else 100
    limit = 0.05 + 2 * math.sqrt(0.05 * 0.95 / reports)
    assert false_claims(KINDS[0], seeds, grouping, reports, grouping.groups) <= limit
    assert false_claims(KINDS[0], seeds, grouping, reports, None) > 2 * limit, "samples taken for independent"


def test_two_models_are_compared_by_the_swap_test_of_scipy() -> None:
    rng = np.random.default_rng(8)
    ours, theirs = rng.random(9), rng.random(9)
    expected = scipy.stats.permutation_test(
        (ours, theirs), lambda x, y, axis: x.mean(axis=axis) - y.mean(axis=axis), permutation_type="samples",
        vectorized=True, n_resamples=np.inf,
    )  # fmt: skip
    assert difference([ours[None], theirs[None]]).p_value == pytest.approx(expected.pvalue)


def test_random_swaps_give_about_the_p_value_of_the_t_test() -> None:
    rng = np.random.default_rng(9)
    ours, theirs = rng.normal(0.03, 0.1, (1, 200)), rng.normal(0, 0.1, (1, 200))
    expected = scipy.stats.ttest_rel(ours[0], theirs[0]).pvalue
    assert difference([ours, theirs]).p_value == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize(("samples", "verdict"), [(1, "too few samples"), (5, "too few samples"), (6, "better")])
def test_fewer_than_six_samples_show_nothing(seeds: int, samples: int, verdict: str) -> None:
    ours = np.tile(np.linspace(0.8, 0.9, samples), (seeds, 1))
    shown = difference([ours, np.zeros((seeds, samples))])
    assert shown.verdict == verdict
    assert shown.ahead == samples


@pytest.mark.parametrize(("groups", "verdict"), [(5, "too few samples"), (6, "better")])
def test_fewer_than_six_groups_show_nothing(groups: int, verdict: str) -> None:
    shown = difference([np.full((1, 40), 0.8), np.zeros((1, 40))], groups=np.arange(40) % groups)
    assert (shown.verdict, shown.groups) == (verdict, groups)


def test_equal_scores_show_no_difference() -> None:
    for scores in (np.full((1, 10), 0.25), np.full((3, 10), 0.25)):
        shown = difference([scores, scores])
        assert (shown.mean, shown.verdict) == (0, "no difference shown")
        assert shown.interval == Interval(0, 0)


@pytest.mark.parametrize(("higher_is_better", "verdict"), [(True, "better"), (False, "worse")])
def test_lower_is_better_turns_only_the_verdict(higher_is_better: bool, verdict: str) -> None:
    ours, theirs = np.linspace(2, 3, 20)[None], np.linspace(1, 2, 20)[None]
    shown = difference([ours, theirs], higher_is_better=higher_is_better)
    assert shown.mean == pytest.approx(1)
    assert shown.verdict == verdict
    assert (shown.ahead, shown.behind) == ((20, 0) if higher_is_better else (0, 20))


def test_holm_steps_down_and_never_back() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([[0.6, 0.02], [0.9, 0.8]]) == pytest.approx(np.array([[0.6, 0.04], [1.0, 1.0]]))


def test_more_questions_take_more_evidence() -> None:
    rng = np.random.default_rng(11)
    theirs = rng.random((1, 40))
    shown = difference([theirs + rng.normal(0.02, 0.08, 40), theirs])
    assert 0.005 < shown.p_value < 0.05
    assert shown.verdict == "better"
    other = difference([theirs, theirs])
    corrected = as_family([shown] + [other] * 9)[0]
    assert corrected.verdict == "no difference shown"
    assert corrected.adjusted_p == pytest.approx(10 * shown.p_value)
    assert corrected.family == 10
    assert corrected.detectable is not None
    assert shown.detectable is not None
    assert corrected.detectable > shown.detectable


@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_the_detectable_difference_is_found_in_about_80_percent_of_reports(seeds: int) -> None:
    rng, reports = np.random.default_rng(12), 300

    def report(shift: float) -> Difference:
        scores = ious(rng, 2, seeds, 40, between_seeds=0.02 if seeds > 1 else 0)
        return difference([scores[0] + shift, scores[1]], resamples=500)

    promised = float(np.mean([report(0).detectable for _ in range(100)]))
    power = sum(report(promised).verdict == "better" for _ in range(reports)) / reports
    assert 0.68 <= power <= 0.92


def test_seeds_needed() -> None:
    scores = ious(np.random.default_rng(13), 2, 3, 400)
    shown = difference([scores[0] - scores[0].mean() + scores[1].mean() + 0.04, scores[1]])
    needed = shown.seeds_needed()
    assert needed is not None
    assert 3 < needed < 100
    few = difference([scores[0, :, :10] + 0.02, scores[1, :, :10]])
    assert few.seeds_needed() is None
    of_many_questions = as_family([difference([scores[0, :, :8] + 1, scores[1, :, :8]])] * 10)[0]
    assert of_many_questions.verdict == "too few samples", "8 samples cannot answer ten questions, however they agree"
    assert (of_many_questions.detectable, of_many_questions.seeds_needed()) == (None, None)
    once = difference([scores[0, :1], scores[1, :1]])
    assert once.seeds_needed() is None, "one training shows no spread between seeds"


def test_a_score_over_seeds_has_their_spread() -> None:
    trainings = np.array([[0.5] * 10, [0.6] * 10, [0.7] * 10])
    shown = score(trainings)
    assert (shown.mean, shown.between_seeds) == pytest.approx((0.6, 0.1))
    assert shown.by_training == pytest.approx((0.5, 0.6, 0.7))
    low, high = scipy.stats.t.interval(0.95, 2, 0.6, 0.1 / math.sqrt(3))
    assert (found(shown.interval).low, found(shown.interval).high) == pytest.approx((low, high))
    once = score(trainings[:1])
    assert (once.between_seeds, once.interval) == (None, Interval(0.5, 0.5))
    values, unequal = np.linspace(0, 1, 12), np.repeat([0, 1, 2, 3], [8, 2, 1, 1])
    assert score(values[None], groups=unequal).interval == bootstrap(values, groups=unequal)


def test_scores_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="not the same samples"):
        difference([np.zeros((1, 3)), np.zeros((1, 2))])
    with pytest.raises(ValueError, match="at least one sample"):
        difference([np.zeros((1, 0)), np.zeros((1, 0))])
    with pytest.raises(ValueError, match="1 of 3 samples are NaN or infinite"):
        difference([np.array([[0.1, np.nan, 0.2]]), np.zeros((1, 3))])


def test_noncentrality_for_far_critical_values() -> None:
    """Below one degree of freedom scipy's inverse does not end. If both can be computed, they agree."""
    for freedom in (0.41, 0.39):
        critical = float(stdtrit(freedom, 1 - 0.025 / 11))
        found = evidence._noncentrality(freedom, critical)
        draws = np.random.default_rng(0)
        scales = np.sqrt(draws.chisquare(freedom, 200_000) / freedom)
        exceeded = (draws.normal(found, 1, 200_000) / scales) > critical
        assert float(exceeded.mean()) == pytest.approx(evidence.POWER, abs=0.01)
    by_scipy, by_limit = evidence._noncentrality(1, 99.9), evidence._noncentrality(1, 100.1)
    assert by_limit / by_scipy == pytest.approx(100.1 / 99.9, rel=1e-3)


@pytest.mark.parametrize(("samples", "changed", "claimed"), [(200, 0, True), (200, 60, False), (20, 0, False)])
def test_a_model_is_as_good_as_another_if_enough_samples_hardly_differ(
    samples: int, changed: int, claimed: bool
) -> None:
    """Few samples without a change do not show that others have none."""
    scores = (np.arange(samples) % 2).astype(float)
    other = np.where(np.arange(samples) < changed, 1 - scores, scores)
    (answer,) = as_family([difference([scores[None], other[None]], matters=0.05)])
    assert (answer.verdict == "as good") == claimed


def test_how_much_samples_vary_is_that_of_a_model_and_not_of_the_mean_over_seeds() -> None:
    """Two models that are right on opposite halves, and exports that answer alike."""
    one = np.arange(200) % 2.0
    for models in ([one], [one, 1 - one]):
        gap = difference([np.stack(models)] * 2, matters=0.05, paired=True)
        assert 0 < gap.p_as_good < 1e-6


def test_samples_that_all_score_alike_are_no_evidence_that_others_would() -> None:
    zeros, mixed = np.zeros((3, 60)), np.stack([np.arange(60) % 2.0] * 3)
    for ours, theirs in ((zeros, zeros), (mixed, zeros), (zeros, mixed)):
        assert difference([ours, theirs], matters=0.03).p_as_good == 1
    assert difference([mixed, mixed], matters=0.2).p_as_good < 1e-9
