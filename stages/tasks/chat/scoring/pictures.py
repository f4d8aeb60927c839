"""Answers beside the reference ones, as pictures to be read, below the pictures that are asked about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from stages.kit.evaluation.examples import draw_answer, write_examples
from stages.tasks.chat.samples.records import Picture, Record
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
        return _below(records[index].pictures, draw_answer(figure, row["question"], row["truth"], row["text"]))

    return write_examples(rows, score, draw, out_dir, count=count, seed=seed)


def _below(pictures: Sequence[Picture], texts: Image.Image) -> Image.Image:
    """The texts below the last pictures of a conversation, in a row and made smaller where there is no room."""
    if not pictures:
        return texts
    some = [picture.open_image() for picture in pictures[-_MOST:]]
    width = texts.width // len(some)
    for one in some:
        one.thumbnail((width, texts.width // 2))
    top = max(one.height for one in some)
    image = Image.new("RGB", (texts.width, top + texts.height), "white")
    for place, one in enumerate(some):
        image.paste(one, (place * width, 0))
    image.paste(texts, (0, top))
    return image


_MOST = 4
"""Pictures of a conversation that are shown."""
