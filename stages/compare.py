"""Compare the models of a task: which is best, by how much, and is the evidence enough to say so?

Reads   data/report/TASK/runs/: the cards that `evaluate` wrote of each recipe and each untrained base
        data/report/TASK/memory/: the memory of the stages that made and evaluated them
        data/provenance/TASK/: the launcher's records of how they were made
Writes  data/report/TASK/: index.html (self-contained), table.txt (what the terminal shows), comparison.md,
        comparison.csv; comparison.json and costs.json (flat, for `dvc exp show`)
Run     docker/run compare detection
"""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.core.params.schema import Params
from stages.core.records import publish_text
from stages.core.tasks import load_task
from stages.kit.reporting.compare import Comparison, TaskReport, chosen_report, compare, read_contenders
from stages.kit.reporting.page import render_page
from stages.kit.reporting.sections import (
    comparison_markdown,
    comparison_table,
    comparison_text,
    flat_costs,
    flat_metrics,
    print_comparison,
)
from stages.kit.reporting.tables import csv_text
from stages.kit.reporting.tracking import track_comparison


@click.command(help=__doc__)
@click.argument("task")
def main(task: str) -> None:
    params = load_params()
    comparison = compare_task(params, task, data_dir=Path("data"), console=Console(highlight=False))
    track_comparison(params.tracking, task, comparison_table(comparison))


def compare_task(params: Params, task: str, *, data_dir: Path, console: Console) -> Comparison:
    """Read the runs, compare them, write and print the report.

    Raises UserError if nothing was run, or if the runs cannot be compared.
    """
    report = load_report(params, task)
    comparison = compare(report, read_contenders(params, task, report, [data_dir]))
    write_report(comparison, data_dir / "report" / task, profile=params.profile, console=console)
    return comparison


def load_report(params: Params, task: str) -> TaskReport:
    """The report of a task. Raises UserError if no recipe has the task."""
    tasks = dict.fromkeys(recipe.task for recipe in params.recipes.values())
    if task not in tasks:
        raise UserError(f"no recipe of params.yaml has the task {task!r}; there are: {', '.join(tasks)}")
    report = chosen_report(load_task(task, "report"), params, task)
    assert isinstance(report, TaskReport)
    return report


def write_report(comparison: Comparison, report_dir: Path, *, profile: str, console: Console) -> None:
    """Write the files of a report, and print its table."""
    table = comparison_table(comparison)
    written = {
        "table.txt": comparison_text(comparison, table),
        "comparison.md": comparison_markdown(comparison, table),
        "comparison.csv": csv_text(table),
        "comparison.json": json.dumps(flat_metrics(comparison), indent=2) + "\n",
        "costs.json": json.dumps(flat_costs(comparison), indent=2) + "\n",
        "index.html": render_page(comparison, table, profile=profile),
    }
    for name, text in written.items():
        publish_text(text, report_dir / name)
    print_comparison(comparison, table, console)
    console.print(Text(f"The whole report: {report_dir / 'index.html'}"), soft_wrap=True)


if __name__ == "__main__":
    main()
