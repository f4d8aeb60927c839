"""Tests of differences between models or recipes, and the evidence that a claim would take.

**Two models** (each trained once), on the same samples: the swap test. If they do not differ, either could have
produced each completion, so the difference is compared with those after swapping the two models' completions sample by
sample. All 2^n swaps if they are at most 10,000, else as many random ones (Noreen, "Computer-Intensive Methods for
Testing Hypotheses", 1989). It says nothing about the recipes: another seed gives another model.

**Two recipes** (trained several times): seeds and samples are both drawn by chance. A difference must stand out against
both of two errors, so that the larger p-value counts, and the wider interval:

1. between seeds, on these samples: a t test of the trainings' scores;
2. between seeds + between samples - the rest, which both of them hold, with the degrees of freedom of Satterthwaite
   (Biometrics Bulletin 2, 1946): a quasi F ratio after Clark, "The language-as-fixed-effect fallacy", JVLVB 12, 1973,
   with what both hold subtracted instead of added above the line.

The second alone claims too much after few seeds: if these happen to agree, it trusts its many samples. The variance
between samples of a ratio of sums, such as a corpus F1, is that of its jackknife pseudo-values (Tukey, Ann. Math. Stat.
29, 1958).

An export is made from one training of its recipe: the differences of the pairs are tested as the scores of one recipe.

**The spread between seeds**: three trainings say little about it, and four recipes of three say more. From
`FEWEST_TO_SHARE` trainings of each on, the recipes of a report pool it (`pool_variances`). Below that
nothing is pooled: two trainings that failed alike look steady.

**A family**: all questions of a report. Models: Holm's method (Scand. J. Stat. 6, 1979). Recipes: closed testing
(Marcus, Peritz, Gabriel, Biometrika 63, 1976), which knows which differences can be absent together (Shaffer, JASA 81,
1986): two equalities make a third. A question is decided if every set of equalities that has it, and can be true, is
refuted by Simes's test (Biometrika 73, 1986). That is proved for fewer kinds of dependence than Holm's method;
docs/statistics.md has the simulation.

**As good as**: two one-sided tests show that neither is ahead by what matters (Schuirmann, J. Pharmacokinet. Biopharm.
15, 1987). Of two models, such as an export and its own, the change may also be too rare to have been seen
(`_p_unseen`). "They are equal" and "they differ by what matters" are never both true of one question. So a set of all
equalities has the whole error; any other has `SHARE_OF_DIFFERENCES` of it, and "they differ by what matters" the rest,
by Holm's method. At most 5 % of reports claim anything false of either kind.

**A race** (`Race`) looks several times, and spends the error over its looks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaincinv, nctdtrinc, stdtr, stdtrit

from stages.evaluation.statistics import (
    LEVEL,
    Floats,
    Groups,
    Interval,
    Statistic,
    bootstrap,
    by_group,
    sample_mean,
    samples_freedom,
)

POWER = 0.8
"""Share of the reports in which a detectable difference is shown."""
MAX_SEEDS = 100
"""The largest number of trainings that is proposed."""
FEWEST_TO_SHARE = 3
"""Fewest trainings of each recipe that pool their spread between seeds."""
EXPONENT = 3
"""Exponent in `pool_variances`: how fast a recipe loses the others' degrees of freedom as it spreads more. Chosen by
simulation: with 2, as in Satterthwaite's formula, a report finds less than it could; with 4, a report of six recipes,
one of which spreads four times as much as the others, claims something false in over 5.5 % of cases."""
SHARE_OF_DIFFERENCES = 0.95
"""Share of the error for better and worse, where as good as can be claimed too."""
MAX_SETS = 5000
"""Sets of equalities that a closed test goes through; a family with more is corrected by Holm's method."""
LOOKS = (3, 4, 6, 8, 12)
"""Seeds after which a race looks."""
LOOK_LEVELS = (0.01234, 0.00915, 0.01379, 0.01690, 0.02826)
"""One-sided levels of the looks of a race, which spend 5 % in proportion to the seeds (Kim and DeMets, Biometrika 74,
1987, rho = 1; computed by the recursion of Armitage, McPherson and Rowe, JRSS A 132, 1969)."""

