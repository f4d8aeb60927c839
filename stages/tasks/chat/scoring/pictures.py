"""Answers beside the reference ones, as pictures to be read, below the pictures that are asked about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from stages.kit.evaluation.score import draw_answer
from stages.tasks.chat.samples.records import Picture, Record
from stages.tasks.chat.scoring.metrics import COLUMNS


def ordered_by(record: Record) -> str:
    """The column by which samples are the best and the worst: of the dataset's first metric."""
    return COLUMNS[record.metrics[0]][0]


def draw_prediction(record: Record, row: Mapping[str, Any]) -> Image.Image:
    score = ordered_by(record)
    figure = f"{score.replace('_', ' ')} {row[score]:.2f}   {row['id']}"
    return _below(record.pictures, draw_answer(figure, row["question"], row["truth"], row["text"]))


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
