"""Answers beside the truth, as pictures to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from stages.kit.evaluation.examples import draw_answer, write_examples
from stages.tasks.moe.samples.records import Record


def write_pictures(
    records: Sequence[Record], rows: Sequence[Mapping[str, Any]], out_dir: Path, *, count: int = 3, seed: int = 0
) -> list[Path]:
    """Write the examples by `token_probability` (`write_examples`). rows: of metrics.score, one for each record."""
    assert len(records) == len(rows), f"{len(rows)} rows for {len(records)} records"
    return write_examples(
        rows, "token_probability", lambda index: draw_row(rows[index]), out_dir, count=count, seed=seed
    )


def draw_row(row: Mapping[str, Any]) -> Image.Image:
    figure = f"probability of a token {row['token_probability']:.2f}   {row['domain']}, {row['id']}"
    return draw_answer(figure, row["question"], row["truth"], row["text"])
