"""How near answers come to the reference ones, by the metrics that the dataset names."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import sacrebleu

from stages.kit.data.conversation import Conversation
from stages.kit.data.texts import TextMetric
from stages.kit.evaluation.score import rouge, token_f1
from stages.kit.statistics import figures, perplexity
from stages.tasks.chat.samples.fields import field_accuracy, parsed
from stages.tasks.chat.samples.questions import conversation
from stages.tasks.chat.samples.records import Record

if TYPE_CHECKING:
    from stages.kit.evaluation.likelihood import AnswerLikelihood

COLUMNS: dict[TextMetric, tuple[str, ...]] = {
    "exact": ("exact",),
    "token_f1": ("token_f1",),
    "rouge_l": ("rouge_l",),
    "chrf": ("chrf",),
    "json": ("field_accuracy", "json_valid"),
    "perplexity": ("token_probability", "nats", "tokens"),
}
"""Per-sample columns of each metric, the one of 0 to 1 that samples are ordered by first. But for the perplexity, the
mean of each column is a figure."""

PREDICTIONS = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "question", "text", "truth")),
        *((name, pa.float64()) for names in COLUMNS.values() for name in names),
    ]
)
"""Of predictions.parquet; columns of metrics that the dataset does not name are null. `nats` is the negative
log-likelihood of the reference answers of a conversation, `tokens` theirs, the ends of their turns included, and
`token_probability` the geometric mean of these tokens' probabilities."""


def candidates(records: Sequence[Record], *, answer_format: None = None) -> list[Conversation]:
    """The answered conversations whose likelihoods `score` needs: all where perplexity is a metric, else none."""
    return [conversation(record, answered=True) for record in records if "perplexity" in record.metrics]


def score(
    records: Sequence[Record],
    answers: Sequence[str],
    *,
    answer_format: None = None,
    likelihoods: Sequence[AnswerLikelihood] = (),
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Score raw answers, one for each record.

    likelihoods: of `candidates`, in its order.
    Returns (metrics, rows): the flat figures of metrics.json, each with its 95% interval as KEY_low and KEY_high, and
    the rows of predictions.parquet in the order of the records.
    """
    assert len(records) == len(answers) > 0, f"{len(answers)} answers for {len(records)} records"
    chosen = records[0].metrics
    weighed: Sequence[AnswerLikelihood | None] = likelihoods or [None] * len(records)
    assert len(weighed) == len(records), f"{len(likelihoods)} likelihoods for {len(records)} records"
    rows = [_row(*sample, chosen) for sample in zip(records, answers, weighed, strict=True)]
    metrics: dict[str, Any] = {"samples": len(rows)}
    for metric in chosen:
        if metric == "perplexity":
            metrics |= figures(metric, _columns(rows, "nats", "tokens"), perplexity)
        else:
            for name in COLUMNS[metric]:
                metrics |= figures(name, _columns(rows, name))
    return metrics | {"empty_rate": sum(not text.strip() for text in answers) / len(answers)}, rows


def summary(metrics: Mapping[str, Any]) -> str:
    """The figures in a line."""
    names = ("perplexity", *(name for names in COLUMNS.values() for name in names))
    return ", ".join(f"{name.replace('_', ' ')} {metrics[name]:.3f}" for name in names if name in metrics)


def _row(
    record: Record, text: str, likelihood: AnswerLikelihood | None, chosen: Sequence[TextMetric]
) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(PREDICTIONS.names)
    row |= {"id": record.id, "question": record.question(), "text": text, "truth": record.answer}
    for metric in chosen:
        values = _likelihood(likelihood) if metric == "perplexity" else _values(metric, text, record.answer)
        row |= dict(zip(COLUMNS[metric], values, strict=True))
    return row


def _values(metric: TextMetric, text: str, truth: str) -> tuple[float, ...]:
    if metric == "exact":
        return (float(_plain(text) == _plain(truth)),)
    if metric == "token_f1":
        return (token_f1(text, truth),)
    if metric == "rouge_l":
        return (rouge(text, truth, ("rougeL",), of_any_language=True)["rougeL"],)
    if metric == "chrf":
        return (sacrebleu.sentence_chrf(text, [truth]).score / 100,)
    assert metric == "json", metric
    return field_accuracy(text, truth), float(parsed(text) is not None)


def _likelihood(found: AnswerLikelihood | None) -> tuple[float, ...]:
    assert found is not None, "a dataset with perplexity has likelihoods"
    return float(np.exp(found.sum_logprob / found.num_tokens)), -found.sum_logprob, float(found.num_tokens)


def _plain(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()


def _columns(rows: Sequence[Mapping[str, Any]], *names: str) -> np.ndarray:
    return np.array([[row[name] for name in names] for row in rows], dtype=np.float64)
