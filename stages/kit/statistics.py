"""Statistics of a report: intervals of scores, tests of differences, and the evidence that a claim would take.

**The score of one model**: a bootstrap interval over the samples, which are redrawn with replacement. It is the
*expanded percentile* interval: percentiles of the redrawn statistics, at levels widened as Student's t widens the
normal interval, because the plain one is too narrow by about sqrt((n - 1) / n), and by the unknown variance on top.
Source: Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69(4), 2015. Chosen over
BCa (Efron, JASA 82, 1987) by simulation. On IoU-like scores (Beta(8, 2), 12 % zeros) a nominal 95 % interval covered
the true mean in this share of 1,500 data sets; below about 20 samples all of them are optimistic:

    samples   expanded    BCa     plain percentile
         10     82.9 %   79.7 %   79.4 %
         20     92.1 %   91.0 %   90.8 %
         50     94.9 %   95.3 %   94.2 %

**The difference of two**, on the same samples. The claim depends on how often each was trained:

- Once each: two models. The swap test: if the two do not differ, either could have produced each completion, so the
  difference is compared with those after swapping the two models' completions sample by sample. All 2^n swaps if they
  are at most 10,000, else as many random ones. Source: Noreen, "Computer-Intensive Methods for Testing Hypotheses",
  1989. It says nothing about the recipes: another seed gives another model.
- Several times: two recipes. Seeds and samples are both drawn by chance. A difference must stand out against both of
  two errors, so that the larger p-value counts, and the wider interval:

  1. between seeds, on these samples: Welch's t test of the trainings' scores (Biometrika 34, 1947);
  2. between seeds + between samples - the rest, which both of them hold, with the degrees of freedom of Satterthwaite
     (Biometrics Bulletin 2, 1946): a quasi F ratio after Clark, "The language-as-fixed-effect fallacy", JVLVB 12, 1973,
     with what both hold subtracted instead of added above the line.

  The second alone claims too much after few seeds: if these happen to agree, it trusts its many samples. The variance
  between samples of a ratio of sums, such as a corpus F1, is that of its jackknife pseudo-values (Tukey, Ann. Math.
  Stat. 29, 1958). A crossed bootstrap draws three seeds from three, which is too narrow: docs/statistics.md compares.

All questions of a report are one family: `holm` corrects for their number (Holm, Scand. J. Stat. 6, 1979).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv, nctdtrinc, stdtr, stdtrit

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""From column means (..., k) to the statistic (...): a mean, or a ratio of sums such as a corpus F1."""

LEVEL = 0.95
"""Share of the data sets in which an interval is to cover the true value."""
POWER = 0.8
"""Share of the reports in which a detectable difference is shown."""
MAX_SEEDS = 100
"""The largest number of trainings that is proposed."""
CHUNK_VALUES = 2_000_000
"""Redrawn values held at once: bounds memory at about 32 MB, whatever the number of samples."""


