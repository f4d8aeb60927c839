"""Which model is best, by how much, and whether the samples are enough to say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from stages.core.errors import UserError
from stages.kit.reporting.runs import Run, evaluation_stage
from stages.kit.statistics.intervals import (
    Difference,
    Floats,
    Interval,
    Statistic,
    bootstrap,
    paired_difference,
    sample_mean,
)

UNAVAILABLE = "unavailable"
"""In metrics.json, of a figure that could not be computed: never 0."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    key: str
    """In metrics.json."""
    heading: str
    format: str
    """As in `tables.Column`."""
    meaning: str
    """A few words for the reader of the page."""
    optional: bool = False
    """Whether some of the models have no such figure, or UNAVAILABLE in its place."""
    higher_is_better: bool = True
    evidence: tuple[str, ...] = ()
    """Per-sample columns from which `statistic` gives it, for an interval of its own; none where it has none. Those of
    the primary metric are the report's."""
    statistic: Statistic = sample_mean
    among: str | None = None
    """A per-sample column of 0 and 1, 1 where `evidence` says something; None where it does of every sample."""


@dataclass(frozen=True)
class Question:
    """A pair of recipes that the experiment was made to compare."""

    topic: str
    ours: str
    theirs: str
    metric: str | None = None
    """Key of the metric to compare them by, one with evidence; None for the primary one."""


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """What a task says about itself, so that the comparison need not know it."""

    title: str
    metrics: tuple[Metric, ...]
    """The columns of the table; the first one is primary: models are ranked by it."""
    primary_words: str
    """The primary metric within a sentence."""
    identity: tuple[str, ...]
    """Columns of predictions.parquet that say what a sample is: its id, then its truth."""
    evidence: tuple[str, ...]
    """Per-sample columns from which `statistic` gives the primary metric."""
    statistic: Statistic = sample_mean
    score: str
    """The per-sample column whose distribution is drawn, in 0..1."""
    score_heading: str
    questions: tuple[Question, ...]

    @property
    def primary(self) -> Metric:
        """With its evidence."""
        return replace(self.metrics[0], evidence=self.evidence, statistic=self.statistic)

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The metrics with evidence, the primary one first."""
        return (self.primary, *(metric for metric in self.metrics[1:] if metric.evidence))

    @property
    def extreme(self) -> str:
        """Where the best value of the primary metric is."""
        return "highest" if self.primary.higher_is_better else "lowest"

    @property
    def columns(self) -> tuple[str, ...]:
        """The per-sample columns that a comparison needs."""
        needed = {self.score}
        for metric in self.measured:
            needed |= {*metric.evidence, *([metric.among] if metric.among else [])}
        return tuple(sorted(needed))


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A model that takes part, evaluated or not."""

    name: str
    baseline: str | None
    """The untrained base it comes from; None for a base itself."""
    stage_of: tuple[str, ...] = ()
    """Recipes that continue this one."""
    run: Run | None
    value: float | None = None
    """Of the primary metric."""
    interval: Interval | None = None
    other_intervals: Mapping[str, Interval | None] = field(default_factory=dict)
    """By key, of the other metrics with evidence."""

    @property
    def stage(self) -> str:
        """The pipeline stage that evaluates it."""
        return evaluation_stage(self.name, trained=self.baseline is not None)

    @property
    def role(self) -> str:
        if self.run is None:
            return "not run"
        if self.baseline is None:
            return "baseline"
        return "stage" if self.stage_of else ""

    @property
    def note(self) -> str:
        if self.run is None:
            return f"not run: dvc repro {self.stage}"
        stages = f"a stage of {', '.join(self.stage_of)}" if self.stage_of else ""
        return ", ".join(filter(None, ["random weights" if self.run.random_weights else "", stages]))


