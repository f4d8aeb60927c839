"""Comparison of AMR parsers: the columns, the evidence, and the questions of the experiment."""

from __future__ import annotations

from stages.evaluation.statistics import corpus_f1
from stages.reporting.compare import Metric, Question, TaskReport

REPORT = TaskReport(
    task="amr",
    title="Vietnamese AMR parsing",
    metrics=(
        Metric(
            *("smatch_f1", "Smatch F1", ".3f"),
            "Triples that predicted and true graphs share under the best mapping of their nodes, from 0 to 1, "
            "over all triples of all samples. A completion that is no graph counts as an empty one. Spaces and "
            "underscores within a concept, and case, make no difference. Of mtup, the second step.",
            evidence=("matched", "predicted", "gold"),
            statistic=corpus_f1,
        ),
        Metric("smatch_precision", "Precision", ".3f", "Share of the predicted triples that are right."),
        Metric("smatch_recall", "Recall", ".3f", "Share of the true triples that are predicted."),
        Metric(
            *("smatch_f1_unnormalised", "As written", ".3f"),
            "Smatch F1 where a space and an underscore within a concept differ, as in the smatch package.",
        ),
        Metric(
            *("smatch_f1_repaired", "Repaired", ".3f"),
            "Smatch F1 with the faults of broken completions cut out: open parentheses closed, the rest dropped.",
        ),
        Metric(
            *("smatch_f1_restored", "Restored", ".3f"),
            "Of mtup, Smatch F1 of what a rule restores from the first step, which has no variables.",
            optional=True,
        ),
        Metric("invalid_rate", "Invalid", ".1%", "Share of completions that are no graph."),
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
