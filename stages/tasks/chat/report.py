"""Comparison of chat models by the metrics that the dataset names, ranked by the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stages.core.errors import UserError
from stages.core.params.schema import DatasetParams
from stages.data.texts import TEXT_METRICS, TextMetric
from stages.evaluation.statistics import perplexity
from stages.reporting.compare import Metric, Question, TaskReport

METRICS = (
    Metric(
        *("token_f1", "Token F1", ".3f"),
        "Words that the completion shares with the reference, in any order, as F1 of each sample: SQuAD's, without "
        "case, punctuation and English articles.",
    ),
    Metric(
        *("exact", "Exact", ".1%"),
        "Share of the completions that are the reference, letter by letter, but for white space around them.",
    ),
    Metric(
        *("rouge_l", "ROUGE-L", ".3f"),
        "F-measure of the longest sequence of words, with gaps, that completion and reference have in common.",
    ),
    Metric(
        *("chrf", "chrF", ".3f"),
        "F-score of sequences of one to six letters that completion and reference share, recall counting twice; "
        "the mean over the samples.",
    ),
    Metric(
        *("field_accuracy", "Fields", ".3f"),
        "Share of a sample's JSON fields that are right, of all that completion or reference have; 0 for a "
        "completion that is no JSON. The mean over the samples.",
    ),
    Metric("json_valid", "Valid JSON", ".1%", "Share of the completions that are JSON from beginning to end."),
    Metric(
        *("perplexity", "Perplexity", ".2f"),
        "e to the mean negative log-likelihood of a token of the reference answers, the ends of their "
        "turns included. 1 is certainty; lower is better.",
        higher_is_better=False,
        optional=True,  # an answers file has none
        evidence=("nats", "tokens"),
        statistic=perplexity,
    ),
)
"""Columns of the table."""
_KEYS: dict[TextMetric, tuple[str, ...]] = {"json": ("field_accuracy", "json_valid")}
"""Columns by the metric's name in params.yaml, if they have others. Models are ranked by the first."""

RANKING = {
    "token_f1": "token F1",
    "exact": "share of exact completions",
    "rouge_l": "ROUGE-L",
    "chrf": "chrF",
    "field_accuracy": "field accuracy",
    "perplexity": "perplexity",
}
"""The metrics that models may be ranked by, as a sentence has them."""


def report_for(datasets: Mapping[str, DatasetParams]) -> TaskReport:
    """The report of runs on these datasets. Raises UserError if they name different metrics."""
    chosen = {name: tuple(dataset.reader.get("metrics", TEXT_METRICS)) for name, dataset in datasets.items()}
    if len(set(chosen.values())) > 1:
        named = "; ".join(f"{name}: {', '.join(metrics)}" for name, metrics in chosen.items())
        raise UserError(f"the datasets of the task chat name different metrics ({named}); give them the same ones")
    metrics = next(iter(chosen.values()), TEXT_METRICS)
    columns = {metric.key: metric for metric in METRICS}
    first, *others = (columns[key] for name in dict.fromkeys(metrics) for key in _KEYS.get(name, (name,)))
    first = replace(first, evidence=first.evidence or (first.key,))
    return TaskReport(
        task="chat",
        title="Chat",
        metrics=(first, *(replace(other, evidence=()) for other in others)),  # one interval, or it is too wide
        primary_words=RANKING[first.key],
        identity=("id", "question", "truth"),
        shown=("text",),
        questions=(Question("All weights against LoRA", "chat-full", "chat-lora"),),
    )
