"""Answers beside the truth, as pictures to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from stages.kit.evaluation.examples import (
    INK,
    PREDICTION_INK,
    TRUTH_INK,
    first_lines,
    text_picture,
    wrapped,
    write_examples,
)
from stages.tasks.moe.samples.records import Record

_MAX_LINES = 30
"""Of one text."""


def write_pictures(
    records: Sequence[Record], rows: Sequence[Mapping[str, Any]], out_dir: Path, *, count: int = 3, seed: int = 0
) -> list[Path]:
    """Write the examples by `token_probability` (`write_examples`). rows: of metrics.score, one for each record."""
    assert len(records) == len(rows), f"{len(rows)} rows for {len(records)} records"
    return write_examples(
        rows, "token_probability", lambda index: draw_answer(rows[index]), out_dir, count=count, seed=seed
    )


def draw_answer(row: Mapping[str, Any]) -> Image.Image:
    """One sample as an RGB picture: the question, the best answer in green, and below it the model's in red."""
    figure = f"probability of a token {row['token_probability']:.2f}   {row['domain']}, {row['id']}"
    answer = row["text"] if row["text"].strip() else "(no answer)"
    texts = ((figure, INK), (row["question"], INK), (row["truth"], TRUTH_INK), (answer, PREDICTION_INK))
    return text_picture([(line, ink) for text, ink in texts for line in (*first_lines(wrapped(text), _MAX_LINES), "")])
