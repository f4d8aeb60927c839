"""Comparison of AMR parsers: the columns, the evidence, and the questions of the experiment."""

from __future__ import annotations

from stages.evaluation.statistics import corpus_f1
from stages.reporting.compare import Metric, Question, TaskReport

REPORT = TaskReport(
    task="amr",
    title="Vietnamese AMR parsing",
    metrics=(
        Metric(
            key="smatch_f1",
            heading="Smatch F1",
            format=".3f",
            meaning="Triples that predicted and true graphs share under the best mapping of their nodes, from 0 to 1, "
            "over all triples of all samples. A completion that is no graph counts as an empty one. Spaces and "
            "underscores within a concept, and case, make no difference. Of mtup, the second step.",
            evidence=("matched", "predicted", "gold"),
            statistic=corpus_f1,
        ),
        Metric(
            key="smatch_precision",
            heading="Precision",
            format=".3f",
            meaning="Share of the predicted triples that are right.",
        ),
        Metric(
            key="smatch_recall",
            heading="Recall",
            format=".3f",
            meaning="Share of the true triples that are predicted.",
        ),
        Metric(
            key="smatch_f1_unnormalised",
            heading="As written",
            format=".3f",
            meaning="Smatch F1 where a space and an underscore within a concept differ, as in the smatch package.",
        ),
        Metric(
            key="smatch_f1_repaired",
            heading="Repaired",
            format=".3f",
            meaning="Smatch F1 with the faults of broken completions cut out: open parentheses closed, the "
            "rest dropped.",
        ),
        Metric(
            key="smatch_f1_restored",
            heading="Restored",
            format=".3f",
            meaning="Of mtup, Smatch F1 of what a rule restores from the first step, which has no variables.",
            optional=True,
        ),
        Metric(
            key="invalid_rate",
            heading="Invalid",
            format=".1%",
            meaning="Share of completions that are no graph.",
        ),
    ),
    primary_words="Smatch F1",
    identity=("id", "sentence", "truth"),
    shown=("prediction", "problem", "text"),
    questions=(
        Question("Pointers against the baseline", "amr-ptr", "amr-baseline"),
        Question("MTUP against the baseline", "amr-mtup", "amr-baseline"),
        Question("MTUP against pointers", "amr-mtup", "amr-ptr"),
    ),
)
