"""Compare the models of a task: which is best, by how much, and is the evidence enough to say so?

Reads   data/report/TASK/runs/: what `evaluate` copied of each recipe and each untrained base
        data/report/TASK/memory/: the memory of the stages that made and evaluated them
        data/provenance/TASK/: the launcher's records of how they were made
Writes  data/report/TASK/: index.html (self-contained), table.txt (what the terminal shows), comparison.md,
        comparison.csv; comparison.json and costs.json (flat, for `dvc exp show`)
Run     docker/run compare detection
"""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from stages.core.params import load_params
from stages.core.params.schema import Params
from stages.reporting.compare import Comparison, compare, read_contenders, task_report
from stages.reporting.page import write_report
from stages.reporting.sections import comparison_table
from stages.reporting.tracking import track_comparison


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
    report = task_report(params, task)
    comparison = compare(report, read_contenders(params, report, [data_dir]))
    write_report(comparison, data_dir / "report" / task, profile=params.profile, console=console)
    return comparison


if __name__ == "__main__":
    main()
