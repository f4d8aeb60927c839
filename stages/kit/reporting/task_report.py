"""What a task says about its report: the columns, the evidence behind them, the questions."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from stages.core.params.schema import Params
from stages.kit.statistics import Statistic, sample_mean

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
    """Per-sample columns from which `statistic` gives it, for an interval of its own; none where it has none."""
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


def chosen_report(module: ModuleType, params: Params, task: str) -> TaskReport:
    """The report of a task, from its module `report`: REPORT, or what `report_for` makes of the datasets that its runs
    are evaluated on."""
    if not hasattr(module, "report_for"):
        return module.REPORT
    subjects = [params.subject(name) for name in (*params.baselines, *params.recipes)]
    names = dict.fromkeys(subject.data for subject in subjects if subject.task == task)
    known = params.active.datasets
    return module.report_for({name: known[name] for name in names if name in known})


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """What a task says about itself, so that the comparison need not know it."""

    task: str
    """Its name in params.yaml."""
    title: str
    metrics: tuple[Metric, ...]
    """The columns of the table. The first one, which has evidence, is primary: models are ranked by it."""
    primary_words: str
    """The primary metric within a sentence."""
    identity: tuple[str, ...]
    """Columns of predictions.parquet that say what a sample is: its id, then its truth."""
    score: str
    """The per-sample column whose distribution is drawn, in 0..1."""
    score_heading: str
    questions: tuple[Question, ...]

    @property
    def primary(self) -> Metric:
        return self.metrics[0]

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The metrics with evidence, the primary one first."""
        return tuple(metric for metric in self.metrics if metric.evidence)

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