@dataclass(frozen=True)
class Interval:
    """Both ends belong to the interval; same unit as the score."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def sample_mean(means: Floats) -> Floats:
    """The statistic of a single column: its mean. (..., 1) -> (...)."""
    return means[..., 0]


def corpus_f1(means: Floats) -> Floats:
    """F1 over all samples from the columns (matched, predicted, expected), counts of each sample: twice the matched
    by the predicted and the expected. (..., 3) -> (...), 0 where nothing is predicted and nothing expected.

    A ratio of sums, in which a sample counts by its size; the mean of each sample's F1 is another figure.
    """
    matched, predicted, expected = means[..., 0], means[..., 1], means[..., 2]
    total = predicted + expected
    return np.divide(2 * matched, total, out=np.zeros_like(total), where=total > 0)


def perplexity(means: Floats) -> Floats:
    """Perplexity from the columns (negative log-likelihood in nats, tokens) of each sample: e to the mean per token.
    With several such pairs of columns, one a domain and both 0 in samples of another, the geometric mean over the
    domains, so that each counts the same however many tokens it has. (..., 2 x domains) -> (...); a domain without a
    token does not count, and without any it is 1.

    Source: Jelinek, Mercer, Bahl and Baker, "Perplexity, a measure of the difficulty of speech recognition tasks",
    JASA 62(S1), 1977.
    """
    pairs = means.reshape(*means.shape[:-1], -1, 2)
    nats, tokens = pairs[..., 0], pairs[..., 1]  # (..., domains)
    rates = np.divide(nats, tokens, out=np.zeros_like(nats), where=tokens > 0)
    return np.exp(rates.sum(axis=-1) / np.maximum((tokens > 0).sum(axis=-1), 1))


def figures(key: str, values: Floats, statistic: Statistic = sample_mean) -> dict[str, float]:
    """The statistic of values (n,) or (n, k) as `key`, and with two samples or more its interval: KEY_low, KEY_high."""
    interval = bootstrap(values, statistic)
    ends = {f"{key}_low": interval.low, f"{key}_high": interval.high} if interval else {}
    return {key: float(statistic(np.atleast_1d(values.mean(axis=0)))), **ends}


def bootstrap(
    values: Sequence[float] | Floats, statistic: Statistic = sample_mean, *, resamples: int = 10_000
) -> Interval | None:
    """Interval of a statistic of column means, at `LEVEL`. The same arguments give the same interval, bit for bit.

    values: (n,) or (n, k), one row a sample; statistic: see `Statistic`, finite for every redraw.
    Returns None below two samples. Raises ValueError for NaN or infinite values: missing is not a score.
    """
    columns = _as_columns(values)
    if len(columns) < 2:
        return None
    return _expanded_percentiles(_redraw(columns, statistic, resamples), len(columns))


def _as_columns(values: Sequence[float] | Floats) -> Floats:
    columns = np.asarray(values, dtype=np.float64)
    columns = columns.reshape(len(columns), -1) if columns.size else columns.reshape(len(columns), 1)
    broken = np.flatnonzero(~np.isfinite(columns).all(axis=1))
    if len(broken):
        raise ValueError(f"{len(broken)} of {len(columns)} samples are NaN or infinite, the first at row {broken[0]}")
    return columns


def _redraw(columns: Floats, statistic: Statistic, resamples: int) -> Floats:
    """The statistic of every redraw of the n rows: (n, k) -> (resamples,)."""
    num_samples = len(columns)
    rng = np.random.default_rng(0)
    per_chunk = max(1, CHUNK_VALUES // columns.size)
    drawn = []
    for start in range(0, resamples, per_chunk):
        rows = rng.integers(0, num_samples, size=(min(per_chunk, resamples - start), num_samples))
        drawn.append(statistic(columns[rows].mean(axis=1)))  # (chunk, n, k) -> (chunk, k) -> (chunk,)
    return np.concatenate(drawn)


def _expanded_percentiles(redrawn: Floats, num_samples: int) -> Interval:
    freedom = num_samples - 1
    tail = NormalDist().cdf(-math.sqrt(num_samples / freedom) * stdtrit(freedom, (1 + LEVEL) / 2))
    low, high = np.quantile(redrawn, [tail, 1 - tail])
    return Interval(float(low), float(high))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The variance of a score, or of a difference of scores, by where it comes from."""

    seeds: tuple[tuple[float, int], ...]
    """(variance of one training's score, number of trainings) of each recipe that was trained more than once."""
    samples: float
    """Variance of the score over draws of all samples, as observed."""
    rest: float
    """The part of `samples` that comes from neither seeds nor samples; the variance between seeds has it too."""
    num_samples: int

    def errors(self, num_seeds: int | None = None) -> list[tuple[float, float]]:
        """(variance, degrees of freedom) of the score over draws of seeds, and over draws of both; if every
        recipe was trained once, only over draws of samples.

        num_seeds: trainings of each recipe; default: as many as there are.
        """
        seeds = [(variance / (num_seeds or count), (num_seeds or count) - 1) for variance, count in self.seeds]
        between_seeds = sum(variance for variance, _ in seeds)
        parts = [*seeds, (self.samples, self.num_samples - 1)]
        both = _satterthwaite(between_seeds + self.samples - self.rest, parts)
        if not seeds:
            return [both]
        variance, freedom = _satterthwaite(between_seeds, seeds)
        if len({each for _, each in seeds}) > 1:  # of unequal numbers the smaller may be all that counts
            freedom = min(freedom, *(each for _, each in seeds))
        return [(variance, freedom), both]

    def half_width(self) -> float:
        """Half the width of the interval around the score."""
        return max(
            float(stdtrit(freedom, (1 + LEVEL) / 2)) * math.sqrt(variance) for variance, freedom in self.errors()
        )

    def p_value(self, mean: float) -> float:
        """Two-sided, of a score of 0."""
        return max(
            float(2 * stdtr(freedom, -abs(mean) / math.sqrt(variance))) if variance else float(mean == 0)
            for variance, freedom in self.errors()
        )

    def detectable(self, alpha: float, num_seeds: int | None = None) -> float:
        """The smallest true difference that is found at `alpha` in some 80 % of reports (`POWER`), by the noncentral t
        distribution. Rough, as the variance that three seeds show is."""
        sizes = []
        for variance, freedom in self.errors(num_seeds):
            finite = min(freedom, 1e6)
            sizes.append(_noncentrality(finite, float(stdtrit(finite, 1 - alpha / 2))) * math.sqrt(variance))
        return max(sizes)


