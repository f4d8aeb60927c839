"""Predictions beside the truth, to be read: as pictures for the report, and as text."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from stages.kit.evaluation.examples import (
    COLUMNS,
    INK,
    PREDICTION_INK,
    TRUTH_INK,
    Lines,
    first_lines,
    text_picture,
    wrapped,
    write_examples,
)
from stages.tasks.amr.samples.graphs import penman_lines, read_graph
from stages.tasks.amr.samples.records import Record

EXAMPLES = "examples.txt"
_MAX_LINES = 60
"""Of one graph."""
_TEXT_COLUMNS = 72
_NUM_EXAMPLES = 5


def write_pictures(
    records: Sequence[Record], rows: Sequence[Mapping[str, Any]], out_dir: Path, *, count: int = 3, seed: int = 0
) -> list[Path]:
    """Write the examples by `f1` (`write_examples`), and EXAMPLES, which sets the worst and the median graphs side by
    side with their predictions.

    rows: of metrics.score, one for each record.
    """
    assert len(records) == len(rows), f"{len(rows)} rows for {len(records)} records"
    written = write_examples(rows, "f1", lambda index: draw_prediction(rows[index]), out_dir, count=count, seed=seed)
    by_f1 = sorted(range(len(rows)), key=lambda index: rows[index]["f1"])
    middle = max(0, (len(rows) - _NUM_EXAMPLES) // 2)
    parts = {"worst": by_f1[:_NUM_EXAMPLES], "median": by_f1[middle : middle + _NUM_EXAMPLES]}
    examples = [side_by_side(kind, rows[index]) for kind, indices in parts.items() for index in indices]
    (out_dir / EXAMPLES).write_text("\n".join(examples), encoding="utf-8")
    return [*written, out_dir / EXAMPLES]


def draw_prediction(row: Mapping[str, Any]) -> Image.Image:
    """One sample as an RGB picture: the sentence, the true graph in green, and below it the predicted one in red."""
    lines: Lines = [(line, INK) for line in wrapped(f"{_figure(row)}   {row['id']}")]
    lines += [(line, INK) for line in wrapped(row["sentence"])]
    lines += [("", INK), *((line, TRUTH_INK) for line in _graph_lines(row["truth"], COLUMNS))]
    lines += [("", INK), *((line, PREDICTION_INK) for line in _predicted_lines(row, COLUMNS))]
    return text_picture(lines)


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
    return first_lines([*wrapped(row["problem"], columns), *wrapped(row["text"], columns)], _MAX_LINES)


def _graph_lines(graph: str, columns: int) -> list[str]:
    lines = penman_lines(read_graph(graph)).split("\n")
    return first_lines([part for line in lines for part in wrapped(line, columns)], _MAX_LINES)
