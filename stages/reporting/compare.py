"""Compare the models of a task, or its recipes over seeds: which is best, by how much, and is the evidence enough?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import isclose
from pathlib import Path

import numpy as np

from stages.core.errors import UserError, pluralize
from stages.core.params.schema import Params, recipe_of
from stages.core.records import obtain, rebuild
from stages.core.tasks import load_task
from stages.data.guards import GUARD
from stages.evaluation.statistics import (
    UNAVAILABLE,
    Floats,
    Groups,
    Interval,
    Statistic,
    perplexity,
    sample_mean,
)
from stages.reporting.evidence import Difference, Score, as_family, difference, score, too_few
from stages.reporting.runs import (
    Run,
    different_models,
    read_run,
    refuse_different_samples,
)

_BEST = "the best"


@dataclass(frozen=True)
class Metric:
    key: str
    """Name in metrics.json."""
    heading: str
    format: str
    """Format of a table's column (`tables.Column`)."""
    meaning: str
    """A few words for the reader of the page."""
    _: KW_ONLY
    optional: bool = False
    """Whether some of the models have no such metric, or UNAVAILABLE in its place."""
    higher_is_better: bool = True
    evidence: tuple[str, ...] = ()
    """Per-sample columns from which `statistic` computes it, for an interval of its own; empty if it has none."""
    statistic: Statistic = sample_mean
    among: str | None = None
    """A per-sample column of 0 and 1, 1 for the samples that count; None if all do."""
    guard: str | None = None
    """The guard that it is measured on; None for the samples."""


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
    """The columns, the evidence and the questions of a task's report, so that the comparison need not know the task."""

    task: str
    """Its name in params.yaml."""
    title: str
    metrics: tuple[Metric, ...]
    """The columns of the table. The first one, which has evidence, is primary: models are ranked by it."""
    primary_words: str
    """The primary metric within a sentence."""
    identity: tuple[str, ...]
    """Columns of predictions.parquet that identify a sample: its id, then its truth; with `shown`, these are its id,
    the question and the reference answer."""
    questions: tuple[Question, ...]
    shown: tuple[str, ...] = ()
    """Columns of text that examples show of a completion, those that are not null; empty if they are images alone."""
    matters: float | None = None
    """The smallest difference that matters, in the unit of the primary metric, to recipes and to exports; None if none
    is called as good as another. Two models of one training each are not, unless one is an export."""

    @property
    def primary(self) -> Metric:
        return self.metrics[0]

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The metrics with evidence, the primary one first."""
        return tuple(metric for metric in self.metrics if metric.evidence)

    @property
    def extreme(self) -> str:
        return "highest" if self.primary.higher_is_better else "lowest"

    @property
    def columns(self) -> tuple[str, ...]:
        """The per-sample columns that a comparison needs."""
        of_samples = [metric for metric in self.measured if metric.guard is None]
        return tuple(sorted({name for metric in of_samples for name in (*metric.evidence, metric.among) if name}))


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A recipe, or a base without training, with the models that came of it."""

    name: str
    stage: str
    """The pipeline stage that evaluates it."""
    baseline: str | None
    """The untrained base it comes from; None for a base itself."""
    stage_of: tuple[str, ...] = ()
    """Recipes that continue this one."""
    runs: tuple[Run, ...] = ()
    """Its trainings, each under a seed of its own; empty if it was not evaluated."""
    scores: Mapping[str, Score | None] = field(default_factory=dict)
    """Score by metric key, for metrics with evidence; None if no sample counts for the metric."""
    primary: str
    """Key of the metric that ranks it."""
    left_out: str = ""
    """The reason why it is not compared; empty if it is."""
    export_of: str | None = None
    """The recipe that it is an export of; None for another contender. An export is compared with that model alone."""

    @property
    def run(self) -> Run | None:
        """The first of its runs."""
        return self.runs[0] if self.runs else None

    @property
    def answers(self) -> str | None:
        """Path of its answers file, for one without a model."""
        path = self.run.metrics.get("answers") if self.run else None
        return str(path) if path else None

    @property
    def is_ranked(self) -> bool:
        return not self.left_out and not self.export_of

    @property
    def score(self) -> Score:
        """Its score by the primary metric."""
        primary = self.scores[self.primary]
        assert primary is not None, self.name
        return primary

    def metric(self, key: str) -> float | str | None:
        """A metric of metrics.json, averaged over the trainings; UNAVAILABLE if only some of them have it."""
        values = [run.metrics.get(key) for run in self.runs]
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(values) > 1 and len(numbers) == len(values):
            return sum(numbers) / len(numbers)
        return values[0] if len(set(values)) == 1 else UNAVAILABLE if values else None

    @property
    def role(self) -> str:
        if self.run is None:
            return "not run"
        if self.export_of:
            return "export"
        if self.baseline is None:
            return "answers" if self.answers else "baseline"
        return "stage" if self.stage_of else ""

    @property
    def note(self) -> str:
        if self.run is None:
            return f"not run: dvc repro {self.stage}"
        left_out = f"not compared: {self.left_out}" if self.left_out else ""
        stages = f"a stage of {', '.join(self.stage_of)}" if self.stage_of else ""
        return ", ".join(filter(None, [self.answers and f"answers of {self.answers}", stages, left_out]))


