"""Which model is best, by how much, and whether the samples are enough to say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stages.kit.errors import UserError
from stages.kit.evaluation.intervals import (
    Difference,
    Floats,
    Interval,
    Statistic,
    bootstrap,
    paired_difference,
    sample_mean,
)
from stages.kit.reporting.runs import Run, evaluation_stage


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
    """Whether some of the models have no such figure."""


@dataclass(frozen=True)
class Question:
    """A pair of recipes that the experiment was made to compare."""

    topic: str
    ours: str
    theirs: str


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """What a task says about itself, so that the comparison need not know it."""

    title: str
    metrics: tuple[Metric, ...]
    """The columns of the table; the first one is primary: models are ranked by it, and higher is better."""
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
        return self.metrics[0]


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
    difference: Difference | None
    """None where one of the two was not run."""
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
    evidence = _evidence(report, run)
    if len(evidence) == 0:
        raise UserError(f"{name} was evaluated on no sample; rebuild it with: dvc repro -f -s {run.stage}")
    value = float(report.statistic(evidence.mean(axis=0)))
    for metric in report.metrics:
        recorded_metric = run.metrics.get(metric.key)
        if not isinstance(recorded_metric, int | float) and not (metric.optional and recorded_metric is None):
            raise UserError(
                f"metrics.json of {name} has no number {metric.key}; rebuild it with: dvc repro -f -s {run.stage}"
            )
    recorded = float(run.metrics[report.primary.key])
    if not abs(recorded - value) < 1e-3:  # metrics.json may be rounded
        raise UserError(
            f"metrics.json of {name} says {report.primary.key} {recorded:.4f}, its predictions.parquet says "
            f"{value:.4f}; one of them is stale: dvc repro -f -s {run.stage}"
        )
    return Contender(
        name=name,
        baseline=baseline,
        stage_of=stage_of,
        run=run,
        value=value,
        interval=bootstrap(evidence, report.statistic),
    )


def compare(report: TaskReport, contenders: Sequence[Contender]) -> Comparison:
    """Rank, and answer every question that the runs at hand can answer.

    contenders: at least one of them evaluated, all on the same samples (`runs.refuse_different_samples`), and all or
    none of random weights (`runs.refuse_random_beside_trained`).
    """
    evaluated = [contender for contender in contenders if contender.run]
    assert evaluated, "nothing to compare"
    assert len({_run(contender).random_weights for contender in evaluated}) == 1, "random weights beside trained ones"
    best = max(evaluated, key=_value)
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
    rivals = sorted((other for other in evaluated if other is not best), key=_value, reverse=True)
    against = {rival.name: _difference(report, best, rival) for rival in rivals}
    undecided = [name for name, difference in against.items() if difference.verdict != "better"]
    score = f"{report.primary_words} {_value(best):.3f}{interval_words(best.interval)}"
    if not rivals:
        headline = f"{best.name} is the only model evaluated: {score}"
    elif not undecided:
        headline = f"{best.name} is best: {score}, better than {_all_of(rivals, all_run=all_run)}"
    elif against[undecided[0]].verdict == "too few samples":
        headline = f"{best.name} scores highest, {score}, but {_too_few(against[undecided[0]].samples)}"
    else:
        headline = f"{best.name} scores highest, {score}, but no difference is shown against {_listed(undecided)}"
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
    difference = None
    if unanswered := [contender.stage for contender in (ours, theirs) if contender.run is None]:
        words = f"not answered, not run: dvc repro {' '.join(unanswered)}"
    else:
        difference = _difference(report, ours, theirs)
        words = _sentence(difference_words(ours.name, theirs.name, difference))
    return Insight(topic=question.topic, ours=ours.name, theirs=theirs.name, difference=difference, words=words)


def _difference(report: TaskReport, ours: Contender, theirs: Contender) -> Difference:
    return paired_difference(_evidence(report, _run(ours)), _evidence(report, _run(theirs)), statistic=report.statistic)


def _evidence(report: TaskReport, run: Run) -> Floats:
    return np.stack([run.columns[name] for name in report.evidence], axis=1)  # (samples, columns)


def _run(contender: Contender) -> Run:
    assert contender.run is not None, contender.name
    return contender.run


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
