"""Compare recipes over several seeds: one experiment of DVC a seed. Behind `make compare`.

Reads   the cards of a task's runs in the workspace and in the experiments of HEAD, or in those that are named
        (experiments, branches, tags, commits, `workspace`), and what dvc.lock and the launcher recorded of them
Writes  data/report/TASK/over-seed/, the same files as the comparison of one workspace
Run     python -m tools.compare detection

Experiments that differ in more than the seed are not mixed: where they are named that is an error, else they are left
out, and said so, as is what failed or has not run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from stages.compare import load_report, read_contenders, write_report
from stages.core.errors import UserError
from stages.core.params.load import load_params
from stages.core.params.schema import Params
from stages.kit.reporting.comparison import Comparison, compare
from tools.compare.conditions import differences
from tools.compare.experiments import Experiment, fetch, named_revisions

MAX_SHOWN = 5
"""Differences named of two experiments."""


@click.command(help=__doc__)
@click.argument("task")
@click.argument("experiments", nargs=-1)
def main(task: str, experiments: tuple[str, ...]) -> None:
    compare_experiments(load_params(), task, experiments, console=Console(highlight=False))


def compare_experiments(params: Params, task: str, names: Sequence[str], *, console: Console) -> Comparison:
    """Compare, write and print.

    names: those to compare; none for the workspace and all experiments of HEAD that compare with it.
    Raises UserError where there are not two seeds, and where those named differ in more.
    """
    report = load_report(params, task)
    with tempfile.TemporaryDirectory() as folder:
        if names:
            found = [fetch(name, name, task, Path(folder)) for name in dict.fromkeys(names)]
            left_out = _without_runs(found, task)
            found = [each for each in found if each.name not in left_out]
            _refuse_other_conditions(found, task)
        else:
            revisions, left_out = named_revisions()
            found = [fetch(name, revision, task, Path(folder)) for name, revision in revisions.items()]
            left_out |= _without_runs(found, task)
            found = [each for each in found if each.name not in left_out]
            left_out |= _of_other_conditions(found, task)
            found = [each for each in found if each.name not in left_out]
        left = f"left out: {_listed(left_out)}" if left_out else "none left out"
        if not found:
            raise UserError(f"no experiment has a model of task {task} ({left}); run: dvc repro compare@{task}")
        contenders = read_contenders(params, task, report, [each.data_dir for each in found])
        comparison = compare(report, contenders)
        if not comparison.over_seeds:
            raise UserError(
                f"only one seed was run, in {', '.join(each.name for each in found)} ({left}); run more with: "
                f"dvc exp run --queue -S 'seed=43,44' compare@{task}, then: dvc queue start"
            )
        notes = [_seeds(comparison, found), *([f"L{left[1:]}."] if left_out else [])]
        notes += _missing(found, task, [each.name for each in contenders if each.runs])
        comparison = replace(comparison, notes=tuple(notes))
        write_report(comparison, Path("data/report", task, "over-seed"), profile=params.profile, console=console)
    return comparison


def _without_runs(experiments: Sequence[Experiment], task: str) -> dict[str, str]:
    return {each.name: f"no model of task {task}" for each in experiments if not each.evaluated(task)}


def _of_other_conditions(experiments: Sequence[Experiment], task: str) -> dict[str, str]:
    """Why each does not compare with the first."""
    reasons = {}
    for other in experiments[1:]:
        if differing := differences([experiments[0], other], task, "seed"):
            reasons[other.name] = f"unlike {experiments[0].name} in {_shortened([*differing])}"
    return reasons


def _refuse_other_conditions(experiments: Sequence[Experiment], task: str) -> None:
    if differing := differences(experiments, task, "seed"):
        lines = [
            f"  {fact}: " + "; ".join(f"{value} ({', '.join(names)})" for value, names in by_value.items())
            for fact, by_value in differing.items()
        ]
        more = f"\n  and {len(lines) - MAX_SHOWN} more" if len(lines) > MAX_SHOWN else ""
        raise UserError(
            "these experiments differ in more than the seed, so that a difference may come of that:\n"
            + "\n".join(lines[:MAX_SHOWN])
            + more
        )


def _seeds(comparison: Comparison, experiments: Sequence[Experiment]) -> str:
    seeds = sorted({run.plan.seed for run in comparison.all_runs if run.plan})
    names = ", ".join(each.name for each in experiments)
    return f"Seeds {', '.join(map(str, seeds))}, of {len(experiments)} experiments: {names}."


def _missing(experiments: Sequence[Experiment], task: str, names: Sequence[str]) -> list[str]:
    """A sentence for each recipe that some of the experiments lack."""
    missing = {name: [each.name for each in experiments if name not in each.evaluated(task)] for name in names}
    return [f"{name} was not evaluated in {', '.join(lacking)}." for name, lacking in missing.items() if lacking]


def _listed(left_out: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({why})" for name, why in left_out.items())


def _shortened(facts: Sequence[str]) -> str:
    more = f" and {len(facts) - MAX_SHOWN} more" if len(facts) > MAX_SHOWN else ""
    return ", ".join(facts[:MAX_SHOWN]) + more


if __name__ == "__main__":
    main()