Pair = tuple[Hashable, Hashable]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Variances of scores, or of differences of scores, by where they come from: arrays of one shape."""

    seeds: Floats
    """Variance of the mean over the trainings; 0 for models."""
    freedom: Floats
    """Degrees of freedom of `seeds`; infinite for models."""
    samples: Floats
    """Variance over draws of all samples, as observed."""
    rest: Floats
    """The part of `samples` that comes from neither seeds nor samples; `seeds` has it too."""
    samples_freedom: float
    """Degrees of freedom of `samples`."""

    def errors(self) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """(variance, degrees of freedom) over draws of seeds, and over draws of seeds and samples."""
        # No estimate of the rest makes the sum of both less than either of them.
        total = self.seeds + self.samples - np.minimum(self.rest, np.minimum(self.seeds, self.samples))
        with np.errstate(divide="ignore", invalid="ignore"):
            freedom = total**2 / (self.seeds**2 / self.freedom + self.samples**2 / self.samples_freedom)
        return (self.seeds, self.freedom), (total, np.where(np.isnan(freedom), np.inf, freedom))

    def half_width(self) -> Floats:
        """Half the width of the interval around the score."""
        widths = [np.sqrt(variance) * stdtrit(_finite(freedom), (1 + LEVEL) / 2) for variance, freedom in self.errors()]
        return np.maximum(*widths)

    def p_value(self, means: ArrayLike) -> Floats:
        """Two-sided, of scores of 0."""
        return np.maximum(*(2 * _lower_tail(-np.abs(means), *error) for error in self.errors()))

    def p_at_least(self, means: ArrayLike, margin: float) -> Floats:
        """One-sided, of scores of the margin or more."""
        return np.maximum(*(_lower_tail(np.subtract(means, margin), *error) for error in self.errors()))

    def detectable(self, alpha: float) -> float:
        """The smallest true difference that is shown at `alpha` in some 80 % of reports (`POWER`), by the noncentral t
        distribution. Rough, as the variance that three seeds show is."""
        sizes = []
        for variance, freedom in self.errors():
            finite = _finite(freedom).item()
            sizes.append(_noncentrality(finite, float(stdtrit(finite, 1 - alpha / 2))) * math.sqrt(variance.item()))
        return max(sizes)

    def with_seeds(self, num_seeds: int, before: int) -> Spread:
        """The spread to expect with so many trainings instead of those before."""
        more = (num_seeds - 1) / (before - 1)
        return replace(self, seeds=self.seeds * before / num_seeds, freedom=self.freedom * more)


def _finite(freedom: Floats) -> Floats:
    return np.minimum(freedom, 1e6)


def _lower_tail(distance: Floats, variance: Floats, freedom: Floats) -> Floats:
    """Chance of a t-distributed error of this distance or lower; one half for no distance and no variance."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = distance / np.sqrt(variance)
    return np.where(np.isnan(scaled), 0.5, stdtr(_finite(freedom), scaled))


def _noncentrality(freedom: float, critical: float) -> float:
    """Noncentrality of the t distribution that exceeds the critical value in `POWER` of all draws."""
    if critical > 100:  # its numerator's own spread of 1 hardly counts, and scipy's inverse may take hours
        return critical * math.sqrt(2 * float(gammaincinv(freedom / 2, POWER)) / freedom)
    return float(nctdtrinc(freedom, 1 - POWER, critical))


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Scores of a report's recipes by one metric. Arrays may have leading axes: several reports at once."""

    means: Floats
    """(..., recipes), over the trainings."""
    variances: Floats
    """(..., recipes), of one training's score; 0 for a model, which no seed changes."""
    counts: Floats
    """(..., recipes), trainings."""
    by_sample: Floats
    """(..., recipes, samples) jackknife pseudo-values, averaged over the trainings."""
    rest: Floats
    """(..., recipes), as in `Spread`."""
    samples_freedom: float
    """Degrees of freedom of a variance between samples."""

    def gaps(self, ours: ArrayLike, theirs: ArrayLike) -> tuple[Floats, Spread]:
        """Differences of recipes, by their index, (..., questions), and their spread."""

        shape = (*self.means.shape[:-1], np.shape(ours)[-1])
        both = [np.broadcast_to(np.asarray(each, dtype=np.int64), shape) for each in (ours, theirs)]

        def of_both(values: Floats) -> list[Floats]:
            return [np.take_along_axis(values, each, -1) for each in both]

        variance, freedom = pool_variances(self.variances, self.counts)
        samples = self.by_sample.shape[-1]
        one, other = (np.take_along_axis(self.by_sample, each[..., None], -2) for each in both)
        spread = Spread(
            seeds=np.add(*of_both(variance / self.counts)),
            freedom=np.minimum(*of_both(freedom)),
            samples=(one - other).var(axis=-1, ddof=1) / samples,
            rest=np.add(*of_both(self.rest)),
            samples_freedom=self.samples_freedom,
        )
        return np.subtract(*of_both(self.means)), spread