def _noncentrality(freedom: float, critical: float) -> float:
    """Noncentrality of the t distribution that exceeds the critical value in `POWER` of all draws."""
    if critical > 100:  # its numerator's own spread of 1 hardly counts, and scipy's inverse may take hours
        return critical * math.sqrt(2 * float(gammaincinv(freedom / 2, POWER)) / freedom)
    return float(nctdtrinc(freedom, 1 - POWER, critical))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Ours minus theirs on the same samples; positive where ours is higher."""

    mean: float
    interval: Interval | None
    """At `LEVEL`, not corrected for other questions. None below two samples."""
    p_value: float
    """Two-sided: the chance of a difference at least as large if there is none. Not corrected for other questions."""
    adjusted_p: float
    """p_value, corrected for the number of questions (`holm`)."""
    family: int = 1
    """Number of questions that adjusted_p is corrected for."""
    samples: int
    trainings: tuple[int, int] = (1, 1)
    """Number of ours and of theirs. If both are 1, models are compared, not recipes."""
    spread: Spread | None
    """None below two samples."""
    ahead: int
    """Samples on which every model of ours is better than every model of theirs."""
    behind: int
    win_rate: float
    """Share of the pairs of a model of ours and a model of theirs in which ours scores better, a tie being half a
    pair: an estimate of P(ours > theirs) for one training each (Bouthillier et al., MLSys 2021)."""
    higher_is_better: bool = True

    @property
    def of_recipes(self) -> bool:
        return self.trainings != (1, 1)

    @property
    def verdict(self) -> str:
        """ "better", "worse", "no difference shown", or "too few samples".

        The exact sign test decides on too few: if nothing differs, all n signs agree with a chance of 2 / 2^n, so below
        6 samples not even unanimity is evidence at 95 %, and below 9 it is none for ten questions.
        """
        if self._too_few:
            return "too few samples"
        if self.adjusted_p > 1 - LEVEL:
            return "no difference shown"
        return "better" if (self.mean > 0) == self.higher_is_better else "worse"

    @property
    def _too_few(self) -> bool:
        return least_p(self.samples) * self.family > 1 - LEVEL

    @property
    def detectable(self) -> float | None:
        """The smallest difference that this design shows in some 80 % of reports, Holm's correction at its hardest.

        None if the samples are too few to show any.
        """
        return self.spread.detectable((1 - LEVEL) / self.family) if self.spread and not self._too_few else None

    def seeds_needed(self) -> int | None:
        """Trainings of each recipe that show a difference as large as this one in some 80 % of reports.

        None if no number up to `MAX_SEEDS` does on these samples, or if the spread between seeds is not known.
        """
        if not self.spread or not self.spread.seeds or self._too_few:
            return None
        alpha = (1 - LEVEL) / self.family
        enough = (num for num in range(2, MAX_SEEDS + 1) if self.spread.detectable(alpha, num) <= abs(self.mean))
        return next(enough, None)


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of a recipe: the mean over its trainings."""

    mean: float
    interval: Interval | None
    """Over seeds and samples; with one training only over samples. None below two samples."""
    by_training: tuple[float, ...]
    between_seeds: float | None
    """Standard deviation of one training's score; None with one."""


