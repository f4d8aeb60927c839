"""Which is best, by how much, and whether the evidence is enough to say so: of models, or of recipes over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from stages.core.errors import UserError
from stages.kit.reporting.runs import Run, evaluation_stage
from stages.kit.reporting.task_report import UNAVAILABLE, Metric, Question, TaskReport
from stages.kit.statistics import Difference, Floats, Interval, Score, as_family, difference, score


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A recipe, or a base as it is, with the models that came of it."""

    name: str
    baseline: str | None
    """The untrained base it comes from; None for a base itself."""
    stage_of: tuple[str, ...] = ()
    """Recipes that continue this one."""
    runs: tuple[Run, ...] = ()
    """Its trainings, each under a seed of its own; none where it was not evaluated."""
    scores: Mapping[str, Score | None] = field(default_factory=dict)
    """By key of the metrics with evidence; None of one that no sample is about."""
    primary: str
    """Key of the metric by which it is ranked."""
    left_out: str = ""
    """Why it is not compared; empty where it is."""

    @property
    def run(self) -> Run | None:
        """The first of them."""
        return self.runs[0] if self.runs else None

    @property
    def score(self) -> Score:
        """By the primary metric."""
        found = self.scores[self.primary]
        assert found is not None, self.name
        return found

    def figure(self, key: str) -> float | str | None:
        """A figure of metrics.json; its mean over the trainings, and UNAVAILABLE where only some of them have it."""
        found = [run.metrics.get(key) for run in self.runs]
        numbers = [value for value in found if isinstance(value, int | float)]
        if len(found) > 1 and len(numbers) == len(found):
            return sum(numbers) / len(numbers)
        return found[0] if len(set(found)) == 1 else UNAVAILABLE if found else None

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
        left_out = f"not compared: {self.left_out}" if self.left_out else ""
        stages = f"a stage of {', '.join(self.stage_of)}" if self.stage_of else ""
        return ", ".join(filter(None, ["random weights" if self.run.random_weights else "", stages, left_out]))


@dataclass(frozen=True, kw_only=True)
class Insight:
    """A question and its answer."""

    topic: str
    ours: str
    theirs: str
    metric: Metric
    difference: Difference | None = None
    """Corrected for the number of questions. None where there is no answer."""
    unanswered: str = ""
    """Why there is none."""

    @property
    def words(self) -> str:
        if self.difference is None:
            return f"not answered, {self.unanswered}"
        return difference_words(self.ours, self.theirs, self.difference) + "."