def summarize(recipes: Sequence[Floats], statistic: Statistic, groups: Groups | None = None) -> Evidence:
    """recipes: each (..., trainings, samples, columns), with the same samples, in two groups or more."""
    summaries = (_summary(*by_group(trained, statistic, groups)) for trained in recipes)
    means, variances, counts, by_sample, rest = zip(*summaries, strict=True)
    return Evidence(
        means=np.stack(means, axis=-1),
        variances=np.stack(variances, axis=-1),
        counts=np.stack(counts, axis=-1),
        by_sample=np.stack(by_sample, axis=-2),
        rest=np.stack(rest, axis=-1),
        samples_freedom=samples_freedom(recipes[0].shape[-2], groups),
    )


def _summary(trained: Floats, statistic: Statistic) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """The fields of `Evidence` for one recipe, (..., trainings, samples, columns)."""
    count, num_samples = trained.shape[-3:-1]
    means = trained.mean(axis=-2, keepdims=True)
    without = (num_samples * means - trained) / (num_samples - 1)
    values = num_samples * statistic(means) - (num_samples - 1) * statistic(without)  # (..., trainings, samples)
    scores, by_sample = statistic(means)[..., 0], values.mean(axis=-2)
    variance, rest = np.zeros(scores.shape[:-1]), np.zeros(scores.shape[:-1])
    if count > 1:
        variance = scores.var(axis=-1, ddof=1)
        overall = values.mean(axis=(-2, -1))[..., None, None]
        residuals = values - by_sample[..., None, :] - values.mean(axis=-1, keepdims=True) + overall
        rest = (residuals**2).sum(axis=(-2, -1)) / ((count - 1) * (num_samples - 1)) / (count * num_samples)
    return scores.mean(axis=-1), variance, np.full(variance.shape, float(count)), by_sample, rest


