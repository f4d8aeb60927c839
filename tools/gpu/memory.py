"""Predictions of memory compared with what was measured, and the constants of calibration.yaml that follow from it."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from ruamel.yaml import YAML

from tools.gpu.pieces import FACTS
from tools.gpu.results import Results

AMOUNTS = ("allocated", "reserved", "total")

MARGIN = 0.01
"""By how much a bound is wider than the worst error seen: the next setting is none of these."""
FLOOR = 0.02
"""No bound is narrower, however good the settings measured were."""

Row = dict[str, float]
"""Comparison of one setting: `layers`, and for each amount of bytes the error of the scaled prediction (`total`) and of
the exact one (`exact total`), e.g. 0.03 for one that is 3 % too high."""


def comparisons(results: Results) -> dict[str, Row]:
    """By name of a training that was predicted and measured."""
    context = context_bytes(results)
    rows: dict[str, Row] = {}
    for name, measured in _measured(results).items():
        predicted = results.data(f"predictions: {name}")
        if predicted is None:
            continue
        rows[name] = {"layers": sum(predicted["layers"])}
        for words, key in (("", "scaled"), ("exact ", "exact")):
            amounts = {**predicted[key], "total_bytes": predicted[key]["reserved_bytes"] + context}
            for amount in AMOUNTS:
                rows[name][f"{words}{amount}"] = amounts[f"{amount}_bytes"] / measured[f"{amount}_bytes"] - 1
    return rows


def context_bytes(results: Results) -> int:
    """In use beside torch's allocator while a model is trained; the median, as kernels differ by setting."""
    beside = [measured["total_bytes"] - measured["reserved_bytes"] for measured in _measured(results).values()]
    return round(median(beside)) if beside else 0


def _measured(results: Results) -> dict[str, dict[str, Any]]:
    keys = (key for key in results.by_piece if key.startswith("trainings: "))
    return {key.removeprefix("trainings: "): data for key in keys if (data := results.data(key)) is not None}


def constants(results: Results) -> dict[str, float]:
    """Values for calibration.yaml. There is a row to compare.

    Each bound is the worst error that was seen, widened, and the floor at least, in thousandths, rounded outward. The
    total's errors count with the reserved ones.
    """
    facts, rows = results.data(FACTS.key), comparisons(results).values()
    assert facts is not None
    values: dict[str, float] = {}
    if context := context_bytes(results):
        values["context_mib"] = round(context / 2**20, 1)
    if facts["workspaces_bytes"]:
        values["cublas_workspaces_mib"] = round(facts["workspaces_bytes"] / 2**20, 3)
    for name, amounts in (("allocated", ("allocated",)), ("reserved", ("reserved", "total"))):
        keys = [f"{words}{amount}" for amount in amounts for words in ("", "exact ")]
        # What was measured lies that far above a prediction, relative to it.
        excess = [1 / (1 + row[key]) - 1 for row in rows for key in keys]
        low, high = min(min(excess) - MARGIN, -FLOOR), max(max(excess) + MARGIN, FLOOR)
        values[f"{name}_error_low"] = math.floor(round(low * 1000, 6)) / 1000
        values[f"{name}_error_high"] = math.ceil(round(high * 1000, 6)) / 1000
    return values


def recalibrated(text: str, values: Mapping[str, float], measured: str) -> str:
    """calibration.yaml with these values in place of its own; comments, reasons and all else as they were.

    measured: device, versions and day.
    """
    yaml = YAML()
    yaml.width = 120
    yaml.preserve_quotes = True
    content: Any = yaml.load(text)
    for name, value in values.items():
        content[name]["value"] = int(value) if value == int(value) else value
        content[name]["measured"] = measured
    out = io.StringIO()
    yaml.dump(content, out)
    return out.getvalue()
