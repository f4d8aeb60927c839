"""Intervals, tests and corrections, against scipy and by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import stdtrit

from stages.kit import statistics
from stages.kit.statistics import (
    Difference,
    Floats,
    Interval,
    as_family,
    bootstrap,
    corpus_f1,
    difference,
    holm,
    perplexity,
    score,
)


def ious(rng: np.random.Generator, recipes: int, seeds: int, samples: int, *, between_seeds: float = 0.04) -> Floats:
    """(recipes, seeds, samples) of recipes that are equally good, on samples that are hard or easy for all."""
    hardness = rng.normal(0.6, 0.15, samples)
    taste = rng.normal(0, 0.08, (recipes, 1, samples))  # which samples a recipe happens to be good at
    luck = rng.normal(0, between_seeds, (recipes, seeds, 1))
    return np.clip(hardness + taste + luck + rng.normal(0, 0.1, (recipes, seeds, samples)), 0, 1)


def counts(rng: np.random.Generator, rate: float, shape: tuple[int, ...]) -> Floats:
    """(..., 3): matched, predicted and expected counts of sentences of quite different length."""
    expected = rng.geometric(0.1, shape) + 1
    predicted = rng.poisson(expected) + 1
    matched = rng.binomial(np.minimum(predicted, expected), rate)
    return np.stack([matched, predicted, expected], axis=-1).astype(np.float64)


def found(interval: Interval | None) -> Interval:
    assert interval is not None
    return interval


@pytest.mark.parametrize("seeds", [1, 3])
def test_null_reports_claim_a_difference_in_at_most_one_of_twenty(seeds: int) -> None:
    rng, reports, claims = np.random.default_rng(seeds), 300, 0
    for _ in range(reports):
        # The luck of one training is a true difference between two models.
        scores = ious(rng, 4, seeds, 30, between_seeds=0.04 if seeds > 1 else 0)
        pairs = [difference(scores[one], scores[other], resamples=500) for one in range(4) for other in range(one)]
        claims += any(pair.verdict in ("better", "worse") for pair in as_family(pairs))
    assert claims / reports <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / reports)


def test_null_reports_with_unequal_seeds_claim_no_more() -> None:
    rng, reports, claims = np.random.default_rng(1), 300, 0
    for _ in range(reports):
        few, many = ious(rng, 2, 2, 60, between_seeds=0.06), ious(rng, 2, 5, 60, between_seeds=0.01)
        pairs = [difference(ours, theirs) for ours in few for theirs in many]
        claims += any(pair.verdict in ("better", "worse") for pair in as_family(pairs))
    assert claims / reports <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / reports)


def test_the_luck_of_a_training_is_no_evidence_for_a_recipe() -> None:
    rng = np.random.default_rng(3)
    lucky, unlucky = ious(rng, 1, 3, 100)[0] + [[0.06], [0.0], [0.03]], ious(rng, 1, 3, 100)[0]
    models = difference(lucky[:1], unlucky[:1])
    assert (models.verdict, models.of_recipes) == ("better", False)
    assert difference(lucky, unlucky).verdict == "no difference shown"


def test_a_true_difference_between_recipes_is_found() -> None:
    scores = ious(np.random.default_rng(4), 2, 5, 100, between_seeds=0.01)
    shown = difference(scores[0] + 0.1, scores[1])
    assert shown.verdict == "better"
    assert 0.1 in found(shown.interval)
    assert (shown.win_rate, shown.trainings, shown.samples) == (1.0, (5, 5), 100)


def test_without_spread_between_samples_it_is_welchs_t_test() -> None:
    rng = np.random.default_rng(5)
    ours, theirs = rng.normal(0.7, 0.02, 4), rng.normal(0.6, 0.05, 4)
    shown = difference(np.repeat(ours[:, None], 20, 1), np.repeat(theirs[:, None], 20, 1))
    expected = scipy.stats.ttest_ind(ours, theirs, equal_var=False)
    assert shown.p_value == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval(0.95)
    assert (found(shown.interval).low, found(shown.interval).high) == pytest.approx((interval.low, interval.high))


def test_one_training_beside_several_is_a_fixed_model() -> None:
    ours = np.repeat(np.array([0.70, 0.74, 0.72])[:, None], 20, 1)
    shown = difference(ours, np.full((1, 20), 0.5))
    assert shown.p_value == pytest.approx(scipy.stats.ttest_1samp(ours[:, 0], 0.5).pvalue)
    assert shown.of_recipes


def test_many_samples_do_not_make_up_for_few_seeds_that_agree() -> None:
    """The quasi F ratio alone would trust the 500 samples."""
    rng = np.random.default_rng(6)
    base = rng.normal(0.6, 0.1, 500)
    ours = np.stack([base + 0.02 + rng.normal(0, 0.1, 500) for _ in range(2)])
    theirs = np.stack([base + rng.normal(0, 0.1, 500) for _ in range(2)])
    ours -= (ours.mean(axis=1) - ours.mean())[:, None] * 0.9  # two trainings that happen to score alike
    theirs -= (theirs.mean(axis=1) - theirs.mean())[:, None] * 0.9
    shown = difference(ours, theirs)
    assert shown.spread is not None
    seeds_alone, both = shown.spread.errors()
    assert seeds_alone[1] <= 2 < both[1]
    assert found(shown.interval).high - shown.mean == pytest.approx(shown.spread.half_width())


@pytest.mark.parametrize("statistic", [corpus_f1, perplexity])
def test_ratios_of_sums_cover_the_true_difference(statistic: Callable[[Floats], Floats]) -> None:
    rng, trials, covered = np.random.default_rng(7), 300, 0
    columns = 3 if statistic is corpus_f1 else 2  # matched, predicted, expected; or nats, tokens

    def draw(rate: float, shape: tuple[int, ...]) -> Floats:
        return counts(rng, rate, shape)[..., :columns] + (0 if columns == 3 else [0, 1])

    truth = float(statistic(draw(0.7, (200_000,)).mean(axis=0)) - statistic(draw(0.6, (200_000,)).mean(axis=0)))
    for _ in range(trials):
        covered += truth in found(difference(draw(0.7, (3, 60)), draw(0.6, (3, 60)), statistic=statistic).interval)
    assert covered / trials >= 0.93


def test_two_models_are_compared_by_the_swap_test_of_scipy() -> None:
    rng = np.random.default_rng(8)
    ours, theirs = rng.random(9), rng.random(9)
    expected = scipy.stats.permutation_test(
        (ours, theirs), lambda x, y, axis: x.mean(axis=axis) - y.mean(axis=axis), permutation_type="samples",
        vectorized=True, n_resamples=np.inf,
    )  # fmt: skip
    assert difference(ours[None], theirs[None]).p_value == pytest.approx(expected.pvalue)


def test_random_swaps_give_about_the_p_value_of_the_t_test() -> None:
    rng = np.random.default_rng(9)
    ours, theirs = rng.normal(0.03, 0.1, (1, 200)), rng.normal(0, 0.1, (1, 200))
    expected = scipy.stats.ttest_rel(ours[0], theirs[0]).pvalue
    assert difference(ours, theirs).p_value == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize(("samples", "verdict"), [(1, "too few samples"), (5, "too few samples"), (6, "better")])
def test_fewer_than_six_samples_show_nothing(seeds: int, samples: int, verdict: str) -> None:
    ours = np.tile(np.linspace(0.8, 0.9, samples), (seeds, 1))
    shown = difference(ours, np.zeros((seeds, samples)))
    assert shown.verdict == verdict
    assert shown.ahead == samples


def test_equal_scores_show_no_difference() -> None:
    for scores in (np.full((1, 10), 0.25), np.full((3, 10), 0.25)):
        shown = difference(scores, scores)
        assert (shown.mean, shown.verdict, shown.win_rate) == (0, "no difference shown", 0.5)
        assert shown.interval == Interval(0, 0)


@pytest.mark.parametrize(("higher_is_better", "verdict"), [(True, "better"), (False, "worse")])
def test_lower_is_better_turns_only_the_verdict(higher_is_better: bool, verdict: str) -> None:
    ours, theirs = np.linspace(2, 3, 20)[None], np.linspace(1, 2, 20)[None]
    shown = difference(ours, theirs, higher_is_better=higher_is_better)
    assert shown.mean == pytest.approx(1)
    assert shown.verdict == verdict
    assert (shown.ahead, shown.behind) == ((20, 0) if higher_is_better else (0, 20))


def test_holm_steps_down_and_never_back() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.02]) == pytest.approx([0.6, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_more_questions_take_more_evidence() -> None:
    rng = np.random.default_rng(11)
    theirs = rng.random((1, 40))
    shown = difference(theirs + rng.normal(0.02, 0.08, 40), theirs)
    assert 0.005 < shown.p_value < 0.05
    assert shown.verdict == "better"
    other = difference(theirs, theirs)
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
        return difference(scores[0] + shift, scores[1], resamples=500)

    promised = float(np.mean([report(0).detectable for _ in range(100)]))
    power = sum(report(promised).verdict == "better" for _ in range(reports)) / reports
    assert 0.68 <= power <= 0.92


def test_seeds_needed() -> None:
    scores = ious(np.random.default_rng(13), 2, 3, 400)
    shown = difference(scores[0] - scores[0].mean() + scores[1].mean() + 0.04, scores[1])
    needed = shown.seeds_needed()
    assert needed is not None
    assert 3 < needed < 100
    few = difference(scores[0, :, :10] + 0.02, scores[1, :, :10])
    assert few.seeds_needed() is None
    of_many_questions = as_family([difference(scores[0, :, :8] + 1, scores[1, :, :8])] * 10)[0]
    assert of_many_questions.verdict == "too few samples", "8 samples cannot answer ten questions, however they agree"
    assert (of_many_questions.detectable, of_many_questions.seeds_needed()) == (None, None)
    assert difference(scores[0, :1], scores[1, :1]).seeds_needed() is None, "one training shows no spread between seeds"


def test_a_score_over_seeds_has_their_spread() -> None:
    trainings = np.array([[0.5] * 10, [0.6] * 10, [0.7] * 10])
    shown = score(trainings)
    assert (shown.mean, shown.between_seeds) == pytest.approx((0.6, 0.1))
    assert shown.by_training == pytest.approx((0.5, 0.6, 0.7))
    low, high = scipy.stats.t.interval(0.95, 2, 0.6, 0.1 / math.sqrt(3))
    assert (found(shown.interval).low, found(shown.interval).high) == pytest.approx((low, high))
    once = score(trainings[:1])
    assert (once.between_seeds, once.interval) == (None, Interval(0.5, 0.5))


def test_scores_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="not the same samples"):
        difference(np.zeros((1, 3)), np.zeros((1, 2)))
    with pytest.raises(ValueError, match="at least one sample"):
        difference(np.zeros((1, 0)), np.zeros((1, 0)))
    with pytest.raises(ValueError, match="1 of 3 samples are NaN or infinite"):
        difference(np.array([[0.1, np.nan, 0.2]]), np.zeros((1, 3)))


def test_noncentrality_for_far_critical_values() -> None:
    """Below one degree of freedom scipy's inverse does not end. If both can be computed, they agree."""
    for freedom in (0.41, 0.39):
        critical = float(stdtrit(freedom, 1 - 0.025 / 11))
        found = statistics._noncentrality(freedom, critical)
        draws = np.random.default_rng(0)
        scales = np.sqrt(draws.chisquare(freedom, 200_000) / freedom)
        exceeded = (draws.normal(found, 1, 200_000) / scales) > critical
        assert float(exceeded.mean()) == pytest.approx(statistics.POWER, abs=0.01)
    by_scipy, by_limit = statistics._noncentrality(1, 99.9), statistics._noncentrality(1, 100.1)
    assert by_limit / by_scipy == pytest.approx(100.1 / 99.9, rel=1e-3)