def pool_variances(variances: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """(v, f): the variance of one training's score, and its degrees of freedom, of each recipe, (..., recipes).

    variances: s_i^2 of recipe i over its trainings. counts: its trainings. With d_i = trainings - 1 and D their sum:

        m_i = ((D - d_i) p + d_i s_i^2) / D     p the pooled variance of all recipes
        v_i = max(s_i^2, m_i)
        f_i = D                                                      where s_i^2 <= m_i
            = 1 / ((1 - b)^EXPONENT / D + b^EXPONENT / d_i)          else: b = 1 - o_i^2 / s_i^2, the part of its
                                                                     variance beyond o_i^2, the pooled one of the others

    So pooling adds degrees of freedom and never takes spread away: for what a recipe's variance has beyond the others',
    only its own trainings count (Satterthwaite's formula, with EXPONENT in place of 2). Nothing is pooled if a recipe
    has fewer than FEWEST_TO_SHARE trainings. A recipe trained once has no variance, v = 0 and f = inf, and no part.
    """
    trained = counts > 1
    own = np.where(trained, counts - 1, 1.0)
    pooling = trained & (np.where(trained, counts, np.inf).min(axis=-1, keepdims=True) >= FEWEST_TO_SHARE)
    total = np.where(pooling, own, 0).sum(axis=-1, keepdims=True)
    squares = np.where(pooling, own * variances, 0).sum(axis=-1, keepdims=True)
    degrees = np.where(pooling, total, own)
    moderated = ((degrees - own) * squares / np.maximum(total, 1) + own * variances) / degrees
    larger = (degrees > own) & (variances > moderated)
    of_others = (squares - own * variances) / np.maximum(degrees - own, 1)
    beyond = 1 - np.divide(of_others, variances, out=np.ones_like(moderated), where=larger)
    freedom = np.minimum(degrees, 1 / ((1 - beyond) ** EXPONENT / degrees + beyond**EXPONENT / own))
    return np.where(trained, np.maximum(variances, moderated), 0.0), np.where(trained, freedom, np.inf)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Ours minus theirs on the same samples; positive where ours is higher."""

    mean: float
    reference: float
    """The score of theirs."""
    interval: Interval | None
    """At `LEVEL`, not corrected for other questions. None below two samples."""
    p_value: float
    """Two-sided: the chance of a difference at least as large if there is none. Not corrected for other questions."""
    adjusted_p: float
    """p_value, corrected for the other questions (`as_family`)."""
    matters: float | None = None
    """The smallest difference that matters, in the unit of the score; None if no two recipes are called as good."""
    p_as_good: float = 1.0
    """The chance of a difference at least as small if the two differ by what matters."""
    adjusted_as_good: float = 1.0
    """p_as_good, corrected for the other questions."""
    family: int = 1
    """Number of questions that both are corrected for."""
    samples: int
    groups: int | None = None
    """Number of groups that the samples are in; None if each is its own."""
    trainings: tuple[int, int] = (1, 1)
    """Number of ours and of theirs. If both are 1, models are compared, not recipes."""
    spread: Spread | None
    """None below two samples."""
    ahead: int
    """Samples on which every model of ours is better than every model of theirs."""
    behind: int
    higher_is_better: bool = True

    @property
    def relative(self) -> float | None:
        """The difference as part of theirs; None if theirs is 0."""
        return self.mean / abs(self.reference) if self.reference else None

    @property
    def is_tiny(self) -> bool:
        """Whether it rounds to 0 as it is shown, so that nothing would settle it."""
        return not round(self.mean, 3)

    @property
    def of_recipes(self) -> bool:
        return self.trainings != (1, 1)

    @property
    def verdict(self) -> str:
        """ "better", "worse", "as good", "no difference shown", or "too few samples".

        The exact sign test decides on too few: if nothing differs, all n signs agree with a chance of 2 / 2^n, so below
        6 samples, or groups of them, not even unanimity is evidence at 95 %, and below 9 it is none for ten questions.
        """
        if self._too_few:
            return "too few samples"
        if self.adjusted_p <= 1 - LEVEL:
            return "better" if (self.mean > 0) == self.higher_is_better else "worse"
        return "as good" if self.adjusted_as_good <= 1 - LEVEL else "no difference shown"

    @property
    def _too_few(self) -> bool:
        return too_few(self.samples, self.groups, self.family)

    @property
    def detectable(self) -> float | None:
        """The smallest difference that this design shows in some 80 % of reports, the correction at its hardest.

        None if the samples are too few to show any.
        """
        return self.spread.detectable((1 - LEVEL) / self.family) if self.spread and not self._too_few else None

    def seeds_needed(self) -> int | None:
        """Trainings of each recipe that show a difference as large as this one in some 80 % of reports.

        None if no number up to `MAX_SEEDS` does on these samples, or if the spread between seeds is not known.
        """
        if not self.spread or not self.of_recipes or self._too_few:
            return None
        alpha, before = (1 - LEVEL) / self.family, min(count for count in self.trainings if count > 1)
        expected = ((num, self.spread.with_seeds(num, before)) for num in range(2, MAX_SEEDS + 1))
        return next((num for num, spread in expected if spread.detectable(alpha) <= abs(self.mean)), None)


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of a recipe: the mean over its trainings."""

    mean: float
    interval: Interval | None
    """Over seeds and samples; with one training only over samples. None below two samples."""
    by_training: tuple[float, ...]
    between_seeds: float | None
    """Standard deviation of one training's score; None with one."""


def score(trainings: Floats, statistic: Statistic = sample_mean, groups: Groups | None = None) -> Score:
    """trainings: (trainings, samples) or (trainings, samples, columns). Its interval shares nothing with others."""
    samples = _as_trainings(trainings)
    trained, of_groups = by_group(samples, statistic, groups)
    by_training = of_groups(trained.mean(axis=1))
    mean, count = float(by_training.mean()), len(trained)
    if count == 1:
        interval, deviation = bootstrap(samples[0], statistic, groups), None
    else:
        interval, deviation = None, float(by_training.std(ddof=1))
        if trained.shape[1] > 1:
            interval = _around(mean, _own_spread(samples, statistic, groups).half_width().item())
    return Score(mean=mean, interval=interval, by_training=tuple(map(float, by_training)), between_seeds=deviation)


def difference(
    recipes: Sequence[Floats],
    pair: tuple[int, int] = (0, 1),
    *,
    statistic: Statistic = sample_mean,
    groups: Groups | None = None,
    higher_is_better: bool = True,
    matters: float | None = None,
    paired: bool = False,
    resamples: int = 10_000,
) -> Difference:
    """Ours minus theirs of a pair of a report's recipes, not corrected for other questions.

    recipes: (trainings, samples) or (trainings, samples, columns) each; sample i is the same in all. One training
        beside several is a model that no seed changes, such as an untrained base. All of them share their spread.
    pair: indices of ours and theirs.
    groups: of the samples, which are then swapped, redrawn and counted as wholes; None if each is its own.
    higher_is_better: of the statistic; a difference keeps its sign.
    matters: the smallest difference that matters, in the unit of the statistic; None if none is called as good.
    paired: whether training i of ours is made from training i of theirs, as exports are: then their differences vary
        between seeds, not their scores.
    resamples: swaps and redraws of the samples of two models.
    Raises ValueError if the samples differ in number, if there are none, and for values that are not finite.
    The same arguments give the same result, bit for bit.
    """
    samples = [_as_trainings(scores) for scores in recipes]
    if len({scores.shape[1:] for scores in samples}) > 1:
        raise ValueError(f"not the same samples: {[scores.shape[1:] for scores in samples]}")
    first, second = (statistic(samples[index]) for index in pair)  # (trainings, samples)
    gaps = (first - second)[None] if paired else first[:, None] - second[None]
    by_sample = (1 if higher_is_better else -1) * gaps  # (..., pairs of models, samples)
    (ours, of_groups), (theirs, _) = (by_group(samples[index], statistic, groups) for index in pair)
    num_drawn = ours.shape[1]
    our_values, their_values = of_groups(ours.mean(axis=1)), of_groups(theirs.mean(axis=1))
    mean = float(our_values.mean() - their_values.mean())
    of_models = len(ours) == len(theirs) == 1
    spread = None
    if paired or of_models:
        both, width = np.concatenate([samples[index] for index in pair], axis=-1), samples[pair[0]].shape[-1]

        def ours_minus_theirs(means: Floats) -> Floats:  # (..., 2 columns) -> (...)
            return statistic(means[..., :width]) - statistic(means[..., width:])

        spread = _own_spread(both, ours_minus_theirs, groups) if num_drawn > 1 else None
    elif num_drawn > 1:
        spread = summarize(samples, statistic, groups).gaps(*([each] for each in pair))[1]
    p_value, as_good, interval = 1.0, 1.0, None
    if of_models:
        p_value = _swap_test(ours[0], theirs[0], of_groups, resamples)
        # The samples of both are redrawn alike, so that differences in difficulty cancel out.
        interval = bootstrap(both[0], ours_minus_theirs, groups, resamples=resamples)
    elif spread:
        p_value, interval = spread.p_value(mean).item(), _around(mean, spread.half_width().item())
    if spread and matters is not None:
        as_good = max(
            *(spread.p_at_least(each, matters).item() for each in (mean, -mean)),
            *(_p_unseen(each, of_groups, matters) for each in (ours, theirs)),
        )
    p_value = max(p_value, least_p(num_drawn))
    return Difference(
        mean=mean,
        reference=float(their_values.mean()),
        interval=interval,
        p_value=p_value,
        adjusted_p=p_value,
        matters=matters,
        p_as_good=as_good,
        adjusted_as_good=as_good,
        samples=by_sample.shape[-1],
        groups=None if groups is None else num_drawn,
        trainings=(len(ours), len(theirs)),
        spread=spread,
        ahead=int((by_sample > 0).all(axis=(0, 1)).sum()),
        behind=int((by_sample < 0).all(axis=(0, 1)).sum()),
        higher_is_better=higher_is_better,
    )


def as_family(differences: Sequence[Difference], pairs: Sequence[Pair] | None = None) -> list[Difference]:
    """The differences, each corrected for all of them.

    pairs: the two that each is about, hashable; two questions of one pair, or three of three pairs, hang together. None
        corrects by Holm's method, for all that is known together.
    """
    p_values = np.array([each.p_value for each in differences])
    asked = [each.p_as_good for each in differences if each.matters is not None]
    share = SHARE_OF_DIFFERENCES if asked else 1.0
    sets = equality_sets(tuple(pairs)) if pairs is not None else None
    adjusted = np.minimum(holm(p_values) / share, 1) if sets is None else closed_testing(sets, p_values, share)
    as_good = iter(np.minimum(holm(asked) / (1 - share), 1).tolist() if asked else ())
    return [
        replace(
            each,
            adjusted_p=float(p),
            adjusted_as_good=next(as_good) if each.matters is not None else 1.0,
            family=len(differences),
        )
        for each, p in zip(differences, adjusted, strict=True)
    ]


def holm(p_values: ArrayLike) -> Floats:
    """The p-values (..., questions), corrected for their number: at most a share of `alpha` of the families in which
    nothing differs has one below `alpha`, however they depend on each other."""
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values, axis=-1)
    steps = np.take_along_axis(values, order, axis=-1) * np.arange(values.shape[-1], 0, -1)
    adjusted = np.empty_like(values)
    np.put_along_axis(adjusted, order, np.minimum(np.maximum.accumulate(steps, axis=-1), 1), axis=-1)
    return adjusted