@dataclass(frozen=True, kw_only=True)
class Insight:
    topic: str
    ours: str
    theirs: str
    metric: Metric
    difference: Difference | None
    """None where one of the two was not run, or no sample is about the metric."""
    words: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    headline: str
    enough: bool
    """Whether the intervals single out the best model."""
    reasons: tuple[str, ...]
    """The best against each of the others, the closest first."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    report: TaskReport
    contenders: tuple[Contender, ...]
    best: Contender
    answer: Answer
    insights: tuple[Insight, ...]

    @property
    def evaluated(self) -> tuple[Contender, ...]:
        return tuple(contender for contender in self.contenders if contender.run)

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(contender.run for contender in self.contenders if contender.run)

    @property
    def missing(self) -> tuple[Contender, ...]:
        return tuple(contender for contender in self.contenders if not contender.run)

    @property
    def num_samples(self) -> int:
        assert self.best.run is not None
        return len(self.best.run.samples)


def score_contender(
    report: TaskReport, name: str, run: Run | None, *, baseline: str | None, stage_of: tuple[str, ...] = ()
) -> Contender:
    """A contender with the primary metric and its interval.

    Raises UserError where predictions and metrics.json do not tell the same, so that one of them is stale.
    """
    if run is None:
        return Contender(name=name, baseline=baseline, stage_of=stage_of, run=None)
    if not run.samples:
        raise UserError(f"{name} was evaluated on no sample; rebuild it with: dvc repro -f -s {run.stage}")
    for metric in report.metrics:
        recorded = run.metrics.get(metric.key)
        if not isinstance(recorded, int | float) and not (metric.optional and recorded in (None, UNAVAILABLE)):
            raise UserError(
                f"metrics.json of {name} has no number {metric.key}; rebuild it with: dvc repro -f -s {run.stage}"
            )
    values, intervals = {}, {}
    for metric in report.measured:
        values[metric.key], intervals[metric.key] = _value_and_interval(metric, run)
    primary = report.primary.key
    return Contender(
        name=name,
        baseline=baseline,
        stage_of=stage_of,
        run=run,
        value=values[primary],
        interval=intervals.pop(primary),
        other_intervals=intervals,
    )


def compare(report: TaskReport, contenders: Sequence[Contender]) -> Comparison:
    """Rank, and answer every question that the runs at hand can answer.

    contenders: at least one of them evaluated, all on the same samples (`runs.refuse_different_samples`), and all or
    none of random weights (`runs.refuse_random_beside_trained`).
    """
    evaluated = [contender for contender in contenders if contender.run]
    assert evaluated, "nothing to compare"
    assert len({_run(contender).random_weights for contender in evaluated}) == 1, "random weights beside trained ones"
    best = max(evaluated, key=partial(_goodness, report))
    return Comparison(
        report=report,
        contenders=tuple(contenders),
        best=best,
        answer=_answer(report, best, evaluated, all_run=len(evaluated) == len(contenders)),
        insights=_insights(report, {contender.name: contender for contender in contenders}),
    )


def interval_words(interval: Interval | None, *, sign: str = "") -> str:
    return f" [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]" if interval else ""


def difference_words(ours: str, theirs: str, difference: Difference) -> str:
    """The verdict as a sentence without its full stop: `r4 is better than r1 by +0.050 [+0.020, +0.080]`."""
    amount = f"{difference.mean:+.3f}{interval_words(difference.interval, sign='+')}"
    match difference.verdict:
        case "too few samples":
            return f"{_too_few(difference.samples)} {ours} from {theirs} ({amount})"
        case "no difference shown":
            return f"no difference shown between {ours} and {theirs} ({amount})"
        case verdict:
            return f"{ours} is {verdict} than {theirs} by {amount}"


def _answer(report: TaskReport, best: Contender, evaluated: Sequence[Contender], *, all_run: bool) -> Answer:
    rivals = sorted((other for other in evaluated if other is not best), key=partial(_goodness, report), reverse=True)
    against = {rival.name: _difference(report.primary, best, rival) for rival in rivals}
    undecided = [name for name, difference in against.items() if difference.verdict != "better"]
    score = f"{report.primary_words} {_value(best):.3f}{interval_words(best.interval)}"
    ahead = f"{best.name} scores {report.extreme}, {score}, but"
    if not rivals:
        headline = f"{best.name} is the only model evaluated: {score}"
    elif not undecided:
        headline = f"{best.name} is best: {score}, better than {_all_of(rivals, all_run=all_run)}"
    elif against[undecided[0]].verdict == "too few samples":
        headline = f"{ahead} {_too_few(against[undecided[0]].samples)}"
    else:
        headline = f"{ahead} no difference is shown against {_listed(undecided)}"
    if _run(best).random_weights:
        headline = f"On random weights, {headline}"
    return Answer(
        headline=_sentence(headline),
        enough=bool(rivals) and not undecided,
        reasons=tuple(_sentence(difference_words(best.name, name, against[name])) for name in against),
    )


def _insights(report: TaskReport, by_name: Mapping[str, Contender]) -> tuple[Insight, ...]:
    """The task's own questions, then every recipe against the base it comes from."""
    questions = [question for question in report.questions if {question.ours, question.theirs} <= by_name.keys()]
    questions += [
        Question(f"{name} against its base", name, contender.baseline)
        for name, contender in by_name.items()
        if contender.baseline is not None and contender.baseline in by_name
    ]
    return tuple(_insight(report, question, by_name) for question in questions)


