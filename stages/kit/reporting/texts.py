"""A comparison as text: for the terminal, as markdown, and as figures for DVC."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from stages.kit.reporting.comparison import Comparison, Contender
from stages.kit.reporting.evidence import EVIDENCE, design_words, evidence_table
from stages.kit.reporting.origins import origin_warnings
from stages.kit.reporting.settings import (
    MEMORY_OF_STAGES,
    QUANTIZATION_COST,
    memory_table,
    plan_settings,
    quantization_table,
    split_settings,
)
from stages.kit.reporting.tables import Cell, Column, Row, Table, escape_markdown, in_parts, markdown, terminal_table
from stages.kit.reporting.task_report import Metric

TEXT_WIDTH = 120
"""Characters, of a table that is kept as text."""
_SEEDS = (Column("seeds", "Seeds", "d"), Column("between_seeds", "Between seeds", ".3f"))
"""Trainings of a recipe, and the standard deviation of their scores."""


def comparison_table(comparison: Comparison) -> Table:
    """A row a model; those not run are there too, empty, with the command that runs them."""
    metrics = comparison.report.metrics
    primary = comparison.report.primary
    columns = (
        Column("model", "Model"),
        *(column for metric in metrics for column in _columns(metric, comparison)),
        Column(primary.key, "95% interval", primary.format),
        *(_SEEDS if comparison.over_seeds else ()),
        Column("role", ""),
    )
    rows = []
    for contender in comparison.contenders:
        best = contender is comparison.best
        cells = (
            contender.name,
            *(cell for metric in metrics for cell in _cells(metric, contender, comparison)),
            contender.score.interval if contender.runs else None,
            *((len(contender.runs) or None, _between_seeds(contender)) if comparison.over_seeds else ()),
            comparison.report.extreme if best and not comparison.answer.enough else "best" if best else contender.role,
        )
        rows.append(Row(cells=cells, emphasised=best, note=contender.note))
    return Table(columns=columns, rows=tuple(rows))


def _columns(metric: Metric, comparison: Comparison) -> tuple[Column, ...]:
    """A metric's column, and one for its interval if it has its own; the primary one's stands at the end."""
    column = Column(metric.key, metric.heading, metric.format)
    return (column, replace(column, heading="95% interval")) if _has_interval(metric, comparison) else (column,)


def _cells(metric: Metric, contender: Contender, comparison: Comparison) -> tuple[Cell, ...]:
    cell, score = contender.figure(metric.key), contender.scores.get(metric.key)
    return (cell, score.interval if score else None) if _has_interval(metric, comparison) else (cell,)


def _has_interval(metric: Metric, comparison: Comparison) -> bool:
    """Whether it has a column of its own for one."""
    found = [contender.scores.get(metric.key) for contender in comparison.evaluated]
    return metric.key != comparison.report.primary.key and any(score and score.interval for score in found)


def _between_seeds(contender: Contender) -> float | None:
    return contender.score.between_seeds if contender.runs else None


def print_comparison(comparison: Comparison, table: Table, console: Console) -> None:
    """The table, the answer and the insights, as text that no name can turn into markup."""
    for part in in_parts(table, console.width):
        console.print()
        console.print(terminal_table(part))
    for name, note in table.notes:
        console.print(Text(f"{name}: {note}", style="dim"), soft_wrap=True)
    console.print()
    console.print(Text(comparison.answer.headline, style="bold"), soft_wrap=True)
    for insight in comparison.insights:
        console.print(Text(f"  {insight.topic}: {insight.words}"), soft_wrap=True)
    if (costs := quantization_table(comparison.runs, comparison.report.primary)).rows:
        console.print()
        console.print(Text(QUANTIZATION_COST, style="dim"), soft_wrap=True)
        for part in in_parts(costs, console.width):
            console.print(terminal_table(part))
        console.print()
    for line in (fairness(comparison), *origin_warnings(comparison.all_runs)):
        console.print(Text(line), soft_wrap=True)
    for line in design_words(comparison):
        console.print(Text(line, style="dim"), soft_wrap=True)


def comparison_text(comparison: Comparison, table: Table) -> str:
    """What the terminal shows, without its colours, in TEXT_WIDTH."""
    console = Console(file=io.StringIO(), width=TEXT_WIDTH, color_system=None, highlight=False)
    with console.capture() as capture:
        print_comparison(comparison, table, console)
    return capture.get()


def comparison_markdown(comparison: Comparison, table: Table) -> str:
    insights = "\n".join(
        f"- {escape_markdown(insight.topic)}: {escape_markdown(insight.words)}" for insight in comparison.insights
    )
    costs = quantization_table(comparison.runs, comparison.report.primary)
    fair = escape_markdown(" ".join((fairness(comparison), *origin_warnings(comparison.all_runs))))
    design = escape_markdown(" ".join(design_words(comparison)))
    return (
        f"# {escape_markdown(comparison.report.title)}\n\n{escape_markdown(comparison.answer.headline)}\n\n"
        f"{markdown(table)}\n{insights}\n\n{fair}\n\n{design}\n"
        f"{_section('Evidence', EVIDENCE, evidence_table(comparison))}"
        f"{_section('Merged out of 4 bits', QUANTIZATION_COST, costs)}"
        f"{_section('Memory by stage', MEMORY_OF_STAGES, memory_table(comparison.runs))}"
    )


def _section(heading: str, lead: str, table: Table) -> str:
    """In markdown; nothing where the table is empty."""
    return f"\n## {heading}\n\n{escape_markdown(lead)}\n\n{markdown(table)}" if table.rows else ""


def fairness(comparison: Comparison) -> str:
    """In what the recipes differ, which is all that a difference between their results can come from."""
    recipes = {run.name: plan_settings(run.plan) for run in comparison.runs if run.plan}
    if len(recipes) < 2:
        return "No two recipes have been evaluated."
    differing, _, shared = split_settings(recipes)
    names = ", ".join(str(row.cells[0]) for row in differing.rows)
    if not names:
        return "The recipes differ in no setting."
    return f"The recipes differ in {names}; their other {len(shared.rows)} settings are the same."


def flat_metrics(comparison: Comparison) -> dict[str, float | str]:
    """For `dvc metrics`: the best model, and of each model the metrics that have an interval, with it."""
    flat: dict[str, float | str] = {"best": comparison.best.name, "evidence_enough": comparison.answer.enough}
    for contender in comparison.evaluated:
        for key, score in contender.scores.items():
            if score is None or (score.interval is None and key != contender.primary):
                continue
            recorded = contender.figure(key)
            assert recorded is not None, key
            flat[f"{contender.name}.{key}"] = score.mean if key == contender.primary else recorded
            if score.interval:
                flat[f"{contender.name}.{key}_low"] = score.interval.low
                flat[f"{contender.name}.{key}_high"] = score.interval.high
    return flat
