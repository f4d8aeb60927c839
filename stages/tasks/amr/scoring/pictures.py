"""Predictions beside the truth, to be read: as pictures for the report, and as text."""

from __future__ import annotations

import itertools
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from PIL import Image, ImageDraw, ImageFont

from stages.kit.evaluation.examples import chosen_examples
from stages.tasks.amr.samples.graphs import penman_lines, read_graph
from stages.tasks.amr.samples.records import Record

EXAMPLES = "examples.txt"
TRUTH_COLOUR = (0, 125, 50)
PREDICTION_COLOUR = (190, 20, 20)
_INK = (30, 30, 30)
_WIDTH = 512
"""Pixels, the most that a report shows unscaled; as many columns as fit at the font's size."""
_FONT_SIZE, _LINE_HEIGHT, _MARGIN = 12, 16, 8
_COLUMNS = (_WIDTH - 2 * _MARGIN) * 1000 // (602 * _FONT_SIZE)  # an advance of 0.602 em, as DejaVu Sans Mono has it
_MAX_LINES = 60
"""Of one graph; an answer that repeats itself has hundreds."""
_TEXT_COLUMNS = 72
_NUM_EXAMPLES = 5

Lines = list[tuple[str, tuple[int, int, int]]]
"""Text with its colour."""


def write_pictures(
    records: Sequence[Record], rows: Sequence[Mapping[str, Any]], out_dir: Path, *, count: int = 3, seed: int = 0
) -> list[Path]:
    """Write best-1.png ..., worst-1.png ... (by `f1`, 1 the most extreme) and random-1.png ..., and EXAMPLES, which
    sets the worst and the median graphs side by side with their predictions.

    rows: of metrics.score, one for each record.
    count: of each kind of picture, fewer where there are fewer records.
    seed: of the random choice, which is the same for every model on the same records, so that models compare.
    """
    assert len(records) == len(rows), f"{len(rows)} rows for {len(records)} records"
    by_f1 = sorted(range(len(rows)), key=lambda index: rows[index]["f1"])
    out_dir.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, indices in chosen_examples(rows, "f1", count=count, seed=seed).items():
        for rank, index in enumerate(indices, start=1):
            path = out_dir / f"{kind}-{rank}.png"
            draw_prediction(rows[index]).save(path, optimize=True)
            written.append(path)
    middle = max(0, (len(rows) - _NUM_EXAMPLES) // 2)
    parts = {"worst": by_f1[:_NUM_EXAMPLES], "median": by_f1[middle : middle + _NUM_EXAMPLES]}
    examples = [side_by_side(kind, rows[index]) for kind, indices in parts.items() for index in indices]
    (out_dir / EXAMPLES).write_text("\n".join(examples), encoding="utf-8")
    return [*written, out_dir / EXAMPLES]


def draw_prediction(row: Mapping[str, Any]) -> Image.Image:
    """One sample as an RGB picture: the sentence, the true graph in green, and below it the predicted one in red."""
    lines: Lines = [(line, _INK) for line in _wrapped(f"{_figure(row)}   {row['id']}", _COLUMNS)]
    lines += [(line, _INK) for line in _wrapped(row["sentence"], _COLUMNS)]
    lines += [("", _INK), *((line, TRUTH_COLOUR) for line in _graph_lines(row["truth"], _COLUMNS))]
    lines += [("", _INK), *((line, PREDICTION_COLOUR) for line in _predicted_lines(row, _COLUMNS))]
    font_path = Path(mpl.get_data_path()) / "fonts/ttf/DejaVuSansMono.ttf"  # it has all of Vietnamese
    font = ImageFont.truetype(str(font_path), _FONT_SIZE)
    image = Image.new("RGB", (_WIDTH, len(lines) * _LINE_HEIGHT + 2 * _MARGIN), "white")
    draw = ImageDraw.Draw(image)
    for number, (line, colour) in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + number * _LINE_HEIGHT), line, fill=colour, font=font)
    return image


def side_by_side(kind: str, row: Mapping[str, Any]) -> str:
    """One sample as text: the true graph on the left, the predicted one on the right."""
    truth, predicted = _graph_lines(row["truth"], _TEXT_COLUMNS), _predicted_lines(row, _TEXT_COLUMNS)
    table = itertools.zip_longest(["gold", "", *truth], ["predicted", "", *predicted], fillvalue="")
    body = "\n".join(f"{left:<{_TEXT_COLUMNS}} | {right}".rstrip() for left, right in table)
    return f"== {kind}: {_figure(row)}, {row['id']}\n{row['sentence']}\n\n{body}\n"


def _figure(row: Mapping[str, Any]) -> str:
    counts = f"{row['matched']} of {row['predicted']} predicted and {row['gold']} gold triples"
    return f"F1 {row['f1']:.2f}, {counts}" if row["valid"] else "F1 0.00, no graph"


def _predicted_lines(row: Mapping[str, Any], columns: int) -> list[str]:
    if row["valid"]:
        return _graph_lines(row["prediction"], columns)
    return _cut([*_wrapped(row["problem"], columns), *_wrapped(row["text"], columns)])


def _graph_lines(graph: str, columns: int) -> list[str]:
    lines = penman_lines(read_graph(graph)).split("\n")
    return _cut([part for line in lines for part in _wrapped(line, columns)])


def _wrapped(text: str, columns: int) -> list[str]:
    """Lines of at most so many characters, those that go on indented like the first."""
    composed = "".join(char if char.isprintable() else " " for char in unicodedata.normalize("NFC", text))
    indent = " " * min(len(composed) - len(composed.lstrip()), columns // 2)
    return textwrap.wrap(composed.strip(), columns, initial_indent=indent, subsequent_indent=indent + "  ") or [""]


def _cut(lines: list[str]) -> list[str]:
    left_out = len(lines) - _MAX_LINES
    return lines if left_out <= 0 else [*lines[:_MAX_LINES], f"... {left_out} more lines"]
