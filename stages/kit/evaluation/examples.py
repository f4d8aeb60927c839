"""Which samples a report shows of a model, and their pictures."""

from __future__ import annotations

import random
import textwrap
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from PIL import Image, ImageDraw, ImageFont

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
    rows: Sequence[Mapping[str, Any]],
    score: str,
    draw: Callable[[int], Image.Image],
    out_dir: Path,
    *,
    count: int,
    seed: int,
) -> list[Path]:
    """Write best-1.png ..., worst-1.png ... (by `score`, 1 the most extreme) and random-1.png ..., and return them.

    draw: the picture of the row at a position. The others as in `chosen_examples`.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, indices in chosen_examples(rows, score, count=count, seed=seed).items():
        for rank, index in enumerate(indices, start=1):
            written.append(out_dir / f"{kind}-{rank}.png")
            draw(index).save(written[-1], optimize=True)
    return written


def chosen_examples(rows: Sequence[Mapping[str, Any]], score: str, *, count: int, seed: int) -> dict[str, list[int]]:
    """Positions of the `best` and the `worst` rows by `score`, the most extreme first, and of `random` ones.

    count: of each kind, fewer where there are fewer rows.
    seed: of the random choice, which is the same for every model on the same records, so that models compare.
    """
    ordered = sorted(range(len(rows)), key=lambda index: rows[index][score])
    count = min(count, len(rows))
    return {
        "best": ordered[::-1][:count],
        "worst": ordered[:count],
        "random": random.Random(seed).sample(range(len(rows)), count),
    }


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


def wrapped(text: str, columns: int = COLUMNS) -> list[str]:
    """Lines of at most so many characters, those that go on indented a little more than the first."""
    composed = "".join(char if char.isprintable() else " " for char in unicodedata.normalize("NFC", text))
    indent = " " * min(len(composed) - len(composed.lstrip()), columns // 2)
    return textwrap.wrap(composed.strip(), columns, initial_indent=indent, subsequent_indent=indent + "  ") or [""]


def first_lines(lines: list[str], count: int) -> list[str]:
    """At most so many; an answer that repeats itself has hundreds."""
    left_out = len(lines) - count
    return lines if left_out <= 0 else [*lines[:count], f"... {left_out} more lines"]