def width(interval: Interval | None) -> float:
    return found(interval).high - found(interval).low


def iou_like(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Mostly good boxes and 12 % misses; the mean is 0.88 x 0.8."""
    scores = rng.beta(8, 2, num_samples)
    scores[rng.random(num_samples) < 0.12] = 0
    return scores


def test_the_interval_covers_the_true_mean_in_about_95_percent_of_data_sets() -> None:
    rng, truth, trials = np.random.default_rng(1), 0.88 * 0.8, 500
    covered = sum(truth in found(bootstrap(iou_like(rng, 50), resamples=1000)) for _ in range(trials))
    assert 0.925 <= covered / trials <= 0.975  # two and a half standard errors of the simulation


def test_few_samples_widen_the_interval_as_students_t_does() -> None:
    values = np.random.default_rng(4).normal(size=8)
    plain = scipy.stats.bootstrap([values], np.mean, method="percentile", rng=np.random.default_rng(0))
    ratio = width(bootstrap(values)) / np.diff(plain.confidence_interval)[0]
    expected = scipy.stats.t.ppf(0.975, 7) / scipy.stats.norm.ppf(0.975) * np.sqrt(8 / 7)
    assert ratio == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_missing_values_are_refused(broken: float) -> None:
    with pytest.raises(ValueError, match="1 of 3 samples are NaN or infinite, the first at row 1"):
        bootstrap([0.1, broken, 0.2])


def test_chunks_bound_the_memory_and_agree_with_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iou_like(np.random.default_rng(9), 40)
    whole = found(bootstrap(values))
    monkeypatch.setattr(statistics, "CHUNK_VALUES", 500)
    pieces = found(bootstrap(values))
    assert (pieces.low, pieces.high) == pytest.approx((whole.low, whole.high), abs=0.01)


@given(arrays(np.float64, st.integers(2, 30), elements=st.floats(0, 1)))
@settings(max_examples=50, deadline=None)
def test_the_interval_is_ordered_and_within_the_values(values: np.ndarray) -> None:
    interval = found(bootstrap(values, resamples=200))
    assert values.min() - 1e-12 <= interval.low <= interval.high <= values.max() + 1e-12


def test_a_corpus_f1_is_a_ratio_of_sums_and_not_a_mean_of_ratios() -> None:
    counts = np.array([[1.0, 1, 1], [0, 9, 9], [0, 0, 2]])
    assert corpus_f1(counts.mean(axis=0)) == pytest.approx(2 * 1 / (10 + 12))
    assert corpus_f1(np.stack([counts, counts]).mean(axis=1)).shape == (2,)
    assert corpus_f1(np.zeros((2, 3))).tolist() == [0, 0]


def test_perplexity_counts_each_domain_the_same() -> None:
    samples = np.array([[2.0, 1, 0, 0], [2, 3, 0, 0], [0, 0, 60, 20]])  # nats and tokens of two domains
    one, other = np.exp(4 / 4), np.exp(60 / 20)
    assert perplexity(samples[:2, :2].mean(axis=0)) == pytest.approx(one)
    assert perplexity(samples.mean(axis=0)) == pytest.approx(np.sqrt(one * other))
    assert perplexity(samples[:2].mean(axis=0)) == pytest.approx(one), "a domain without tokens must not count"
    assert perplexity(np.zeros((2, 4))).tolist() == [1, 1]
    assert perplexity(np.stack([samples, samples]).mean(axis=1)).shape == (2,)
