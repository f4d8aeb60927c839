"""Answers beside the truth, as pictures to be read."""

from __future__ import annotations

import random
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from PIL import Image, ImageDraw, ImageFont

from stages.tasks.moe.samples.records import Record

TRUTH_COLOUR = (0, 125, 50)
PREDICTION_COLOUR = (190, 20, 20)
_INK = (30, 30, 30)
_WIDTH = 512
"""Pixels, the most that a report shows unscaled; as many columns as fit at the font's size."""
_FONT_SIZE, _LINE_HEIGHT, _MARGIN = 12, 16, 8
_COLUMNS = (_WIDTH - 2 * _MARGIN) * 1000 // (602 * _FONT_SIZE)  # an advance of 0.602 em, as DejaVu Sans Mono has it
_MAX_LINES = 30
"""Of one text; an answer that repeats itself has hundreds."""


def write_pictures(
    records: Sequence[Record], rows: Sequence[Mapping[str, Any]], out_dir: Path, *, count: int = 3, seed: int = 0
) -> list[Path]:
    """Write best-1.png ..., worst-1.png ... (by `token_probability`, 1 the most extreme) and random-1.png ...

    rows: of metrics.score, one for each record.
    count: of each kind of picture, fewer where there are fewer records.
    seed: of the random choice, which is the same for every model on the same records, so that models compare.
    """
    assert len(records) == len(rows), f"{len(rows)} rows for {len(records)} records"
    ascending = sorted(range(len(rows)), key=lambda index: rows[index]["token_probability"])
    count = min(count, len(rows))
    chosen = {
        "best": ascending[::-1][:count],
        "worst": ascending[:count],
        "random": random.Random(seed).sample(range(len(rows)), count),
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, indices in chosen.items():
        for rank, index in enumerate(indices, start=1):
            written.append(out_dir / f"{kind}-{rank}.png")
            draw_answer(rows[index]).save(written[-1], optimize=True)
    return written


def draw_answer(row: Mapping[str, Any]) -> Image.Image:
    """One sample as an RGB picture: the question, the best answer in green, and below it the model's in red."""
    figure = f"probability of a token {row['token_probability']:.2f}   {row['domain']}, {row['id']}"
    answer = row["text"] if row["text"].strip() else "(no answer)"
    texts = ((figure, _INK), (row["question"], _INK), (row["truth"], TRUTH_COLOUR), (answer, PREDICTION_COLOUR))
    lines = [(line, colour) for text, colour in texts for line in (*_wrapped(text), "")]
    font_path = Path(mpl.get_data_path()) / "fonts/ttf/DejaVuSansMono.ttf"
    font = ImageFont.truetype(str(font_path), _FONT_SIZE)
    image = Image.new("RGB", (_WIDTH, len(lines) * _LINE_HEIGHT + 2 * _MARGIN), "white")
    draw = ImageDraw.Draw(image)
    for number, (line, colour) in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + number * _LINE_HEIGHT), line, fill=colour, font=font)
    return image


def _wrapped(text: str) -> list[str]:
    """Its first lines, as many as are shown."""
    composed = "".join(char if char.isprintable() else " " for char in unicodedata.normalize("NFC", text))
    lines = textwrap.wrap(composed, _COLUMNS) or [""]
    left_out = len(lines) - _MAX_LINES
    return lines if left_out <= 0 else [*lines[:_MAX_LINES], f"... {left_out} more lines"]
