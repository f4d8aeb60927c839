"""Comparison of chat models by the metrics that the dataset names, ranked by the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stages.core.errors import UserError
from stages.core.params.schema import DatasetParams
from stages.kit.data.texts import TEXT_METRICS, TextMetric
from stages.kit.reporting.compare import Metric, Question, TaskReport
from stages.kit.statistics import perplexity

_JSON_VALID = Metric(
    key="json_valid",
    heading="Valid JSON",
    format=".1%",
    meaning="Share of the answers that are JSON from beginning to end.",
    evidence=("json_valid",),
)
METRICS: dict[TextMetric, tuple[Metric, ...]] = {
    "token_f1": (
        Metric(
            key="token_f1",
            heading="Token F1",
            format=".3f",
            meaning="Words that the answer shares with the reference, in any order, as F1 of each sample: SQuAD's, "
            "without case, punctuation and English articles.",
            evidence=("token_f1",),
        ),
    ),
    "exact": (
        Metric(
            key="exact",
            heading="Exact",
            format=".1%",
            meaning="Share of the answers that are the reference, letter by letter, but for white space around them.",
            evidence=("exact",),
        ),
    ),
    "rouge_l": (
        Metric(
            key="rouge_l",
            heading="ROUGE-L",
            format=".3f",
            meaning="F-measure of the longest sequence of words, with gaps, that answer and reference have in common.",
            evidence=("rouge_l",),
        ),
    ),
    "chrf": (
        Metric(
            key="chrf",
            heading="chrF",
            format=".3f",
            meaning="F-score of sequences of one to six letters that answer and reference share, recall counting "
            "twice; the mean over the samples.",
            evidence=("chrf",),
        ),
    ),
    "json": (
        Metric(
            key="field_accuracy",
            heading="Fields",
            format=".3f",
            meaning="Share of a sample's JSON fields that are right, of all that answer or reference have; 0 for an "
            "answer that is no JSON. The mean over the samples.",
            evidence=("field_accuracy",),
        ),
        _JSON_VALID,
    ),
    "perplexity": (
        Metric(
            key="perplexity",
            heading="Perplexity",
            format=".2f",
            meaning="e to the mean negative log-likelihood of a token of the reference answers, the ends of their "
            "turns included. 1 is certainty; lower is better.",
            higher_is_better=False,
            evidence=("nats", "tokens"),
            statistic=perplexity,
        ),
    ),
}
"""The columns of the table, by what params.yaml calls them; the first is the one to rank by."""

_WORDS = {
    "token_f1": "token F1",
    "exact": "share of exact answers",
    "rouge_l": "ROUGE-L",
    "chrf": "chrF",
    "field_accuracy": "field accuracy",
    "perplexity": "perplexity",
}
"""The figure to rank by, within a sentence."""


def report_for(datasets: Mapping[str, DatasetParams]) -> TaskReport:
    """The report of runs on these datasets. Raises UserError where they name different metrics."""
    chosen = {name: tuple(dataset.reader.get("metrics", TEXT_METRICS)) for name, dataset in datasets.items()}
    if len(set(chosen.values())) > 1:
        said = "; ".join(f"{name}: {', '.join(metrics)}" for name, metrics in chosen.items())
        raise UserError(f"the datasets of the task chat name different metrics ({said}); give them the same ones")
    metrics = next(iter(chosen.values()), TEXT_METRICS)
    first, *others = (column for name in dict.fromkeys(metrics) for column in METRICS[name])
    score = "token_probability" if first.key == "perplexity" else first.key
    return TaskReport(
        task="chat",
        title="Chat",
        metrics=(first, *(replace(other, evidence=()) for other in others)),  # one interval, or it is too wide
        primary_words=_WORDS[first.key],
        identity=("id", "question", "truth"),
        score=score,
        score_heading=f"{score.replace('_', ' ')} of an answer",
        questions=(Question("All weights against LoRA", "chat-full", "chat-lora"),),
    )