def closed_testing(sets: Sequence[tuple[int, ...]], p_values: Floats, share: float = 1.0) -> Floats:
    """The p-values (..., questions), corrected by closed testing.

    share: part of the error for sets that leave questions out, as those may differ by what matters.
    """
    adjusted = np.zeros_like(p_values)
    for members in map(list, sets):
        p = p_values[..., members]
        simes = (np.sort(p, axis=-1) * len(members) / np.arange(1, len(members) + 1)).min(axis=-1, keepdims=True)
        adjusted[..., members] = np.maximum(
            adjusted[..., members], simes / (1 if len(members) == p_values.shape[-1] else share)
        )
    return np.minimum(adjusted, 1)


@cache
def equality_sets(pairs: tuple[Pair, ...]) -> tuple[tuple[int, ...], ...] | None:
    """The sets of questions, by index, that can all be about equals: with "a = b" and "b = c" goes "a = c".

    None if there are more than `MAX_SETS`.
    """

    def closure(chosen: frozenset[int]) -> frozenset[int]:
        group = {each: each for pair in pairs for each in pair}
        for index in chosen:
            kept, joined = (group[each] for each in pairs[index])
            group = {each: kept if its == joined else its for each, its in group.items()}
        return frozenset(index for index, (one, other) in enumerate(pairs) if group[one] == group[other])

    sets: set[frozenset[int]] = set()
    waiting = [frozenset[int]()]
    while waiting:
        last = waiting.pop()
        larger = {closure(last | {index}) for index in range(len(pairs)) if index not in last} - sets
        sets |= larger
        waiting += larger
        if len(sets) > MAX_SETS:
            return None
    return tuple(sorted(map(tuple, map(sorted, sets))))