@dataclass(frozen=True, kw_only=True)
class Answer:
    headline: str
    enough: bool
    """Whether the evidence singles out the best."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    report: TaskReport
    contenders: tuple[Contender, ...]
    best: Contender
    answer: Answer
    insights: tuple[Insight, ...]
    over_seeds: bool
    """Whether recipes are compared, and not one model of each."""
    notes: tuple[str, ...] = ()
    """What a reader must know of where the runs come from."""

    @property
    def evaluated(self) -> tuple[Contender, ...]:
        return tuple(contender for contender in self.contenders if contender.run)

    @property
    def runs(self) -> tuple[Run, ...]:
        """One of each contender, its first."""
        return tuple(contender.run for contender in self.contenders if contender.run)

    @property
    def all_runs(self) -> tuple[Run, ...]:
        return tuple(run for contender in self.contenders for run in contender.runs)

    @property
    def missing(self) -> tuple[Contender, ...]:
        return tuple(contender for contender in self.contenders if not contender.run)

    @property
    def num_samples(self) -> int:
        assert self.best.run is not None
        return len(self.best.run.samples)


def score_contender(
    report: TaskReport, name: str, runs: Sequence[Run], *, baseline: str | None, stage_of: tuple[str, ...] = ()
) -> Contender:
    """A contender with its scores.

    Raises UserError where predictions and metrics.json of a run do not tell the same, so that one of them is stale.
    """
    for run in runs:
        _refuse_incomplete(report, run)
    scores = {
        metric.key: score(np.stack(evidence), metric.statistic) if len(evidence[0]) else None
        for metric in report.measured
        if (evidence := [evidence_of(metric, run) for run in runs])
    }
    return Contender(
        name=name, baseline=baseline, stage_of=stage_of, runs=tuple(runs), scores=scores, primary=report.primary.key
    )


def compare(report: TaskReport, contenders: Sequence[Contender]) -> Comparison:
    """Rank, and answer every question that the runs can answer. All of them are one family (`as_family`).

    contenders: at least one of them evaluated, all on the same samples (`runs.refuse_different_samples`), and all or
    none of random weights (`runs.refuse_random_beside_trained`). Where one of them has several runs, recipes are
    compared, and those with a single training take no part.
    """
    over_seeds = any(len(contender.runs) > 1 for contender in contenders)
    contenders = [replace(each, left_out=_why_left_out(each, over_seeds=over_seeds)) for each in contenders]
    compared = [contender for contender in contenders if not contender.left_out]
    assert compared, "nothing to compare"
    assert len({run.random_weights for each in compared for run in each.runs}) == 1, "random beside trained"
    best, *rivals = sorted(compared, key=partial(_goodness, report), reverse=True)
    by_name = {contender.name: contender for contender in contenders}
    insights = [_insight(report, question, by_name) for question in _questions(report, by_name)]
    of_best = [_insight(report, Question("the best", best.name, rival.name), by_name) for rival in rivals]
    # To be best is one more question: to be better than every other. The one with the least evidence answers it.
    corrected = _corrected([*insights, *sorted(of_best, key=_p_value)[-1:]])
    return Comparison(
        report=report,
        contenders=tuple(contenders),
        best=best,
        answer=_answer(report, best, corrected[len(insights) :], contenders, over_seeds=over_seeds),
        insights=tuple(corrected[: len(insights)]),
        over_seeds=over_seeds,
    )


def interval_words(interval: Interval | None, *, sign: str = "") -> str:
    return f" [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]" if interval else ""


def difference_words(ours: str, theirs: str, difference: Difference) -> str:
    """The verdict as a sentence without its full stop: `r4 is better than r1 by +0.050 [+0.020, +0.080], p 0.003`.

    Where each was trained once, it is about their models. The p-value is the corrected one.
    """
    if not difference.of_recipes:
        ours, theirs = f"the model of {ours}", f"that of {theirs}"
    amount = f"{difference.mean:+.3f}{interval_words(difference.interval, sign='+')}"
    p_value = f"p {p_words(difference.adjusted_p)}"
    match difference.verdict:
        case "too few samples":
            return f"{_too_few(difference.samples)} {ours} from {theirs} ({amount})"
        case "no difference shown":
            return f"no difference shown between {ours} and {theirs} ({amount}, {p_value})"
        case verdict:
            return f"{ours} is {verdict} than {theirs} by {amount}, {p_value}"


def p_words(p_value: float) -> str:
    return f"{p_value:.3f}" if p_value >= 0.0005 else "< 0.001"


def _why_left_out(contender: Contender, *, over_seeds: bool) -> str:
    """Empty where it takes part."""
    if not contender.runs:
        return f"not run: dvc repro {contender.stage}"
    seeds = {run.plan.seed if run.plan else number for number, run in enumerate(contender.runs)}
    if over_seeds and contender.baseline is not None and len(seeds) == 1:
        return f"{contender.name} was trained under one seed only"
    if len(seeds) < len(contender.runs):
        return f"{contender.name} was not trained under a seed of its own each time"
    return ""


def _questions(report: TaskReport, by_name: Mapping[str, Contender]) -> list[Question]:
    """The task's own, then every recipe against the base it comes from."""
    asked = [question for question in report.questions if {question.ours, question.theirs} <= by_name.keys()]
    return asked + [
        Question(f"{name} against its base", name, contender.baseline)
        for name, contender in by_name.items()
        if contender.baseline is not None and contender.baseline in by_name
    ]


def _insight(report: TaskReport, question: Question, by_name: Mapping[str, Contender]) -> Insight:
    """Not yet corrected."""
    ours, theirs = by_name[question.ours], by_name[question.theirs]
    metric = next(metric for metric in report.measured if metric.key == (question.metric or report.primary.key))
    answer = partial(Insight, topic=question.topic, ours=ours.name, theirs=theirs.name, metric=metric)
    if why := list(filter(None, dict.fromkeys([ours.left_out, theirs.left_out]))):
        return answer(unanswered="; ".join(why))
    if ours.scores[metric.key] is None:
        return answer(unanswered=f"no sample is about {metric.heading}")
    evidence = (np.stack([evidence_of(metric, run) for run in contender.runs]) for contender in (ours, theirs))
    return answer(
        difference=difference(*evidence, statistic=metric.statistic, higher_is_better=metric.higher_is_better)
    )


