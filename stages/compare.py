"""Compare the models of a task: which is best, by how much, and is the evidence enough to say so?

Reads   data/runs/RECIPE/ of every recipe of the task, and data/runs/BASELINE/ of every untrained base
Writes  data/report/TASK/: index.html (self-contained), comparison.md, comparison.csv, comparison.json (flat, for
        `dvc metrics`), distribution.csv (for `dvc plots`)
Run     docker/run compare detection
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.text import Text

from stages.kit.errors import UserError
from stages.kit.params import Params, load_params
from stages.kit.reporting.comparison import Comparison, Contender, TaskReport, compare, score_contender
from stages.kit.reporting.page import render_page
from stages.kit.reporting.plots import share_at_least
from stages.kit.reporting.runs import Run, read_run, refuse_different_samples
from stages.kit.reporting.tables import Column, Row, Table, csv_text, escape_markdown, markdown, terminal_table
from stages.tasks import load_task


@click.command(help=__doc__)
@click.argument("task")
def main(task: str) -> None:
    compare_task(load_params(), task, data_dir=Path("data"), console=Console(highlight=False))


def compare_task(params: Params, task: str, *, data_dir: Path, console: Console) -> Comparison:
    """Read the runs, compare them, write and print the answer.

    Raises UserError where nothing was run, or where the runs do not compare.
    """
    report = load_report(params, task)
    contenders = read_contenders(params, task, report, data_dir / "runs")
    comparison = compare(report, contenders)
    table = comparison_table(comparison)
    report_dir = data_dir / "report" / task
    write_report(comparison, table, report_dir, task=task, profile=params.profile)
    print_comparison(comparison, table, console)
    console.print(Text(f"The whole report: {report_dir / 'index.html'}"), soft_wrap=True)
    return comparison


def load_report(params: Params, task: str) -> TaskReport:
    """What the task says about itself. Raises UserError where no recipe has it."""
    tasks = dict.fromkeys(recipe.task for recipe in params.recipes.values())
    if task not in tasks:
        raise UserError(f"no recipe of params.yaml has the task {task!r}; there are: {', '.join(tasks)}")
    report = load_task(task, "report").REPORT
    assert isinstance(report, TaskReport)
    return report


def read_contenders(params: Params, task: str, report: TaskReport, runs_dir: Path) -> list[Contender]:
    """Every baseline and recipe of the task, in the order of params.yaml, evaluated or not."""
    names: dict[str, str | None] = {name: None for name, base in params.baselines.items() if base.task == task}
    names |= {name: _baseline_of(params, name) for name, recipe in params.recipes.items() if recipe.task == task}
    columns = sorted({*report.evidence, report.score})
    runs: dict[str, Run | None] = {
        name: read_run(runs_dir / name, identity=report.identity, columns=columns, trained=name in params.recipes)
        for name in names
    }
    evaluated = [run for run in runs.values() if run]
    if not evaluated:
        raise UserError(f"no model of task {task} has been evaluated; run: dvc repro compare@{task}")
    refuse_different_samples(evaluated)
    _refuse_other_profile(params, evaluated)
    continued_by = {name: recipe.base_recipe() for name, recipe in params.recipes.items()}
    return [
        score_contender(
            report,
            name,
            runs[name],
            baseline=baseline,
            stage_of=tuple(other for other, parent in continued_by.items() if parent == name),
        )
        for name, baseline in names.items()
    ]


def _baseline_of(params: Params, recipe_name: str) -> str:
    """The baseline of the base that a recipe comes from, through all the recipes it continues."""
    recipe = params.recipes[recipe_name]
    while parent := recipe.base_recipe():
        recipe = params.recipes[parent]
    for name, baseline in params.baselines.items():
        if baseline.base == recipe.base and baseline.task == recipe.task:
            return name
    return f"base-{recipe.base.removeprefix('bases/')}"


def _refuse_other_profile(params: Params, runs: list[Run]) -> None:
    others = [run for run in runs if run.plan and run.plan.profile != params.profile]
    if others:
        found = ", ".join(f"{run.name} ({run.plan.profile})" for run in others if run.plan)
        raise UserError(
            f"params.yaml sets profile {params.profile}, but these were trained under another: {found}; train them "
            f"again with: dvc repro {' '.join(f'evaluate@{run.name}' for run in others)}"
        )


def comparison_table(comparison: Comparison) -> Table:
    """A row a model; those not run are there too, empty, with the command that runs them."""
    metrics = comparison.report.metrics
    primary = comparison.report.primary
    columns = (
        Column("model", "Model"),
        *(Column(metric.key, metric.heading, metric.format) for metric in metrics),
        Column(primary.key, "95% interval", primary.format),
        Column("role", ""),
    )
    rows = []
    for contender in comparison.contenders:
        recorded = contender.run.metrics if contender.run else {}
        best = contender is comparison.best
        cells = (
            contender.name,
            *(recorded.get(metric.key) for metric in metrics),
            contender.interval,
            "highest" if best and not comparison.answer.enough else "best" if best else contender.role,
        )
        rows.append(Row(cells=cells, emphasised=best, note=contender.note))
    return Table(columns=columns, rows=tuple(rows))


def print_comparison(comparison: Comparison, table: Table, console: Console) -> None:
    """The table, the answer and the insights, as text that no name can turn into markup."""
    console.print()
    console.print(terminal_table(table))
    for name, note in table.notes:
        console.print(Text(f"{name}: {note}", style="dim"), soft_wrap=True)
    console.print()
    console.print(Text(comparison.answer.headline, style="bold"), soft_wrap=True)
    for insight in comparison.insights:
        console.print(Text(f"  {insight.topic}: {insight.words}"), soft_wrap=True)
    console.print(Text(f"{comparison.num_samples} samples; intervals are 95%, paired by sample.", style="dim"))


def write_report(comparison: Comparison, table: Table, report_dir: Path, *, task: str, profile: str) -> None:
    report_dir.mkdir(parents=True, exist_ok=True)
    written = {
        "comparison.md": comparison_markdown(comparison, table),
        "comparison.csv": csv_text(table),
        "comparison.json": json.dumps(flat_metrics(comparison), indent=2) + "\n",
        "distribution.csv": distribution_csv(comparison),
        "index.html": render_page(comparison, table, task=task, profile=profile),
    }
    for name, text in written.items():
        (report_dir / name).write_text(text, encoding="utf-8")


def comparison_markdown(comparison: Comparison, table: Table) -> str:
    insights = "\n".join(
        f"- {escape_markdown(insight.topic)}: {escape_markdown(insight.words)}" for insight in comparison.insights
    )
    return (
        f"# {escape_markdown(comparison.report.title)}\n\n{escape_markdown(comparison.answer.headline)}\n\n"
        f"{markdown(table)}\n{insights}\n\n"
        f"{comparison.num_samples} samples. Intervals are 95% bootstrap intervals, differences paired by sample; each "
        "stands for its own pair, without correction for the number of pairs.\n"
    )


def flat_metrics(comparison: Comparison) -> dict[str, float | str]:
    """For `dvc metrics`: the best model, and the primary metric of each with its interval."""
    key = comparison.report.primary.key
    flat: dict[str, float | str] = {"best": comparison.best.name, "evidence_enough": comparison.answer.enough}
    for contender in comparison.evaluated:
        assert contender.value is not None
        flat[f"{contender.name}.{key}"] = contender.value
        if contender.interval:
            flat[f"{contender.name}.{key}_low"] = contender.interval.low
            flat[f"{contender.name}.{key}_high"] = contender.interval.high
    return flat


def distribution_csv(comparison: Comparison) -> str:
    """For `dvc plots`: by score reached, the share of samples of each model that reach it."""
    grid = np.linspace(0, 1, 41)
    runs = [contender.run for contender in comparison.evaluated if contender.run]
    shares = [share_at_least(run.columns[comparison.report.score], grid) for run in runs]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([f"{comparison.report.score}_at_least", *(run.name for run in runs)])
    writer.writerows([f"{at:.3f}", *(f"{share:.4f}" for share in row)] for at, *row in zip(grid, *shares, strict=True))
    return text.getvalue()


if __name__ == "__main__":
    main()
