"""Compare a recipe with itself: how often is half of its trainings called better than the rest? Behind `make truth`.

Reads   the cards of the recipe in the workspace and in the experiments of HEAD that compare with it, one a seed
Writes  nothing
Run     python -m tools.compare.truth r1-llm-only --splits 1000

Whatever is claimed is false. Each split deals some of the trainings into two arms, and asks the question of a report.
Splits share trainings, so the figure of few trainings is rough: it says how this recipe behaves, and the simulation of
tests/benchmarks/false_claims.py what holds in general.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import numpy as np

from stages.compare import load_report
from stages.core.errors import UserError
from stages.core.params.load import load_params
from stages.kit.reporting.compare import TaskReport, evidence_of, read_task_run
from stages.kit.reporting.runs import different_models, refuse_different_samples
from stages.kit.statistics import LEVEL, Floats, difference
from tools.compare.__main__ import comparable, left_out_words

LEAST = 4
"""Trainings, of which two arms of two can be dealt."""


@click.command(help=__doc__)
@click.argument("recipe")
@click.option("--splits", default=1000, show_default=True, help="Drawn for each size of the arms.")
def main(recipe: str, splits: int) -> None:
    params = load_params()
    task = params.recipe(recipe).task
    report = load_report(params, task)
    with tempfile.TemporaryDirectory() as folder:
        found, left_out = comparable(task, (), Path(folder))
        read = [read_task_run(params, task, recipe, report, each.data_dir) for each in found]
    runs = different_models([run for run in read if run])
    refuse_different_samples(runs)
    if len(runs) < LEAST:
        raise UserError(
            f"{recipe} was trained under {len(runs)} seeds, and two arms of it take {LEAST} at least; train more with: "
            f"dvc exp run --queue -S 'seed=range(43,55)' evaluate@{recipe}, then: dvc queue start "
            f"({left_out_words(left_out)})"
        )
    if left_out:
        click.echo(f"{left_out_words(left_out)}.")
    scores = np.stack([evidence_of(report.primary, run) for run in runs])
    means = [float(report.primary.statistic(each.mean(axis=0))) for each in scores]
    click.echo(f"{recipe}, {len(runs)} trainings: {report.primary_words} {min(means):.3f} to {max(means):.3f}")
    for size in range(1, len(runs) // 2 + 1):
        claimed = false_claims(scores, report, size=size, splits=splits)
        called = f"{claimed:.1%} of {splits} pairs of arms were called different"
        if size == 1:
            click.echo(f"models: {called}, and truly may be")
        else:
            click.echo(f"recipes of {size} seeds: {called}; promised: {1 - LEVEL:.0%} at most")


def false_claims(scores: Floats, report: TaskReport, *, size: int, splits: int) -> float:
    """The share of random splits into two arms of `size` trainings in which one arm is called better.

    scores: (trainings, samples, columns). With a size of 1 the arms are models, and they may truly differ.
    """
    rng, claims = np.random.default_rng(0), 0
    for _ in range(splits):
        order = rng.permutation(len(scores))
        ours, theirs = scores[order[:size]], scores[order[size : 2 * size]]
        found = difference(ours, theirs, statistic=report.primary.statistic, resamples=1000)
        claims += found.verdict in ("better", "worse")
    return claims / splits


if __name__ == "__main__":
    main()
