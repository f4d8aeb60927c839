"""Scores of completions against reference answers, by the metrics that the dataset names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import sacrebleu
from PIL import Image

from stages.core.errors import UserError
from stages.data.groups import groups_of
from stages.data.texts import TextMetric, composed
from stages.evaluation.score import rouge, token_f1
from stages.evaluation.statistics import figures, perplexity
from stages.tasks.chat.samples import Record, field_accuracy, json_fields, without_thinking

if TYPE_CHECKING:
    from stages.evaluation.likelihood import AnswerLikelihood

COLUMNS: dict[TextMetric, tuple[str, ...]] = {
    "exact": ("exact",),
    "token_f1": ("token_f1",),
    "rouge_l": ("rouge_l",),
    "chrf": ("chrf",),
    "json": ("field_accuracy", "json_valid"),
    "perplexity": ("token_probability", "nats", "tokens"),
}
"""Columns of predictions.parquet by metric; samples are ranked by the first, which is from 0 to 1. A column's mean is
a figure of metrics.json, except for perplexity."""

_MEASURES: dict[TextMetric, Callable[[str, str], tuple[float, ...]]] = {
    "exact": lambda text, truth: (float(composed(text).strip() == composed(truth).strip()),),
    "token_f1": lambda text, truth: (token_f1(text, truth),),
    "rouge_l": lambda text, truth: (rouge("rougeL", text, truth, of_any_language=True),),
    "chrf": lambda text, truth: (sacrebleu.sentence_chrf(text, [truth]).score / 100,),
    "json": lambda text, truth: (field_accuracy(text, truth), float(json_fields(text) is not None)),
}
"""Values of the columns from a completion and its reference."""

PREDICTIONS = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "question", "text", "truth")),
        *((name, pa.float64()) for names in COLUMNS.values() for name in names),
    ]
)
"""Columns of predictions.parquet; those of other metrics are null. `nats` is the negative log-likelihood of a
conversation's reference answers, `tokens` their number with the ends of turns, and `token_probability` the geometric
mean of these tokens' probabilities."""

SUMMARY = ("perplexity", *(name for names in COLUMNS.values() for name in names), "samples")
"""Figures of metrics.json that the log shows."""

_MAX_IMAGES = 4
"""Images of a conversation that an example shows."""
_WIDTH = 512
"""Pixels of them in a row."""


def score(
    records: Sequence[Record],
    completions: Sequence[str],
    *,
    answer_format: None = None,
    likelihoods: Sequence[AnswerLikelihood] = (),
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Score completions, one for each record.

    likelihoods: those of `samples.candidates`, in its order; none for another system's completions, which leaves the
    perplexity out.
    Returns (metrics, rows): the figures of metrics.json, each with its 95% interval as KEY_low and KEY_high, and the
    rows of predictions.parquet in the order of the records.
    """
    assert len(likelihoods) in (0, len(records)), f"{len(likelihoods)} likelihoods for {len(records)} records"
    chosen = [metric for metric in records[0].metrics if likelihoods or metric != "perplexity"]
    if not chosen or chosen[0] != records[0].metrics[0]:
        raise UserError("models are ranked by perplexity, which takes a model; put another of the metrics first")
    rows = []
    for number, (record, text) in enumerate(zip(records, completions, strict=True)):
        row: dict[str, Any] = dict.fromkeys(PREDICTIONS.names)
        row |= {"id": record.id, "question": record.asked, "text": text, "truth": record.answer}
        for metric in chosen:
            if metric == "perplexity":
                likelihood = likelihoods[number]
                probability = float(np.exp(likelihood.sum_logprob / likelihood.num_tokens))
                values: tuple[float, ...] = (probability, -likelihood.sum_logprob, float(likelihood.num_tokens))
            else:
                values = _MEASURES[metric](without_thinking(text), without_thinking(record.answer))
            row |= dict(zip(COLUMNS[metric], values, strict=True))
        rows.append(row)

    def columns(*names: str) -> np.ndarray:
        return np.array([[row[name] for name in names] for row in rows], dtype=np.float64)

    metrics: dict[str, Any] = {"samples": len(rows)}
    groups = groups_of(records)
    for metric in chosen:
        if metric == "perplexity":
            metrics |= figures(metric, columns("nats", "tokens"), perplexity, groups)
        else:
            for name in COLUMNS[metric]:
                metrics |= figures(name, columns(name), groups=groups)
    return metrics | {
        "empty_rate": sum(not without_thinking(text).strip() for text in completions) / len(completions)
    }, rows


def ordered_by(record: Record) -> str:
    """The column that ranks samples from worst to best: that of the dataset's first metric."""
    return COLUMNS[record.metrics[0]][0]


def example_image(record: Record, _: Mapping[str, Any]) -> Image.Image | None:
    """The last images of a conversation in a row, as one RGB image; None without any."""
    images = [image.open_image() for image in record.shown_images[-_MAX_IMAGES:]]
    if not images:
        return None
    for image in images:
        image.thumbnail((_WIDTH // len(images), _WIDTH // 2))
    drawn = Image.new("RGB", (_WIDTH, max(image.height for image in images)), "white")
    for place, image in enumerate(images):
        drawn.paste(image, (place * _WIDTH // len(images), 0))
    return drawn
