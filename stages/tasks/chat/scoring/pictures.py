"""Answers beside the reference ones, as pictures to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from stages.kit.evaluation.examples import draw_answer, write_examples
from stages.tasks.chat.samples.records import Record
from stages.tasks.chat.scoring.metrics import COLUMNS


def write_pictures(
    records: Sequence[Record], rows: Sequence[Mapping[str, Any]], out_dir: Path, *, count: int = 3, seed: int = 0
) -> list[Path]:
    """Write the examples by the dataset's first metric (`write_examples`). rows: of metrics.score, one for each
    record."""
    assert len(records) == len(rows), f"{len(rows)} rows for {len(records)} records"
    score = COLUMNS[records[0].metrics[0]][0]

    def draw(index: int) -> Image.Image:
        row = rows[index]
        figure = f"{score.replace('_', ' ')} {row[score]:.2f}   {row['id']}"
        return draw_answer(figure, row["question"], row["truth"], row["text"])

    return write_examples(rows, score, draw, out_dir, count=count, seed=seed)
