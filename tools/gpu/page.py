"""docs/gpu/DEVICE.md and the calibration, from the results of `make gpu`. Imports nothing heavy."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ruamel.yaml import YAML

from stages.core.errors import bytes_text
from stages.reporting.tables import Cell, Column, Table, escape_markdown, markdown

AMOUNTS = ("allocated", "reserved", "total")
MARGIN, FLOOR = 0.01, 0.02
"""A bound is wider than the worst measured error by MARGIN, and FLOOR at least: the next setting is none of these."""

Results = Mapping[str, Mapping[str, Any]]
"""Status, data, problem, seconds and date by key, e.g. `trainings: NAME`."""

SECTIONS = {
    "trainings": "Random weights, full samples; the median step. Share of peak is that of the counted arithmetic of "
    "matrix products and attention, with what checkpointing repeats. Errors are those of the memory prediction.",
    "generation": "Random weights; prompt and completion in tokens, all completions of full length.",
    "recipes": "At tiny size, all the way. The training is done twice, and once more killed after a save and resumed.",
    "bench": "The first way against the second, on the tiny models, in turns; the fastest turn of each.",
}
"""Text above each job's table."""


def page(name: str, results: Results, keys: Sequence[str]) -> str:
    """keys: of all measurements, in order."""
    found = {key: results[key] for key in keys if key in results}
    days = sorted({each["date"][:10] for each in found.values()}) or ["never"]
    lines = [
        f"# {name}",
        "",
        f"Measured by `make gpu`: {len(found)} of {len(keys)}, {' to '.join(dict.fromkeys((days[0], days[-1])))}.",
    ]
    if facts := data(results, "facts: device"):
        lines += [
            "",
            "## Device and software",
            "",
            *_table({_title(each): {"found": _cell(each, facts[each])} for each in facts}),
        ]
    errors = comparisons(results)
    for job, text in SECTIONS.items():
        settings = {key.partition(": ")[2]: result for key, result in found.items() if key.startswith(f"{job}: ")}
        rows = {
            setting: {"status": result["status"], **result["data"], **errors.get(setting, {})}
            for setting, result in settings.items()
        }
        if rows:
            lines += ["", f"## {job.capitalize()}", "", text, "", *_table(rows)]
    problems = [f"{key}: {each['problem']}" for key, each in found.items() if each["problem"]]
    missing = [key for key in keys if key not in found]
    for heading, entries in (("Failures", problems), ("Not measured yet", missing)):
        if entries:
            lines += ["", f"## {heading}", "", *(f"- {escape_markdown(entry)}" for entry in entries)]
    return "\n".join(lines) + "\n"


def data(results: Results, key: str) -> dict[str, Any]:
    return dict(results[key]["data"]) if key in results else {}


def _table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A column for each figure that any row has; figures that are themselves made of others are left out."""
    names = {name: None for row in rows.values() for name, value in row.items() if not isinstance(value, dict)}
    columns = (Column("name", ""), *(Column(name, _title(name)) for name in names))
    cells = ((row, *(_cell(name, rows[row].get(name)) for name in names)) for row in rows)
    return markdown(Table.of(columns, cells)).splitlines()


def _title(name: str) -> str:
    return re.sub("_s$", ", s", name.removesuffix("_bytes")).replace("_", " ")


def _cell(name: str, value: Any) -> Cell:
    """A figure as its name says that it is to be written."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, list):
        return ".".join(map(str, value))
    if not isinstance(value, int | float):
        return value
    if name.endswith("_bytes"):
        return bytes_text(round(value))
    if name.endswith(("error", "deviation", "share_of_peak")):
        return f"{value:+.1%}" if name.endswith("error") else f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# --- Predictions against measurements, and the constants that follow


def comparisons(results: Results) -> dict[str, dict[str, float]]:
    """For each training the relative errors of its prediction by amount, e.g. 0.03 for 3 % too high."""
    context, rows = context_bytes(results), {}
    for name, measured in _trainings(results).items():
        predicted = measured["predicted"]
        sizes = {**predicted, "total_bytes": predicted["reserved_bytes"] + context}
        rows[name] = {f"{each}_error": sizes[f"{each}_bytes"] / measured[f"{each}_bytes"] - 1 for each in AMOUNTS}
    return rows


def context_bytes(results: Results) -> int:
    """Memory in use beside torch's allocator during training; the median, since kernels differ by setting."""
    beside = [measured["total_bytes"] - measured["reserved_bytes"] for measured in _trainings(results).values()]
    return round(median(beside)) if beside else 0


def _trainings(results: Results) -> dict[str, dict[str, Any]]:
    """Data of the measured trainings, by name."""
    found = {key.partition(": ")[2]: data(results, key) for key in results if key.startswith("trainings: ")}
    return {name: each for name, each in found.items() if each}


def constants(results: Results) -> dict[str, float]:
    """Values for calibration.yaml, from at least one compared training.

    Each bound is the worst measured error of reserved or total bytes, widened, in thousandths, rounded outward.
    """
    rows, values = comparisons(results).values(), {}
    if context := context_bytes(results):
        values["context_mib"] = round(context / 2**20, 1)
    if shares := [share for each in _trainings(results).values() if (share := each.get("share_of_peak"))]:
        values["share_of_peak"] = round(median(shares), 2)
    # A measurement lies so far above its prediction, relative to it.
    excess = [1 / (1 + row[f"{amount}_error"]) - 1 for row in rows for amount in ("reserved", "total")]
    low, high = min(min(excess) - MARGIN, -FLOOR), max(max(excess) + MARGIN, FLOOR)
    values["reserved_error_low"] = math.floor(round(low * 1000, 6)) / 1000
    values["reserved_error_high"] = math.ceil(round(high * 1000, 6)) / 1000
    return values


def recalibrated(text: str, values: Mapping[str, float], measured: str) -> str:
    """calibration.yaml with these values; comments, reasons and all else stay. measured: device, versions and day."""
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
