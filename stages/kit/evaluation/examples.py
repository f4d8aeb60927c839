"""Which samples a report shows of a model, and their pictures."""

from __future__ import annotations

import random
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib as mpl
from PIL import Image, ImageDraw, ImageFont

EXAMPLES = 3
"""Pictures of each kind."""
INK, TRUTH_INK, PREDICTION_INK = (30, 30, 30), (0, 125, 50), (190, 20, 20)
"""Colours of texts."""
_WIDTH = 512
"""Pixels, the most that a report shows unscaled; as many columns as fit at the font's size."""
_FONT_SIZE, _LINE_HEIGHT, _MARGIN = 12, 16, 8
COLUMNS = (_WIDTH - 2 * _MARGIN) * 1000 // (602 * _FONT_SIZE)  # an advance of 0.602 em, as DejaVu Sans Mono has it
"""Characters in a line of a picture of text."""
_MAX_LINES = 30
"""Lines of one text of an answer's picture."""

Lines = list[tuple[str, tuple[int, int, int]]]
"""Text with its colour."""


def write_examples(
    records: Sequence[Any], rows: Sequence[Mapping[str, Any]], scoring: ModuleType, out_dir: Path
) -> None:
    """Write best-1.png ..., worst-1.png ..., 1 the most extreme, and random-1.png ...: EXAMPLES of each at most.

    rows: of the task's `scoring`, one for each record. The random ones are the same for every model on the same
    records, so that models compare.
    """
    assert len(records) == len(rows), f"{len(rows)} rows for {len(records)} records"
    score = scoring.ordered_by(records[0])
    ordered = sorted(range(len(rows)), key=lambda index: rows[index][score])
    chosen = {
        "best": ordered[::-1][:EXAMPLES],
        "worst": ordered[:EXAMPLES],
        "random": random.Random(0).sample(range(len(rows)), min(EXAMPLES, len(rows))),
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    for kind, indices in chosen.items():
        for rank, index in enumerate(indices, start=1):
            picture = scoring.draw_prediction(records[index], rows[index])
            picture.save(out_dir / f"{kind}-{rank}.png", optimize=True)


def text_picture(lines: Lines) -> Image.Image:
    """Lines of at most COLUMNS characters as an RGB picture."""
    font_path = Path(mpl.get_data_path()) / "fonts/ttf/DejaVuSansMono.ttf"  # it has all of Vietnamese
    font = ImageFont.truetype(str(font_path), _FONT_SIZE)
    image = Image.new("RGB", (_WIDTH, len(lines) * _LINE_HEIGHT + 2 * _MARGIN), "white")
    draw = ImageDraw.Draw(image)
    for number, (line, colour) in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + number * _LINE_HEIGHT), line, fill=colour, font=font)
    return image


def draw_answer(figure: str, question: str, truth: str, answer: str) -> Image.Image:
    """One sample: a line about it, the question, the true answer in green, and below it the model's in red."""
    answer = answer if answer.strip() else "(no answer)"
    texts = ((figure, INK), (question, INK), (truth, TRUTH_INK), (answer, PREDICTION_INK))
    return text_picture([(line, ink) for text, ink in texts for line in (*first_lines(wrapped(text), _MAX_LINES), "")])


def wrapped(text: str) -> list[str]:
    """Lines of at most COLUMNS characters, those that go on indented a little more than the first."""
    composed = "".join(char if char.isprintable() else " " for char in unicodedata.normalize("NFC", text))
    indent = " " * min(len(composed) - len(composed.lstrip()), COLUMNS // 2)
    return textwrap.wrap(composed.strip(), COLUMNS, initial_indent=indent, subsequent_indent=indent + "  ") or [""]


def first_lines(lines: list[str], count: int) -> list[str]:
    """At most so many; an answer that repeats itself has hundreds."""
    left_out = len(lines) - count
    return lines if left_out <= 0 else [*lines[:count], f"... {left_out} more lines"]
