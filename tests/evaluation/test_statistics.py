"""Bootstrap intervals, against scipy and by simulation, and ratios of sums."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from stages.evaluation import statistics
from stages.evaluation.statistics import (
    Interval,
    Statistic,
    bootstrap,
    by_group,
    corpus_f1,
    perplexity,
    sample_mean,
    samples_freedom,
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


@pytest.mark.parametrize(("statistic", "columns"), [(sample_mean, 1), (corpus_f1, 3), (perplexity, 4)])
def test_groups_in_any_order_have_the_statistic_of_their_samples(statistic: Statistic, columns: int) -> None:
    rng = np.random.default_rng(2)
    values, groups = rng.random((2, 30, columns)) + 0.1, rng.integers(0, 7, 30) * 3  # unequal, and not counted from 0
    sums, of_groups = by_group(values, statistic, groups)
    assert sums.shape == (2, len(np.unique(groups)), columns + 1)
    assert of_groups(sums.mean(axis=1)) == pytest.approx(statistic(values.mean(axis=1)))
    assert by_group(values, statistic, None) == (values, statistic)


@pytest.mark.parametrize(("sizes", "freedom"), [((1,) * 9, 8), ((3,) * 9, 8), ((8, 4, 4, 4, 4), 3.5), ((20, 1, 1), 1)])
def test_groups_of_unequal_sizes_have_the_freedom_of_fewer_equal_ones(sizes: tuple[int, ...], freedom: float) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    assert samples_freedom(len(groups), groups) == pytest.approx(freedom)
    assert samples_freedom(9, None) == 8


def test_one_group_has_no_interval() -> None:
    assert bootstrap([0.1, 0.5, 0.9], groups=np.zeros(3, np.int64)) is None


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