@dataclass(frozen=True)
class Insight:
    """A question and its verdict."""

    topic: str
    ours: str
    theirs: str
    metric: Metric
    difference: Difference | None = None
    """Corrected for the number of questions. None if it is not decided."""
    undecided: str = ""
    """The reason why there is none."""

    @property
    def words(self) -> str:
        if self.difference is None:
            return f"not decided, {self.undecided}"
        return difference_words(self.ours, self.theirs, self.difference) + "."

    @property
    def is_shown(self) -> bool:
        return self.difference is not None and self.difference.verdict in ("better", "worse")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    report: TaskReport
    contenders: tuple[Contender, ...]
    best: Contender
    over_rival: Insight | None
    """The best against the rival with the least evidence; None without any rival."""
    insights: tuple[Insight, ...]
    over_seeds: bool
    """Whether recipes are compared, and not one model of each."""
    notes: tuple[str, ...] = ()
    """Sentences about the origin of the runs."""

    @property
    def evaluated(self) -> tuple[Contender, ...]:
        return tuple(contender for contender in self.contenders if contender.run)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The first run of each contender."""
        return tuple(contender.run for contender in self.contenders if contender.run)

    @property
    def all_runs(self) -> tuple[Run, ...]:
        return tuple(run for contender in self.contenders for run in contender.runs)

    @property
    def leaders(self) -> tuple[str, ...]:
        """The best, and those that tie with it."""
        compared = [each for each in self.contenders if each.is_ranked]
        return tuple(each.name for each in compared if isclose(each.score.mean, self.best.score.mean, rel_tol=1e-9))

    @property
    def conclusive(self) -> bool:
        """Whether the evidence singles out the best."""
        return self.over_rival is not None and self.over_rival.is_shown

    @property
    def counts(self) -> tuple[int, int | None]:
        """The samples that count for the primary metric, and the groups that they are in; None if each is its own."""
        primary, run = self.report.primary, self.best.runs[0]
        groups = groups_of(primary, run)
        return len(evidence_of(primary, run)), None if groups is None else len(np.unique(groups))

    @property
    def samples_text(self) -> str:
        return sample_words(*self.counts)

    @property
    def headline(self) -> str:
        best, rival, score = self.best, self.over_rival, self.best.score
        scored = f"{self.report.primary_words} {score.mean:.3f}{interval_words(score.interval)}"
        model, other = (best.name, "") if self.over_seeds else (f"the model of {best.name}", "that of ")
        exports = " Exports are not ranked." if any(each.export_of for each in self.evaluated) else ""
        if rival is None:
            words = f"{best.name} is the only model {'compared' if exports else 'evaluated'}: {scored}"
            if too_few(*self.counts):
                words += f", but {_too_few(*self.counts)} it from any other"
        elif rival.is_shown:
            rankable = [contender for contender in self.contenders if not contender.export_of]
            compared = [contender for contender in rankable if contender.is_ranked]
            others = "every other" if other else "every other model"
            words = f"{model} is best: {scored}, better than "
            words += f"{other}{rival.theirs}" if len(compared) == 2 else others
            if len(compared) < len(rankable):
                words += ", the only other" if len(compared) == 2 else ""
                words += " that was compared"
        elif len(self.leaders) > 1:
            them = f"{', '.join(self.leaders[:-1])} and {self.leaders[-1]}"
            them = them if self.over_seeds else f"the models of {them}"
            words = f"{them} tie for the {self.report.extreme} {scored}"
        else:
            words = f"{model} scores {self.report.extreme}, {scored}, but "
            if rival.difference and rival.difference.verdict == "too few samples":
                words += _too_few(*self.counts)
            elif other:
                words += f"no difference is shown against {other}{rival.theirs}"
            else:
                words += f"{rival.theirs} may be as good or better"
        return (f"The{words[3:]}" if words.startswith("the ") else words) + f".{exports}"


def compare(report: TaskReport, contenders: Sequence[Contender]) -> Comparison:
    """Rank, and decide every question that the runs can decide. All of them are one family (`as_family`).

    contenders: at least one of them evaluated, all on the same samples (`runs.refuse_different_samples`). If one of
        them has several runs, recipes are compared, and those with a single training take no part.
    Raises UserError if none can take part.
    """
    over_seeds = any(len(contender.runs) > 1 for contender in contenders)
    given = {each.name: each for each in contenders}
    contenders = [replace(each, left_out=_why_left_out(each, given, over_seeds=over_seeds)) for each in contenders]
    compared = [each for each in contenders if each.is_ranked]
    if not compared:
        raise UserError(f"nothing can be compared: {'; '.join(each.left_out for each in contenders if each.left_out)}")
    sign = 1 if report.primary.higher_is_better else -1
    best, *rivals = sorted(compared, key=lambda contender: sign * contender.score.mean, reverse=True)
    by_name = {contender.name: contender for contender in contenders}
    insights = [
        _insight(report, question, by_name, report.matters if over_seeds or by_name[question.ours].export_of else None)
        for question in _questions(report, by_name)
    ]
    of_best = [_insight(report, Question(_BEST, best.name, rival.name), by_name, None) for rival in rivals]
    # Whether the best is better than every other is one more question; the rival with the least evidence decides it.
    of_best = sorted(of_best, key=lambda each: each.difference.p_value if each.difference else 0)[-1:]
    corrected = _corrected([*insights, *of_best], over_seeds=over_seeds)
    return Comparison(
        report=report,
        contenders=tuple(contenders),
        best=best,
        over_rival=corrected[-1] if of_best else None,
        insights=tuple(corrected[: len(insights)]),
        over_seeds=over_seeds,
    )


def task_report(params: Params, task: str) -> TaskReport:
    """The report of a task, from its module `report`: REPORT, or the result of `report_for` for the datasets that its
    runs are evaluated on; with what `compare` of params.yaml asks, and a column for each guard.

    Raises UserError if no recipe has the task."""
    tasks = dict.fromkeys(recipe.task for recipe in params.recipes.values())
    if task not in tasks:
        raise UserError(f"no recipe of params.yaml has the task {task!r}; there are: {', '.join(tasks)}")
    subjects = [params.subject(name) for name in (*params.baselines, *params.recipes)]
    names = dict.fromkeys(subject.data for subject in subjects if subject.task == task)
    known = {name: params.active.datasets[name] for name in names if name in params.active.datasets}
    module = load_task(task, "report")
    report: TaskReport = module.report_for(known) if hasattr(module, "report_for") else module.REPORT
    questions = list(report.questions)
    for ours, theirs in params.compare.against.items():
        asked = {frozenset((each.ours, each.theirs)) for each in questions if each.metric is None}
        if params.recipes[ours].task == task and frozenset((ours, theirs)) not in asked:
            questions.append(Question(f"{ours} against {theirs}", ours, theirs))
    metrics = (*report.metrics, *map(guard_metric, params.guards))
    matters = params.compare.matters.get(report.primary.key)
    return replace(report, metrics=metrics, questions=tuple(questions), matters=matters)


def guard_metric(guard: str) -> Metric:
    key = f"{GUARD}{guard}"
    return Metric(
        key=key,
        heading=f"On {guard}",
        format=".2f",
        meaning=f"Perplexity on the guard {guard}, which no recipe trains on: e to the mean negative log-likelihood of "
        "a token. Lower is better; a recipe's above its base's is what training lost.",
        optional=True,  # an answers file has none
        higher_is_better=False,
        evidence=(f"{key}_nats", f"{key}_tokens"),
        statistic=perplexity,
        guard=guard,
    )


def read_contenders(params: Params, report: TaskReport, data_dirs: Sequence[Path]) -> list[Contender]:
    """Every baseline and recipe of the report's task, in the order of params.yaml, evaluated or not.

    data_dirs: of one workspace, or of several, in each of which the recipes were trained under another seed.
    Raises UserError if nothing was evaluated, and if the runs cannot be compared.
    """
    task = report.task
    names: dict[str, str | None] = {name: None for name, base in params.baselines.items() if base.task == task}
    names |= {name: _baseline_of(params, name) for name, recipe in params.recipes.items() if recipe.task == task}
    names |= {name: None for name, export in params.exports.items() if export.task == task}
    runs = {
        name: list(filter(None, (read_run(params, report, name, data_dir) for data_dir in data_dirs))) for name in names
    }
    evaluated = [run for of_name in runs.values() for run in of_name]
    if not evaluated:
        raise UserError(f"no model of task {task} has been evaluated; {obtain(f'compare@{task}')}")
    refuse_different_samples(evaluated)
    if others := [run for run in evaluated if run.plan and run.plan.profile != params.profile]:
        named = ", ".join(f"{run.name} ({run.plan.profile})" for run in others if run.plan)
        raise UserError(
            f"params.yaml sets profile {params.profile}, but these were trained under another: {named}; "
            f"train them again with: dvc repro {' '.join(run.stage for run in others)}"
        )
    continued_by = {name: recipe_of(recipe.base) for name, recipe in params.recipes.items()}
    return [
        score_contender(
            report,
            name,
            different_models(runs[name]),
            stage=params.evaluation_stage(name),
            baseline=baseline,
            stage_of=tuple(other for other, parent in continued_by.items() if parent == name),
            export_of=params.exports[name].recipe if name in params.exports else None,
        )
        for name, baseline in names.items()
    ]


def score_contender(
    report: TaskReport,
    name: str,
    runs: Sequence[Run],
    *,
    stage: str,
    baseline: str | None,
    stage_of: tuple[str, ...] = (),
    export_of: str | None = None,
) -> Contender:
    """A contender with its scores.

    Raises UserError if predictions and metrics.json of a run disagree, so that one of them is stale.
    """
    for run in runs:
        _refuse_incomplete(report, run)
    scores = {
        metric.key: score(np.stack(each), metric.statistic, groups_of(metric, runs[0])) if len(each[0]) else None
        for metric in report.measured
        if (each := [evidence_of(metric, run) for run in runs])
    }
    return Contender(
        name=name,
        stage=stage,
        baseline=baseline,
        stage_of=stage_of,
        export_of=export_of,
        runs=tuple(runs),
        scores=scores,
        primary=report.primary.key,
    )


def export_pairs(export: Contender, model: Contender) -> list[tuple[Run, Run]]:
    """The runs of an export, each with that of the model it was made from, as far as this is there."""
    by_model = {run.model: run for run in model.runs}
    return [(run, by_model[run.base]) for run in export.runs if run.base in by_model]


def evidence_of(metric: Metric, run: Run) -> Floats:
    """The per-sample values behind a metric: (samples that count, columns)."""
    evidence = np.stack([run.columns[name] for name in metric.evidence], axis=1)
    return evidence if metric.among is None else evidence[run.columns[metric.among] == 1]


def groups_of(metric: Metric, run: Run) -> Groups | None:
    """The group of each sample that counts; None if each is its own."""
    if run.groups is None or metric.guard:
        return None
    groups = run.groups if metric.among is None else run.groups[run.columns[metric.among] == 1]
    return groups if len(np.unique(groups)) < len(groups) else None


def sample_words(samples: int, groups: int | None) -> str:
    """ "128 samples in 32 groups"."""
    return pluralize(samples, "sample") + (f" in {pluralize(groups, 'group')}" if groups else "")


def interval_words(interval: Interval | None, *, sign: str = "") -> str:
    return f" [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]" if interval else ""


def difference_words(ours: str, theirs: str, difference: Difference) -> str:
    """The verdict as a sentence without its full stop: what is claimed, how far apart they are, what would settle it.

    If each was trained once, the sentence is about their models, and has the corrected p-value.
    """
    interval, sure = difference.interval, ""
    amount = f"{difference.mean:+.3f}"
    if difference.of_recipes:
        amount += f", {difference.relative:+.0%}" if difference.relative is not None else ""
        amount += f", likely between {interval.low:+.3f} and {interval.high:+.3f}" if interval else ""
    else:
        ours, theirs, sure = f"the model of {ours}", f"that of {theirs}", f", p {p_words(difference.adjusted_p)}"
        amount += interval_words(interval, sign="+")
    match difference.verdict:
        case "too few samples":
            return f"{_too_few(difference.samples, difference.groups)} {ours} from {theirs} ({amount})"
        case "no difference shown" if sure or difference.is_tiny:
            return f"no difference shown between {ours} and {theirs} ({amount}{sure})"
        case "no difference shown":
            needed = difference.seeds_needed()
            more = f"about {needed} seeds of each" if needed else "more samples, and not only more seeds,"
            settle = f"{more} would settle whether a difference as large as that is real"
            return f"not settled whether {ours} or {theirs} is better ({amount}); {settle}"
        case "as good":
            return f"{ours} is as good as {theirs}: the two differ by less than {difference.matters:g} ({amount})"
        case verdict:
            return f"{ours} is {verdict} than {theirs} by {'less than 0.001' if difference.is_tiny else amount}{sure}"


def p_words(p_value: float) -> str:
    return f"{p_value:.3f}" if p_value >= 0.0005 else "< 0.001"


def _baseline_of(params: Params, recipe_name: str) -> str:
    """The baseline of the base that a recipe comes from, through all the recipes it continues."""
    base, task = params.root(recipe_name), params.recipes[recipe_name].task
    if base.startswith("builds/"):
        base = params.builds[base.removeprefix("builds/")].base
    for name, baseline in params.baselines.items():
        if baseline.base == base and baseline.task == task:
            return name
    return f"base-{base.removeprefix('bases/')}"


def _refuse_incomplete(report: TaskReport, run: Run) -> None:
    """Raise UserError if there are no samples, or if a metric of metrics.json is missing or not that of the
    predictions."""
    fix = rebuild(run.stage)
    if not run.samples:
        raise UserError(f"{run.name} was evaluated on no sample; rebuild it with: {fix}")
    for metric in report.metrics:
        recorded = run.metrics.get(metric.key)
        if not isinstance(recorded, int | float) and not (metric.optional and recorded in (None, UNAVAILABLE)):
            raise UserError(f"metrics.json of {run.name} has no number {metric.key}; rebuild it with: {fix}")
        if not metric.evidence or len(evidence := evidence_of(metric, run)) == 0:
            continue
        value = float(metric.statistic(evidence.mean(axis=0)))
        if not isinstance(recorded, int | float) or not abs(recorded - value) < 1e-3:  # metrics.json may be rounded
            shown = f"{recorded:.4f}" if isinstance(recorded, int | float) else "nothing"
            raise UserError(
                f"metrics.json of {run.name} has {metric.key} {shown}, its predictions.parquet gives {value:.4f}; "
                f"one of them is stale: {fix}"
            )


def _why_left_out(contender: Contender, by_name: Mapping[str, Contender], *, over_seeds: bool) -> str:
    """The reason why a contender takes no part in a comparison; empty if it does."""
    if not contender.runs:
        return f"not run: dvc repro {contender.stage}"
    if contender.export_of and (model := by_name[contender.export_of]).runs:
        made = export_pairs(contender, model)
        if not made:
            return f"{contender.name} is of another model of {model.name}: dvc repro {model.stage} {contender.stage}"
        return f"only one model of {contender.name} was scored" if over_seeds and len(made) == 1 else ""
    seeds = {run.plan.seed if run.plan else number for number, run in enumerate(contender.runs)}
    if over_seeds and contender.baseline is not None and len(seeds) == 1:
        return f"{contender.name} was trained under one seed only"
    if len(seeds) < len(contender.runs):
        return f"{contender.name} was not trained under a seed of its own each time"
    return ""


def _questions(report: TaskReport, by_name: Mapping[str, Contender]) -> Iterator[Question]:
    """The report's own, then every recipe against the base it comes from, on each guard too, and against each answers
    file, and every export against its model."""
    yield from (question for question in report.questions if {question.ours, question.theirs} <= by_name.keys())
    recipes = {name: contender.baseline for name, contender in by_name.items() if contender.baseline is not None}
    against_base = [(name, base) for name, base in recipes.items() if base in by_name]
    for name, base in against_base:
        yield Question(f"{name} against its base", name, base)
    for metric in (metric for metric in report.metrics if metric.guard):
        for name, base in against_base:
            yield Question(f"{name} against its base, on {metric.guard}", name, base, metric.key)
    for given in (name for name, contender in by_name.items() if contender.answers):
        for name in recipes:
            yield Question(f"{name} against {given}", name, given)
    for name, contender in by_name.items():
        if contender.export_of:
            yield Question(f"{name} against {contender.export_of}", name, contender.export_of)


def _insight(
    report: TaskReport, question: Question, by_name: Mapping[str, Contender], matters: float | None
) -> Insight:
    """The verdict on a question, not yet corrected for their number."""
    ours, theirs = by_name[question.ours], by_name[question.theirs]
    metric = next(metric for metric in report.measured if metric.key == (question.metric or report.primary.key))
    undecided = "; ".join(filter(None, dict.fromkeys([ours.left_out, theirs.left_out])))
    if not undecided and ours.scores[metric.key] is None:
        undecided = f"no sample is about {metric.heading}"
    gap = None
    if not undecided:
        together = [each for each in by_name.values() if each.is_ranked and each.scores[metric.key] is not None]
        runs = {each.name: each.runs for each in together}
        if ours.export_of:
            exported, models = zip(*export_pairs(ours, theirs), strict=True)
            runs = {ours.name: exported, theirs.name: models}
        gap = difference(
            [np.stack([evidence_of(metric, run) for run in of_name]) for of_name in runs.values()],
            (list(runs).index(ours.name), list(runs).index(theirs.name)),
            statistic=metric.statistic,
            groups=groups_of(metric, ours.runs[0]),
            higher_is_better=metric.higher_is_better,
            matters=matters if metric is report.primary else None,
            paired=ours.export_of is not None,
        )
    return Insight(question.topic, ours.name, theirs.name, metric, gap, undecided)


def _corrected(insights: Sequence[Insight], *, over_seeds: bool) -> list[Insight]:
    """The insights; those with a verdict are corrected as one family."""
    decided = [insight for insight in insights if insight.difference]
    # Equal by one metric is not equal by another, and which two the last question is about is not known before.
    subjects = [_BEST if each.topic == _BEST else each.metric.key for each in decided]
    pairs = [((subject, each.ours), (subject, each.theirs)) for subject, each in zip(subjects, decided, strict=True)]
    differences = [each.difference for each in decided if each.difference]
    corrected = iter(as_family(differences, pairs if over_seeds else None))
    return [replace(each, difference=next(corrected)) if each.difference else each for each in insights]


def _too_few(samples: int, groups: int | None) -> str:
    return f"{sample_words(samples, groups)} {'is' if samples == 1 else 'are'} too few to tell"