def _insight(report: TaskReport, question: Question, by_name: Mapping[str, Contender]) -> Insight:
    ours, theirs = by_name[question.ours], by_name[question.theirs]
    metric = next(metric for metric in report.measured if metric.key == (question.metric or report.primary.key))
    difference = None
    if unanswered := [contender.stage for contender in (ours, theirs) if contender.run is None]:
        words = f"not answered, not run: dvc repro {' '.join(unanswered)}"
    elif len(_evidence(metric, _run(ours))) == 0:
        words = f"not answered: no sample is about {metric.heading}"
    else:
        difference = _difference(metric, ours, theirs)
        words = _sentence(difference_words(ours.name, theirs.name, difference))
    return Insight(
        topic=question.topic, ours=ours.name, theirs=theirs.name, metric=metric, difference=difference, words=words
    )


def _difference(metric: Metric, ours: Contender, theirs: Contender) -> Difference:
    return paired_difference(
        _evidence(metric, _run(ours)),
        _evidence(metric, _run(theirs)),
        statistic=metric.statistic,
        higher_is_better=metric.higher_is_better,
    )


def _value_and_interval(metric: Metric, run: Run) -> tuple[float | None, Interval | None]:
    """Of a metric with evidence; (None, None) where no sample is about it."""
    evidence = _evidence(metric, run)
    if len(evidence) == 0:
        return None, None
    value, recorded = float(metric.statistic(evidence.mean(axis=0))), run.metrics.get(metric.key)
    if not isinstance(recorded, int | float) or not abs(recorded - value) < 1e-3:  # metrics.json may be rounded
        said = f"{recorded:.4f}" if isinstance(recorded, int | float) else "nothing"
        raise UserError(
            f"metrics.json of {run.name} says {metric.key} {said}, its predictions.parquet says "
            f"{value:.4f}; one of them is stale: dvc repro -f -s {run.stage}"
        )
    return value, bootstrap(evidence, metric.statistic)


def _evidence(metric: Metric, run: Run) -> Floats:
    """(samples that the metric is about, columns)."""
    evidence = np.stack([run.columns[name] for name in metric.evidence], axis=1)
    return evidence if metric.among is None else evidence[run.columns[metric.among] == 1]


def _run(contender: Contender) -> Run:
    assert contender.run is not None, contender.name
    return contender.run


def _goodness(report: TaskReport, contender: Contender) -> float:
    """By the primary metric; more is better."""
    return _value(contender) if report.primary.higher_is_better else -_value(contender)


def _value(contender: Contender) -> float:
    assert contender.value is not None, contender.name
    return contender.value


def _sentence(words: str) -> str:
    return words + "."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _all_of(rivals: Sequence[Contender], *, all_run: bool) -> str:
    if len(rivals) == 1:
        return rivals[0].name + ("" if all_run else ", the only other model that was run")
    return "every other model" + ("" if all_run else " that was run")


def _too_few(num_samples: int) -> str:
    return "1 sample is too few to tell" if num_samples == 1 else f"{num_samples} samples are too few to tell"
