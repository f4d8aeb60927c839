"""Answers beside the truth, as pictures to be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image

from stages.kit.evaluation.score import draw_answer
from stages.tasks.moe.samples.records import Record


def ordered_by(_: Record) -> str:
    """The column by which samples are the best and the worst."""
    return "token_probability"


def draw_prediction(_: Record, row: Mapping[str, Any]) -> Image.Image:
    figure = f"probability of a token {row['token_probability']:.2f}   {row['domain']}, {row['id']}"
    return draw_answer(figure, row["question"], row["truth"], row["text"])
