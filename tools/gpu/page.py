"""docs/gpu/DEVICE.md and the calibration, from the results of `make gpu`. Imports nothing heavy."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ruamel.yaml import YAML

from stages.core.errors import bytes_text
from stages.kit.reporting.tables import Cell, Column, Table, escape_markdown, markdown

AMOUNTS = ("allocated", "reserved", "total")
MARGIN, FLOOR = 0.01, 0.02
"""A bound is wider than the worst measured error by MARGIN, and FLOOR at least: the next setting is none of these."""

Results = Mapping[str, Mapping[str, Any]]
"""Status, data, problem, seconds and date by key, e.g. `trainings: NAME`."""


@dataclass(frozen=True)
class Section:
    """A table with a line for each measurement of a job. Keys of columns are those of its data and errors."""

    job: str
    heading: str
    text: str
    columns: tuple[Column, ...]


KINDS = ("copies", "dequantization", "attention", "optimizer", "Triton", "matmul", "elementwise", "communication")
SECTIONS: tuple[Section, ...] = (
    Section(
        "trainings",
        "Speed of training",
        "Random weights, full samples; the median step. Share of peak is that of the counted arithmetic of matrix "
        "products and attention (flops_of in torch_internals.py); what checkpointing repeats counts too.",
        (
            *(Column("samples", "Samples a step", "d"), Column("step_s", "Step, s", ".3f")),
            *(Column("tokens_per_s", "Tokens/s", ",.0f"), Column("tflops_per_s", "TFLOP/s", ".1f")),
            *(Column("share_of_peak", "Share of peak", ".1%"), Column("idle_share", "GPU idle", ".0%")),
            *(Column("launches", "Launches", ",d"), Column("allocated_bytes", "Peak memory", "bytes")),
        ),
    ),
    Section("trainings", "Time of a step by kind of kernel", "", tuple(Column(kind, kind, ".0%") for kind in KINDS)),
    Section(
        "trainings",
        "Memory, predicted and measured",
        "One optimizer step, and how far its prediction is off.",
        (
            *(Column("layers", "Layers", ".0f"), Column("total_bytes", "Measured, all", "bytes")),
            *(Column(amount, f"{amount.capitalize()}, off by", "+.1%") for amount in AMOUNTS),
        ),
    ),
    Section(
        "generation",
        "Generation",
        "Random weights; prompt and completion in tokens, all completions of full length.",
        (
            *(Column("prompt", "Prompt", ",d"), Column("new_tokens", "Completion", ",d")),
            *(Column("samples_per_s", "Samples/s", ".2f"), Column("first_token_s", "First token, s", ".3f")),
            *(Column("further_token_s", "Each further, s", ".4f"), Column("peak_bytes", "Peak memory", "bytes")),
            Column("error", "Plan against it", "+.1%"),
        ),
    ),
    Section(
        "recipes",
        "Recipes at tiny size, all the way",
        "The training is done twice, and once more killed after a checkpoint and resumed.",
        (
            *(Column("loss", "Loss", ".3f"), Column("peak_bytes", "Peak memory", "bytes")),
            *(Column("error", "Plan against it", "+.1%"), Column("logit_deviation", "Merge deviates", ".1%")),
            *(Column("twice", "Same bytes twice"), Column("resumed", "Same bytes after a kill")),
        ),
    ),
)


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
        rows = [(fact.replace("_", " "), [_fact(fact, value)]) for fact, value in facts.items()]
        lines += ["", "## Device and software", "", *_table("Fact", [Column("found", "Found")], rows)]
    errors = comparisons(results)
    for section in SECTIONS:
        rows = []
        for key, result in found.items():
            job, _, setting = key.partition(": ")
            if job == section.job:
                rows.append((setting, _cells(section.columns, {**result["data"], **errors.get(setting, {})}, result)))
        if rows:
            lines += ["", f"## {section.heading}", "", section.text, "", *_table("Setting", section.columns, rows)]
    problems = [f"{key}: {each['problem']}" for key, each in found.items() if each["problem"]]
    missing = [key for key in keys if key not in found]
    for heading, entries in (("Failures", problems), ("Not measured yet", missing)):
        if entries:
            lines += ["", f"## {heading}", "", *(f"- {escape_markdown(entry)}" for entry in entries)]
    return "\n".join(lines) + "\n"


def data(results: Results, key: str) -> dict[str, Any]:
    return dict(results[key]["data"]) if key in results else {}


def _cells(columns: Sequence[Column], values: Mapping[str, Any], result: Mapping[str, Any]) -> list[Cell]:
    """The status in the first column if there are no data."""
    words = {True: "yes", False: "NO"}
    cells = (
        [values.get(column.key) for column in columns]
        if result["data"]
        else [result["status"], *[None] * (len(columns) - 1)]
    )
    return [words[value] if isinstance(value, bool) else value for value in cells]


def _fact(name: str, value: Any) -> Cell:
    if name.endswith("_bytes"):
        return bytes_text(value)
    return ".".join(map(str, value)) if isinstance(value, list) else value


def _table(heading: str, columns: Sequence[Column], rows: Iterable[tuple[str, Sequence[Cell]]]) -> list[str]:
    filled = ((name, *cells) for name, cells in rows)
    return markdown(Table.of((Column("name", heading), *columns), filled)).splitlines()


# --- Predictions against measurements, and the constants that follow


def comparisons(results: Results) -> dict[str, dict[str, float]]:
    """For each setting its layers and the relative errors of its prediction, e.g. 0.03 for 3 % too high."""
    context, rows = context_bytes(results), {}
    for name, measured in _measured(results).items():
        if predicted := data(results, f"predictions: {name}"):
            amounts = {**predicted, "total_bytes": predicted["reserved_bytes"] + context}
            errors = {amount: amounts[f"{amount}_bytes"] / measured[f"{amount}_bytes"] - 1 for amount in AMOUNTS}
            rows[name] = {"layers": float(sum(predicted["layers"])), **errors}
    return rows


def context_bytes(results: Results) -> int:
    """Memory in use beside torch's allocator during training; the median, since kernels differ by setting."""
    beside = [measured["total_bytes"] - measured["reserved_bytes"] for measured in _measured(results).values()]
    return round(median(beside)) if beside else 0


def _measured(results: Results) -> dict[str, dict[str, Any]]:
    found = {key.partition(": ")[2]: data(results, key) for key in results if key.startswith("trainings: ")}
    return {name: each for name, each in found.items() if each}


def constants(results: Results) -> dict[str, float]:
    """Values for calibration.yaml, from at least one compared training.

    Each bound is the worst measured error, widened, in thousandths, rounded outward. The total's errors count with the
    reserved ones.
    """
    rows, values = comparisons(results).values(), {}
    if context := context_bytes(results):
        values["context_mib"] = round(context / 2**20, 1)
    if shares := [share for each in _measured(results).values() if (share := each.get("share_of_peak"))]:
        values["share_of_peak"] = round(median(shares), 2)
    for name, amounts in (("allocated", ("allocated",)), ("reserved", ("reserved", "total"))):
        # A measurement lies so far above its prediction, relative to it.
        excess = [1 / (1 + row[amount]) - 1 for row in rows for amount in amounts]
        low, high = min(min(excess) - MARGIN, -FLOOR), max(max(excess) + MARGIN, FLOOR)
        values[f"{name}_error_low"] = math.floor(round(low * 1000, 6)) / 1000
        values[f"{name}_error_high"] = math.ceil(round(high * 1000, 6)) / 1000
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