def least_p(num_samples: int) -> float:
    """The smallest p-value that num_samples can give, by the exact sign test if all of them agree."""
    return min(1.0, 2 * 0.5**num_samples)


def too_few(samples: int, groups: int | None, family: int = 1) -> bool:
    """Whether so many questions show no difference on so few samples, or groups of them, not even if all agree."""
    return least_p(groups or samples) * family > 1 - LEVEL


@dataclass
class Race:
    """The race of recipes to be called the best, or within what matters of it; any number of races, one a row.

    At each look a recipe drops out that is shown to be worse than the leader, and the race ends when no other can be
    better than the leader by what matters (multiple comparisons with the best: Hsu, Ann. Stat. 9, 1981).
    """

    num_recipes: int
    matters: float
    higher_is_better: bool = True
    num_races: int = 1

    def __post_init__(self) -> None:
        self.racing = np.ones((self.num_races, self.num_recipes), bool)
        self.done = np.zeros(self.num_races, bool)
        self.leader = np.zeros(self.num_races, np.int64)

    def look(self, evidence: Evidence, level: float) -> None:
        """evidence: (races, recipes), with the trainings of this look of those that race; level: of LOOK_LEVELS."""
        sign = 1 if self.higher_is_better else -1
        scores = np.where(self.racing, sign * evidence.means, -np.inf)
        self.leader = np.where(self.done, self.leader, scores.argmax(axis=-1))
        everyone = np.arange(self.num_recipes)
        gaps, spread = evidence.gaps(everyone, self.leader[:, None])
        level = level / (self.num_recipes - 1)
        behind = spread.p_at_least(sign * gaps, 0.0) <= level
        near = (spread.p_at_least(sign * gaps, self.matters) <= level) | (everyone == self.leader[:, None])
        self.racing &= self.done[:, None] | ~behind
        self.done |= (near | ~self.racing).all(axis=-1)


