from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from stages.kit.statistics import intervals
from stages.kit.statistics.intervals import (
    Interval,
    bootstrap,
    corpus_f1,
    figures,
    perplexity,
)


def found(interval: Interval | None) -> Interval:
    assert interval is not None
    return interval


def width(interval: Interval | None) -> float:
    return found(interval).high - found(interval).low


def iou_like(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Mostly good boxes and 12 % misses; the mean is 0.88 x 0.8."""
    scores = rng.beta(8, 2, num_samples)
    scores[rng.random(num_samples) < 0.12] = 0
    return scores


def test_95_percent_interval_covers_the_true_mean_in_about_95_percent_of_data_sets() -> None:
    rng, truth, trials = np.random.default_rng(1), 0.88 * 0.8, 500
    covered = sum(truth in found(bootstrap(iou_like(rng, 50), resamples=1000)) for _ in range(trials))
    assert 0.925 <= covered / trials <= 0.975  # two and a half standard errors of the simulation


def test_few_samples_widen_the_interval_as_students_t_does() -> None:
    values = np.random.default_rng(4).normal(size=8)
    plain = scipy.stats.bootstrap([values], np.mean, method="percentile", rng=np.random.default_rng(0))
    ratio = width(bootstrap(values)) / np.diff(plain.confidence_interval)[0]
    expected = scipy.stats.t.ppf(0.975, 7) / scipy.stats.norm.ppf(0.975) * np.sqrt(8 / 7)
    assert ratio == pytest.approx(expected, rel=0.08)


def test_many_samples_give_the_plain_percentile_interval() -> None:
    values = iou_like(np.random.default_rng(5), 2000)
    plain = scipy.stats.bootstrap([values], np.mean, method="percentile", rng=np.random.default_rng(0))
    interval = found(bootstrap(values))
    assert (interval.low, interval.high) == pytest.approx(tuple(plain.confidence_interval), abs=8e-4)


def test_one_sample_has_no_interval() -> None:
    assert bootstrap([0.9]) is None
    assert bootstrap([]) is None


def test_equal_values_give_an_interval_of_no_width() -> None:
    assert bootstrap([0.25] * 10) == Interval(0.25, 0.25)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_refused_not_dropped(broken: float) -> None:
    with pytest.raises(ValueError, match="1 of 3 samples are NaN or infinite, the first at row 1"):
        bootstrap([0.1, broken, 0.2])


def test_same_arguments_give_the_same_interval() -> None:
    values = iou_like(np.random.default_rng(8), 40)
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap(values) != bootstrap(values, resamples=9_999)


def test_chunks_bound_the_memory_and_agree_with_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iou_like(np.random.default_rng(9), 40)
    whole = found(bootstrap(values))
    monkeypatch.setattr(intervals, "CHUNK_VALUES", 500)
    pieces = found(bootstrap(values))
    assert (pieces.low, pieces.high) == pytest.approx((whole.low, whole.high), abs=0.01)


def test_figures_of_a_score_are_its_mean_and_its_interval() -> None:
    values = iou_like(np.random.default_rng(11), 40)
    interval = found(bootstrap(values))
    ends = {"iou_low": interval.low, "iou_high": interval.high}
    assert figures("iou", values) == {"iou": float(values.mean()), **ends}
    assert figures("iou", values[:1]) == {"iou": float(values[0])}


def test_a_ratio_of_sums_is_redrawn_as_a_ratio_of_sums() -> None:
    rng = np.random.default_rng(10)
    gold = rng.integers(5, 40, 80)
    matched = np.floor(gold * rng.uniform(0.6, 1, 80))
    columns = np.stack([matched, gold, gold], axis=1)  # matched, predicted, gold triples of each sentence

    def f1(means: np.ndarray) -> np.ndarray:
        return 2 * means[..., 0] / (means[..., 1] + means[..., 2])

    interval = found(bootstrap(columns, f1))
    assert matched.sum() / gold.sum() in interval


@given(arrays(np.float64, st.integers(2, 30), elements=st.floats(0, 1)))
@settings(max_examples=50, deadline=None)
def test_interval_lies_within_the_values_and_is_ordered(values: np.ndarray) -> None:
    interval = found(bootstrap(values, resamples=200))
    assert values.min() - 1e-12 <= interval.low <= interval.high <= values.max() + 1e-12


def corpus(rng: np.random.Generator, num_samples: int, rate: float) -> np.ndarray:
    """(n, 3): matched, predicted and expected counts of sentences of quite different length."""
    expected = rng.geometric(0.1, num_samples) + 1
    predicted = rng.poisson(expected) + 1
    return np.stack([rng.binomial(np.minimum(predicted, expected), rate), predicted, expected], axis=1).astype(float)


def test_a_corpus_f1_is_a_ratio_of_sums_and_not_a_mean_of_ratios() -> None:
    counts = np.array([[1.0, 1, 1], [0, 9, 9], [0, 0, 2]])
    assert corpus_f1(counts.mean(axis=0)) == pytest.approx(2 * 1 / (10 + 12))
    assert corpus_f1(np.stack([counts, counts]).mean(axis=1)).shape == (2,)
    assert corpus_f1(np.zeros((2, 3))).tolist() == [0, 0]


def test_perplexity_is_of_the_corpus_and_each_domain_counts_the_same() -> None:
    samples = np.array([[2.0, 1, 0, 0], [2, 3, 0, 0], [0, 0, 60, 20]])  # nats and tokens of two domains
    one, other = np.exp(4 / 4), np.exp(60 / 20)
    assert perplexity(samples[:2, :2].mean(axis=0)) == pytest.approx(one)
    assert perplexity(samples.mean(axis=0)) == pytest.approx(np.sqrt(one * other))
    assert perplexity(samples[:2].mean(axis=0)) == pytest.approx(one), "a domain without tokens must not count"
    assert perplexity(np.zeros((2, 4))).tolist() == [1, 1]
    assert perplexity(np.stack([samples, samples]).mean(axis=1)).shape == (2,)
