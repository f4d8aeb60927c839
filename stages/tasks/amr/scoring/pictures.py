"""Predicted graphs below the true ones, as pictures to be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image

from stages.kit.evaluation.score import (
    INK,
    PREDICTION_INK,
    TRUTH_INK,
    Lines,
    first_lines,
    text_image,
    wrapped,
)
from stages.tasks.amr.samples.graphs import penman_lines, read_graph
from stages.tasks.amr.samples.records import Record

_MAX_LINES = 60
"""Of one graph."""


def ordered_by(_: Record) -> str:
    """The column by which samples are the best and the worst."""
    return "f1"


def draw_prediction(_: Record, row: Mapping[str, Any]) -> Image.Image:
    """One sample as an RGB picture: the sentence, the true graph in green, and below it the predicted one in red."""
    lines: Lines = [(line, INK) for line in wrapped(f"{_figure(row)}   {row['id']}")]
    lines += [(line, INK) for line in wrapped(row["sentence"])]
    lines += [("", INK), *((line, TRUTH_INK) for line in _graph_lines(row["truth"]))]
    lines += [("", INK), *((line, PREDICTION_INK) for line in _predicted_lines(row))]
    return text_image(lines)


def _figure(row: Mapping[str, Any]) -> str:
    counts = f"{row['matched']} of {row['predicted']} predicted and {row['gold']} gold triples"
    return f"F1 {row['f1']:.2f}, {counts}" if row["valid"] else "F1 0.00, no graph"


def _predicted_lines(row: Mapping[str, Any]) -> list[str]:
    if row["valid"]:
        return _graph_lines(row["prediction"])
    return first_lines([*wrapped(row["problem"]), *wrapped(row["text"])], _MAX_LINES)


def _graph_lines(graph: str) -> list[str]:
    lines = penman_lines(read_graph(graph)).split("\n")
    return first_lines([part for line in lines for part in wrapped(line)], _MAX_LINES)
