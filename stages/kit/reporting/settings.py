"""What the recipes of a report were given, and what they took: settings, trained parameters, time, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stages.core.params.schema import PARTS
from stages.kit.planning.plan import Plan
from stages.kit.reporting.runs import Run
from stages.kit.reporting.tables import ABSENT, Column, Row, Table
from stages.kit.reporting.task_report import Metric

MEMORY_OF_STAGES = (
    "Each stage is a process of its own: before it loads a model it holds nothing on a GPU, and on a CPU only Python, "
    "its libraries and the samples, whatever ran before it. What is free before and left after is as the device has "
    "it, so that it shows what others hold."
)
"""What the table of memory by stage is to show."""

QUANTIZATION_COST = (
    "Adapters trained on weights in 4 bits are merged into the unquantized ones. Both models answered the same "
    "validation samples."
)
"""Introduces the table of merges out of 4 bits."""

_NOT_SETTINGS = {"recipe", "trainable", "features_bytes"}
_MEMORY_KINDS = {
    "cpu_allocated": "tensors on the CPU",
    "cuda_allocated": "tensors on the GPU",
    "cpu_resident": "the whole process, on the CPU",
}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings by dotted path, as text; an empty mapping or None shows as ABSENT."""
    flat = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        elif isinstance(value, list | tuple):
            flat[f"{prefix}{key}"] = ", ".join(map(str, value)) or ABSENT
        elif isinstance(value, bool):
            flat[f"{prefix}{key}"] = "yes" if value else "no"
        elif isinstance(value, float):
            flat[f"{prefix}{key}"] = format(value, "g")
        else:
            flat[f"{prefix}{key}"] = ABSENT if value is None or value == {} else str(value)
    return flat


def plan_settings(plan: Plan) -> dict[str, str]:
    """Every setting of a plan by dotted path; what the plan derives or is named by is left out."""
    return flatten({key: value for key, value in asdict(plan).items() if key not in _NOT_SETTINGS})


def split_settings(
    by_run: Mapping[str, Mapping[str, str]],
) -> tuple[Table, frozenset[tuple[int, int]], Table]:
    """(what differs between the runs, the cells of it that stand out, what all share).

    The first table has a row a setting and a column a run; a cell (row, column) stands out where it is not
    the commonest value of its row. The second has the columns setting and value.
    """
    paths = list(dict.fromkeys(path for settings in by_run.values() for path in settings))
    differing: list[Row] = []
    shared: list[Row] = []
    outstanding: set[tuple[int, int]] = set()
    for path in paths:
        values = [settings.get(path, ABSENT) for settings in by_run.values()]
        if len(set(values)) == 1:
            shared.append(Row(cells=(path, values[0])))
            continue
        # A tie goes to the value seen first, which Counter keeps in order.
        commonest = Counter(values).most_common(1)[0][0]
        outstanding |= {(len(differing), column) for column, value in enumerate(values, start=1) if value != commonest}
        differing.append(Row(cells=(path, *values)))
    names = tuple(Column(name, name) for name in by_run)
    return (
        Table(columns=(Column("setting", "Setting"), *names), rows=tuple(differing)),
        frozenset(outstanding),
        Table(columns=(Column("setting", "Setting"), Column("value", "Value")), rows=tuple(shared)),
    )


def trainable_table(runs: Sequence[Run]) -> Table:
    """Trained parameters by part, and their share of all; a base trains none."""
    parts = [part for part in PARTS if any(_trainable(run).get(part) for run in runs)]  # a text model has one only
    columns = (
        Column("model", "Model"),
        *(Column(part, part, ",") for part in parts),
        Column("total", "Trained", ","),
        Column("all", "All parameters", ","),
        Column("share", "Share", ".2%"),
    )
    rows = []
    for run in runs:
        counts = _trainable(run)
        total, everything = counts.get("total"), counts.get("all")
        share = total / everything if total is not None and everything else None
        rows.append(Row(cells=(run.name, *(counts.get(part) for part in parts), total, everything, share)))
    return Table(columns=columns, rows=tuple(rows))


def cost_table(runs: Sequence[Run]) -> Table:
    """Steps, time and memory of training, and the speed of evaluation."""
    columns = (
        Column("model", "Model"),
        Column("num_steps", "Steps", ","),
        Column("train_seconds", "Training time", "seconds"),
        Column("samples_per_second", "Training samples/s", ".1f"),
        Column("peak_memory_bytes", "Peak memory", "bytes"),
        Column("memory_error", "Predicted, off by", "+.1%"),
        Column("memory_kind", "Memory of"),
        Column("final_loss", "Final loss", ".4f"),
        Column("evaluation_samples_per_second", "Evaluation samples/s", ".1f"),
    )
    rows = []
    for run in runs:
        values: dict[str, Any] = {
            **(asdict(run.training) if run.training else {}),
            "memory_error": run.metrics.get("memory_error"),
            "evaluation_samples_per_second": run.metrics.get("samples_per_second"),
        }
        values["memory_kind"] = _MEMORY_KINDS.get(values.get("memory_kind", ""), values.get("memory_kind"))
        rows.append(Row(cells=(run.name, *(values.get(column.key) for column in columns[1:]))))
    return Table(columns=columns, rows=tuple(rows))


def quantization_table(runs: Sequence[Run], metric: Metric) -> Table:
    """The cost of the merge for each model that was trained on quantized weights, by one of the task's metrics."""
    columns = (
        Column("model", "Model"),
        Column("samples", "Samples", ","),
        Column("trained", f"{metric.heading} as trained", metric.format),
        Column("merged", "Merged", metric.format),
        Column("same_answers", "Same answers", ","),
        Column("logit_deviation", "Logits off by", ".1%"),
    )
    rows = []
    for run in runs:
        if run.certificate and (cost := run.certificate.quantization_cost):
            figures = cost.trained.get(metric.key), cost.merged.get(metric.key)
            cells = (run.name, cost.samples, *figures, cost.same_answers, cost.logit_deviation)
            rows.append(Row(cells=cells))
    return Table(columns=columns, rows=tuple(rows))


def memory_table(runs: Sequence[Run]) -> Table:
    """What each stage held before it loaded its model, after, and at most, and what that left; as they ran."""
    columns = (
        Column("model", "Model"),
        Column("stage", "Stage"),
        Column("free", "Free before", "bytes"),
        Column("before_load", "Before loading", "bytes"),
        Column("after_load", "After loading", "bytes"),
        Column("peak", "Peak", "bytes"),
        Column("left", "Left for the work", "bytes"),
        Column("memory_kind", "Memory of"),
    )
    rows = []
    for run in runs:
        for held in run.memory:
            cells = (
                run.name,
                held.stage if held.name == run.name else f"{held.stage} {held.name}",
                held.before_load.free_bytes,
                held.before_load.used_bytes,
                held.after_load.used_bytes,
                held.end.peak_bytes,
                held.after_load.free_bytes,
                f"tensors on {held.gpus} GPUs" if held.gpus > 1 else _MEMORY_KINDS[held.kind],
            )
            rows.append(Row(cells=cells))
    return Table(columns=columns, rows=tuple(rows))


def _trainable(run: Run) -> Mapping[str, int]:
    """What training counted, or else what the plan says."""
    if run.training and run.training.trainable:
        return run.training.trainable
    return run.plan.trainable if run.plan else {}