def _p_unseen(trained: Floats, statistic: Statistic, matters: float) -> float:
    """The chance that no sample shows a change which alters the score by what matters, each of such samples by one
    standard deviation of a model's samples: where completions hardly differ, the variance says nothing of what other
    samples would show. trained: (trainings, samples, columns)."""
    by_sample = _summary(trained[:, None], statistic)[3]  # (trainings, samples)
    deviation = by_sample.std(axis=-1, ddof=1).mean()
    return float((1 - min(1.0, matters / deviation)) ** by_sample.shape[-1]) if deviation else 1.0


def _as_trainings(values: Floats) -> Floats:
    """Scores as (trainings, samples, columns)."""
    trained = np.asarray(values, dtype=np.float64)
    trained = trained.reshape(*trained.shape[:2], -1) if trained.ndim == 3 else trained[..., None]
    if trained.ndim != 3 or not trained.shape[0] or not trained.shape[1]:
        raise ValueError(f"expected scores of at least one training on at least one sample, got {np.shape(values)}")
    if broken := int((~np.isfinite(trained)).any(axis=(0, 2)).sum()):
        raise ValueError(f"{broken} of {trained.shape[1]} samples are NaN or infinite")
    return trained


def _swap_test(ours: Floats, theirs: Floats, statistic: Statistic, swaps: int) -> float:
    """Two-sided p-value of two models' scores, each (samples, columns)."""
    num_samples = len(ours)
    if exact := 2**num_samples <= swaps:
        swapped = (np.arange(2**num_samples)[:, None] >> np.arange(num_samples)) & 1
    else:
        swapped = np.random.default_rng(0).integers(0, 2, (swaps, num_samples), dtype=np.int8)
    change = np.concatenate([part @ (theirs - ours) for part in np.array_split(swapped, 10)]) / num_samples
    after = statistic(ours.mean(axis=0) + change) - statistic(theirs.mean(axis=0) - change)
    observed = abs(statistic(ours.mean(axis=0)) - statistic(theirs.mean(axis=0)))
    tie = observed - 1e-12 * max(1.0, float(observed))  # rounding must not break one
    at_least = int((np.abs(after) >= tie).sum())
    return at_least / len(after) if exact else (at_least + 1) / (len(after) + 1)


def _own_spread(trained: Floats, statistic: Statistic, groups: Groups | None) -> Spread:
    """The spread of a score by itself, nothing pooled. trained: (trainings, samples, columns)."""
    _, variance, count, by_sample, rest = _summary(*by_group(trained, statistic, groups))
    return Spread(
        seeds=variance / count,
        freedom=np.where(count > 1, count - 1, np.inf),
        samples=by_sample.var(ddof=1) / len(by_sample),
        rest=rest,
        samples_freedom=samples_freedom(len(by_sample), groups),
    )


def _around(mean: float, half_width: float) -> Interval:
    return Interval(mean - half_width, mean + half_width)
