"""Scores of completions against reference answers, by the metrics that the dataset names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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

_MEASURES: dict[str, Callable[[str, str], float]] = {
    "exact": lambda text, truth: float(composed(text).strip() == composed(truth).strip()),
    "token_f1": token_f1,
    "rouge_l": partial(rouge, "rougeL", of_any_language=True),
    "chrf": lambda text, truth: sacrebleu.sentence_chrf(text, [truth]).score / 100,
    "field_accuracy": field_accuracy,
    "json_valid": lambda text, _: float(json_fields(text) is not None),
}
"""Values of a column from a completion and its reference, for all columns but those of perplexity."""

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
    measured = [name for metric in chosen if metric != "perplexity" for name in COLUMNS[metric]]
    rows = []
    for number, (record, text) in enumerate(zip(records, completions, strict=True)):
        row: dict[str, Any] = dict.fromkeys(PREDICTIONS.names)
        row |= {"id": record.id, "question": record.asked, "text": text, "truth": record.answer}
        row |= {name: _MEASURES[name](without_thinking(text), without_thinking(record.answer)) for name in measured}
        if "perplexity" in chosen:
            nats, tokens = -likelihoods[number].sum_logprob, float(likelihoods[number].num_tokens)
            row |= {"token_probability": float(np.exp(-nats / tokens)), "nats": nats, "tokens": tokens}
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
    images = [image.open_image() for image in record.images[-_MAX_IMAGES:]]
    if not images:
        return None
    for image in images:
        image.thumbnail((_WIDTH // len(images), _WIDTH // 2))
    drawn = Image.new("RGB", (_WIDTH, max(image.height for image in images)), "white")
    for place, image in enumerate(images):
        drawn.paste(image, (place * _WIDTH // len(images), 0))
    return drawn