def score(trainings: Floats, statistic: Statistic = sample_mean) -> Score:
    """trainings: (trainings, samples) or (trainings, samples, columns). Errors as in `difference`."""
    trained = _as_trainings(trainings)
    by_training = statistic(trained.mean(axis=1))
    if len(trained) == 1:
        interval, deviation = bootstrap(trained[0], statistic), None
    else:
        spread = _spread([trained], statistic)
        interval = _around(float(by_training.mean()), spread.half_width()) if spread else None
        deviation = float(by_training.std(ddof=1))
    return Score(
        mean=float(by_training.mean()),
        interval=interval,
        by_training=tuple(map(float, by_training)),
        between_seeds=deviation,
    )


def difference(
    ours: Floats,
    theirs: Floats,
    *,
    statistic: Statistic = sample_mean,
    higher_is_better: bool = True,
    resamples: int = 10_000,
) -> Difference:
    """Ours minus theirs, as a family of one question.

    ours, theirs: (trainings, samples) or (trainings, samples, columns); sample i is the same in both. One training
        beside several is a model that no seed changes, such as an untrained base.
    higher_is_better: of the statistic; the difference keeps its sign.
    resamples: swaps and redraws of the samples of two models.
    Raises ValueError if the samples differ in number, if there are none, and for values that are not finite.
    The same arguments give the same result, bit for bit.
    """
    our_scores, their_scores = _as_trainings(ours), _as_trainings(theirs)
    if our_scores.shape[1:] != their_scores.shape[1:]:
        raise ValueError(f"not the same samples: ours are {our_scores.shape[1:]}, theirs {their_scores.shape[1:]}")
    our_values, their_values = statistic(our_scores.mean(axis=1)), statistic(their_scores.mean(axis=1))
    mean = float(our_values.mean() - their_values.mean())
    spread = _spread([our_scores, their_scores], statistic)
    if len(our_scores) == len(their_scores) == 1:
        p_value = _swap_test(our_scores[0], their_scores[0], statistic, resamples)
        interval = _bootstrapped(our_scores[0], their_scores[0], statistic, resamples)
    else:
        p_value = spread.p_value(mean) if spread else 1.0
        interval = _around(mean, spread.half_width()) if spread else None
    p_value = max(p_value, least_p(our_scores.shape[1]))
    sign = 1 if higher_is_better else -1
    by_sample = sign * (statistic(our_scores)[:, None] - statistic(their_scores)[None])  # (ours, theirs, samples)
    by_pair = sign * (our_values[:, None] - their_values[None])  # (ours, theirs)
    return Difference(
        mean=mean,
        interval=interval,
        p_value=p_value,
        adjusted_p=p_value,
        samples=our_scores.shape[1],
        trainings=(len(our_scores), len(their_scores)),
        spread=spread,
        ahead=int((by_sample > 0).all(axis=(0, 1)).sum()),
        behind=int((by_sample < 0).all(axis=(0, 1)).sum()),
        win_rate=float((by_pair > 0).mean() + (by_pair == 0).mean() / 2),
        higher_is_better=higher_is_better,
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values, corrected for their number: at most a share of `alpha` of the families in which nothing differs has
    one below `alpha`, however they depend on each other."""
    order = np.argsort(p_values)
    steps = [p_values[index] * (len(p_values) - rank) for rank, index in enumerate(order)]
    adjusted = dict(zip(order.tolist(), itertools.accumulate(steps, max), strict=True))
    return [min(1.0, adjusted[index]) for index in range(len(p_values))]


def as_family(differences: Sequence[Difference]) -> list[Difference]:
    """The differences, each corrected for their number."""
    adjusted = holm([found.p_value for found in differences])
    return [
        replace(found, adjusted_p=p_value, family=len(differences))
        for found, p_value in zip(differences, adjusted, strict=True)
    ]


def least_p(num_samples: int) -> float:
    """The smallest p-value that num_samples can give, by the exact sign test if all of them agree."""
    return min(1.0, 2 * 0.5**num_samples)


def _as_trainings(values: Floats) -> Floats:
    """Scores as (trainings, samples, columns)."""
    trained = np.asarray(values, dtype=np.float64)
    trained = trained.reshape(*trained.shape[:2], -1) if trained.ndim == 3 else trained[..., None]
    if trained.ndim != 3 or not trained.shape[0] or not trained.shape[1]:
        raise ValueError(f"expected scores of at least one training on at least one sample, got {np.shape(values)}")
    if broken := int((~np.isfinite(trained)).any(axis=(0, 2)).sum()):
        raise ValueError(f"{broken} of {trained.shape[1]} samples are NaN or infinite")
    return trained


def _spread(recipes: Sequence[Floats], statistic: Statistic) -> Spread | None:
    """Spread of the score of one recipe, or of the difference of two; each (trainings, samples, columns)."""
    num_samples = recipes[0].shape[1]
    if num_samples < 2:
        return None
    seeds, by_sample, rest = [], np.zeros(num_samples), 0.0
    for sign, trained in zip((1, -1), recipes, strict=False):
        values = _pseudo_values(trained, statistic)  # (trainings, samples)
        by_sample += sign * values.mean(axis=0)
        if (count := len(trained)) > 1:
            seeds.append((float(statistic(trained.mean(axis=1)).var(ddof=1)), count))
            residuals = values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean()
            rest += float((residuals**2).sum()) / ((count - 1) * (num_samples - 1)) / (count * num_samples)
    between_seeds = sum(variance / count for variance, count in seeds)
    between_samples = float(by_sample.var(ddof=1)) / num_samples
    # No estimate of the rest makes the sum of both less than either of them.
    rest = min(rest, between_seeds, between_samples)
    return Spread(seeds=tuple(seeds), samples=between_samples, rest=rest, num_samples=num_samples)


def _satterthwaite(total: float, parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(total, its degrees of freedom) of a sum of variances, each with its own; one without variance never varies."""
    squares = sum(variance**2 / freedom for variance, freedom in parts)
    return total, total**2 / squares if squares else math.inf


def _pseudo_values(trained: Floats, statistic: Statistic) -> Floats:
    """Jackknife pseudo-value of each sample: (trainings, samples, columns) -> (trainings, samples)."""
    num_samples = trained.shape[1]
    means = trained.mean(axis=1, keepdims=True)
    without = (num_samples * means - trained) / (num_samples - 1)
    return num_samples * statistic(means) - (num_samples - 1) * statistic(without)


def _swap_test(ours: Floats, theirs: Floats, statistic: Statistic, swaps: int) -> float:
    """Two-sided p-value of two models' scores, each (samples, columns)."""
    num_samples = len(ours)
    if exact := 2**num_samples <= swaps:
        swapped = (np.arange(2**num_samples)[:, None] >> np.arange(num_samples)) & 1
    else:
        swapped = np.random.default_rng(0).integers(0, 2, (swaps, num_samples), dtype=np.int8)
    change = np.concatenate([part @ (theirs - ours) for part in np.array_split(swapped, 10)]) / num_samples
    after = statistic(ours.mean(axis=0) + change) - statistic(theirs.mean(axis=0) - change)
    found = abs(statistic(ours.mean(axis=0)) - statistic(theirs.mean(axis=0)))
    at_least = int((np.abs(after) >= found - 1e-12 * max(1.0, float(found))).sum())  # rounding must not break a tie
    return at_least / len(after) if exact else (at_least + 1) / (len(after) + 1)


def _bootstrapped(ours: Floats, theirs: Floats, statistic: Statistic, resamples: int) -> Interval | None:
    """Interval of the difference of two models, each (samples, columns), redrawing the *samples* of both alike, so that
    differences in difficulty cancel out."""
    width = ours.shape[1]

    def ours_minus_theirs(means: Floats) -> Floats:  # (..., 2 columns) -> (...)
        return statistic(means[..., :width]) - statistic(means[..., width:])

    return bootstrap(np.concatenate([ours, theirs], axis=1), ours_minus_theirs, resamples=resamples)


def _around(mean: float, half_width: float) -> Interval:
    return Interval(mean - half_width, mean + half_width)