def _corrected(insights: Sequence[Insight]) -> list[Insight]:
    """The answered ones as one family."""
    answered = [insight.difference for insight in insights if insight.difference]
    differences = iter(as_family(answered))
    return [replace(insight, difference=next(differences)) if insight.difference else insight for insight in insights]


def _p_value(insight: Insight) -> float:
    assert insight.difference is not None, insight
    return insight.difference.p_value


def _answer(
    report: TaskReport,
    best: Contender,
    of_best: Sequence[Insight],
    contenders: Sequence[Contender],
    *,
    over_seeds: bool,
) -> Answer:
    """of_best: whether it is better than the others; empty where there are none."""
    found = f"{report.primary_words} {best.score.mean:.3f}{interval_words(best.score.interval)}"
    model, other = (best.name, "") if over_seeds else (f"the model of {best.name}", "that of ")
    left_out = [contender for contender in contenders if contender.left_out]
    limits = (" that was trained under several seeds" if over_seeds else " that was run") if left_out else ""
    if not of_best:
        headline = f"{best.name} is the only model evaluated: {found}"
        return Answer(headline=_headline(headline, best), enough=False)
    difference, rival = of_best[0].difference, of_best[0].theirs
    assert difference is not None
    alone = len(contenders) - len(left_out) == 2
    others = f"{other}{rival}" if alone else "every other" if other else "every other model"
    if enough := difference.verdict in ("better", "worse"):
        headline = f"{model} is best: {found}, better than {others}{limits}"
    elif difference.verdict == "too few samples":
        headline = f"{model} scores {report.extreme}, {found}, but {_too_few(difference.samples)}"
    else:
        headline = f"{model} scores {report.extreme}, {found}, but no difference is shown against {other}{rival}"
    return Answer(headline=_headline(headline, best), enough=enough)


def _headline(words: str, best: Contender) -> str:
    assert best.run is not None
    words = f"On random weights, {words}" if best.run.random_weights else words
    return (f"The{words[3:]}" if words.startswith("the ") else words) + "."


def _refuse_incomplete(report: TaskReport, run: Run) -> None:
    """Raise UserError where there are no samples, where metrics.json lacks a figure, and where one is another than the
    predictions give."""
    if not run.samples:
        raise UserError(f"{run.name} was evaluated on no sample; rebuild it with: dvc repro -f -s {run.stage}")
    for metric in report.metrics:
        recorded = run.metrics.get(metric.key)
        if not isinstance(recorded, int | float) and not (metric.optional and recorded in (None, UNAVAILABLE)):
            raise UserError(
                f"metrics.json of {run.name} has no number {metric.key}; rebuild it with: dvc repro -f -s {run.stage}"
            )
    for metric in report.measured:
        if len(evidence := evidence_of(metric, run)) == 0:
            continue
        value, recorded = float(metric.statistic(evidence.mean(axis=0))), run.metrics.get(metric.key)
        if not isinstance(recorded, int | float) or not abs(recorded - value) < 1e-3:  # metrics.json may be rounded
            said = f"{recorded:.4f}" if isinstance(recorded, int | float) else "nothing"
            raise UserError(
                f"metrics.json of {run.name} says {metric.key} {said}, its predictions.parquet says "
                f"{value:.4f}; one of them is stale: dvc repro -f -s {run.stage}"
            )


def evidence_of(metric: Metric, run: Run) -> Floats:
    """(samples that the metric is about, columns)."""
    evidence = np.stack([run.columns[name] for name in metric.evidence], axis=1)
    return evidence if metric.among is None else evidence[run.columns[metric.among] == 1]


def _goodness(report: TaskReport, contender: Contender) -> float:
    """By the primary metric; more is better."""
    return contender.score.mean if report.primary.higher_is_better else -contender.score.mean


def _too_few(num_samples: int) -> str:
    return "1 sample is too few to tell" if num_samples == 1 else f"{num_samples} samples are too few to tell"
