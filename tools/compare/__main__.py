"""Compare recipes over several seeds, or choose settings for them: one experiment of DVC each. Behind `make compare`.

Reads   the runs of a task in the workspace and in the experiments of HEAD, or in those that are named
        (experiments, branches, tags, commits, `workspace`), and what the launcher recorded of them
Writes  data/report/TASK/over-seed/, the same files as the comparison of one workspace; with --over nothing
Run     python -m tools.compare detection
        python -m tools.compare detection --over 'recipes.*.learning_rate'
        python -m tools.compare detection --race 0.03

Experiments that differ in more than the seed, and in the settings of --over, are not mixed: an error if they are named,
else they are left out and listed, as are those that failed or have not run. --over ranks the values of a setting for
each recipe, on samples that no report scores (`scored: selection`), and prints the command that trains the best.
--race trains the recipes under more and more seeds until one is known to be the best, or within so much of the best.
"""

from __future__ import annotations

import itertools
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from pkgutil import iter_modules
from typing import TypeAlias

import click
import numpy as np
from rich.console import Console
from rich.text import Text

from stages import tasks
from stages.core.errors import UserError, join_truncated
from stages.core.lineage import short
from stages.core.params import load_params
from stages.core.params.schema import Params
from stages.core.records import nearest, refusal
from stages.core.tasks import load_task
from stages.reporting.compare import (
    TaskReport,
    compare,
    evidence_of,
    groups_of,
    read_contenders,
    task_report,
)
from stages.reporting.evidence import LOOKS, Score, score
from stages.reporting.page import write_report
from stages.reporting.runs import Run, different_models, read_run, refuse_different_samples
from stages.reporting.tables import Column, Row, Table, terminal_table
from tools.compare.experiments import SELECTION, Experiment, changed_settings, comparable, conditions, left_out_words
from tools.compare.race import cost_words, dvc, has_workers, queue, runs_by_seed, standing

Candidate: TypeAlias = tuple[tuple[str, ...], Score]
"""Values of the varied settings, `PATH=VALUE` each with its path in params.yaml, and what a recipe scores with them."""


@click.command(help=__doc__)
@click.argument("task")
@click.argument("experiments", nargs=-1)
@click.option("--over", help="Pattern of the settings to choose, e.g. recipes.*.learning_rate.")
@click.option("--race", type=click.FloatRange(min=0, min_open=True), help="Train until the best is known to this.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Experiments of a race at once.")
def main(task: str, experiments: tuple[str, ...], over: str | None, race: float | None, jobs: int) -> None:
    if race and (experiments or over):
        raise click.UsageError(
            "a race runs experiments of its own: give --race without experiments (EXPERIMENTS=) and --over"
        )
    params, console = load_params(), Console(highlight=False)
    refuse_unknown_metrics(params)
    report = task_report(params, task)
    if over:
        choose_settings(params, report, experiments, over, console=console)
    elif race:
        hold_race(params, report, race, jobs=jobs, console=console)
    else:
        compare_experiments(params, report, experiments, console=console)


def refuse_unknown_metrics(params: Params) -> None:
    """Raises UserError for entries of `compare.matters` that no task ranks its recipes by."""
    ranking: set[str] = set()
    for task in iter_modules(tasks.__path__):
        module = load_task(task.name, "report")
        ranking |= {module.REPORT.primary.key} if hasattr(module, "REPORT") else {*module.RANKING}
    if unknown := [name for name in params.compare.matters if name not in ranking]:
        raise refusal(
            Path("params.yaml"),
            {f"compare.matters.{name}": f"ranks the recipes of no task{nearest(name, ranking)}" for name in unknown},
        )


def compare_experiments(
    params: Params,
    report: TaskReport,
    names: Sequence[str],
    *,
    console: Console,
    race: str = "",
) -> None:
    """Compare, write and print.

    names: the experiments to compare; empty for the workspace and all experiments of HEAD that compare with it.
    race: how it ended, if there was one.
    Raises UserError if there are not two seeds, and if those named differ in more.
    """
    task = report.task
    with tempfile.TemporaryDirectory() as folder:
        compared, left_out = comparable(task, names, Path(folder), with_first=bool(race))
        contenders = read_contenders(params, report, [each.data_dir for each in compared])
        comparison = compare(report, contenders)
        listed = ", ".join(each.name for each in compared)
        seeds = sorted({run.plan.seed for run in comparison.all_runs if run.plan})
        if not comparison.over_seeds:
            last = max(seeds, default=params.seed)
            raise UserError(
                f"only one seed was run, in {listed} ({left_out_words(left_out)}); run more with: dvc exp run --queue "
                f"-S 'seed={last + 1},{last + 2}' compare@{task}, then: dvc queue start; or name those to compare with "
                f"EXPERIMENTS={_changed_words(compared, task)}"
            )
        notes = [f"Seeds {', '.join(map(str, seeds))}, of {len(compared)} experiments: {listed}."]
        notes += [f"{left_out_words(left_out)}."] if left_out else []
        if report.matters is None:
            notes.append(f"No recipe is called as good: params.yaml has no compare.matters.{report.primary.key}.")
        if race:
            notes += [race, "The other sentences do not take into account that seeds were added until then."]
        notes += _missing_words(compared, task, [each.name for each in contenders])
        comparison = replace(comparison, notes=tuple(notes))
        write_report(comparison, Path("data/report", task, "over-seed"), profile=params.profile, console=console)


def hold_race(params: Params, report: TaskReport, matters: float, *, jobs: int, console: Console) -> None:
    """Train seeds until the best recipe is known, and print who is in the race after each round; then compare.

    Raises UserError if an experiment does not give what it was run for.
    """
    seeds = [params.seed + number for number in range(LOOKS[-1])]
    baselines = [name for name, base in params.baselines.items() if base.task == report.task]
    queued: set[tuple[int, str]] = set()
    waited_for: dict[str, str] = {}
    for number in itertools.count():
        working = has_workers()  # before the states are read: what runs now may end meanwhile
        with tempfile.TemporaryDirectory() as folder:
            # A race trains what params.yaml has, as the workspace.
            compared, left_out = comparable(report.task, (), Path(folder), with_first=True)
            runs = runs_by_seed(params, report, compared)
            now = standing(report, runs, seeds, matters)
        if number == 0:
            console.print(Text(cost_words(runs, seeds)), soft_wrap=True)
        if pending := {name: state for name, state in left_out.items() if state in ("queued", "running")}:
            # DVC waits forever for what ran when the machine went down.
            if pending == waited_for or ("running" in pending.values() and not working):
                running = " ".join(name for name, state in pending.items() if state == "running")
                fix = (
                    f"If nothing runs there any more: dvc queue kill {running}"
                    if running
                    else "See dvc queue logs NAME"
                )
                raise UserError(
                    f"DVC's queue does not go on with {', '.join(pending)}. {fix}; then go on with this command"
                )
            waited_for = pending
            dvc("exp", "run", "--run-all", "--jobs", str(jobs))
            continue
        console.print(Text(" ".join(now.words[-1:])), soft_wrap=True)
        if not now.missing:
            break
        needed = {(seed, name) for seed, names in now.missing.items() for name in names}
        if lost := sorted(queued & needed):
            seed, name = lost[0]
            raise UserError(
                f"{name} was queued under seed {seed}, and there is no result to compare ({left_out_words(left_out)}); "
                "see dvc queue status and dvc queue logs NAME; the same command goes on with the race"
            )
        queued |= needed
        queue(now.missing, baselines, console)
    compare_experiments(params, replace(report, matters=matters), (), console=console, race=now.words[-1])


def choose_settings(
    params: Params, report: TaskReport, names: Sequence[str], pattern: str, *, console: Console
) -> None:
    """Print the values of a setting for each recipe, the best first, and the command that trains the best.

    pattern: of the settings, with * for any name. Raises UserError as `candidates` does.
    """
    task = report.task
    with tempfile.TemporaryDirectory() as folder:
        compared, left_out = comparable(task, names, Path(folder), varied=pattern)
        ranked = candidates(compared, params, report, pattern)
        shares = {
            value
            for each in compared
            for condition, value in conditions(each, task, list(ranked)).items()
            if condition.setting == "data.selection"
        }
        changed = _changed_words(compared, task, but=(pattern, "data.selection", "scored"))
    console.print(terminal_table(candidates_table(ranked, report)))
    if left_out:
        console.print(Text(f"{left_out_words(left_out)}."), soft_wrap=True)
    # `++` sets a value whether or not params.yaml has it.
    best = " ".join(
        f"-S {shlex.quote(f'++{setting}')}" for (settings, _), *_ in ranked.values() for setting in settings
    )
    # With another share set aside, recipes would train on other samples.
    share = ", ".join(sorted(shares))
    command = f"dvc exp run --queue {best} -S data.selection={share} -S scored=val -S 'seed=42,43,44' compare@{task}"
    console.print(Text(f"Train the chosen settings: {command}{changed}"), soft_wrap=True)


def candidates(
    experiments: Sequence[Experiment], params: Params, report: TaskReport, pattern: str
) -> dict[str, list[Candidate]]:
    """The candidates of each recipe, the best one first. A recipe with a single one is left out.

    pattern: of the varied settings, with * for any name.
    Raises UserError if none was scored on the selection split, or not all on the same samples.
    """
    runs_of: dict[str, dict[tuple[str, ...], list[Run]]] = {}
    for recipe in (name for name, each in params.recipes.items() if each.task == report.task):
        for experiment in experiments:
            run = read_run(params, report, recipe, experiment.data_dir)
            if run and run.metrics.get("split") == SELECTION:  # other recipes were scored on the validation split
                by_condition = conditions(experiment, report.task, [recipe])
                settings = {condition.setting: value for condition, value in by_condition.items()}
                varied = sorted(f"{path}={value}" for path, value in settings.items() if fnmatchcase(path, pattern))
                runs_of.setdefault(recipe, {}).setdefault(tuple(varied), []).append(run)
    runs = [run for by_settings in runs_of.values() for same in by_settings.values() for run in same]
    if not runs:
        raise UserError(
            "no model was scored on the selection split; a choice by the samples of a report would bias the report; "
            "run with: -S data.selection=0.15 -S scored=selection"
        )
    refuse_different_samples(runs)
    ranked = {}
    for recipe, by_settings in runs_of.items():
        scored = [
            (
                settings,
                score(
                    np.stack([evidence_of(report.primary, run) for run in different_models(same)]),
                    report.primary.statistic,
                    groups_of(report.primary, same[0]),
                ),
            )
            for settings, same in by_settings.items()
        ]
        if len(scored) > 1:
            ranked[recipe] = sorted(scored, key=lambda each: each[1].mean, reverse=report.primary.higher_is_better)
    if not ranked:
        raise UserError(f"no recipe was run with several values of {pattern}")
    return ranked


def candidates_table(ranked: Mapping[str, Sequence[Candidate]], report: TaskReport) -> Table:
    """A row a candidate, the best of each recipe emphasised."""
    primary = report.primary
    columns = (
        Column("model", "Model"),
        Column("settings", "Settings"),
        Column(primary.key, primary.heading, primary.format),
        Column(primary.key, "95% interval", primary.format),
        Column("seeds", "Seeds", "d"),
        Column("role", ""),
    )
    rows = []
    for recipe, by_rank in ranked.items():
        for rank, (settings, scored) in enumerate(by_rank):
            shown = ", ".join(setting.removeprefix(f"recipes.{recipe}.") for setting in settings)
            cells = (recipe, shown, scored.mean, scored.interval, len(scored.by_training), "" if rank else "chosen")
            rows.append(Row(cells=cells, emphasised=rank == 0))
    return Table(columns=columns, rows=tuple(rows))


def _changed_words(experiments: Sequence[Experiment], task: str, *, but: Sequence[str] = ()) -> str:
    """The end of a command that trains more, if params.yaml has other settings than these experiments. but: patterns of
    settings that may differ."""
    changed = [path for path in changed_settings(experiments, task) if not any(fnmatchcase(path, each) for each in but)]
    commits = [each.commit for each in experiments if each.commit]
    see = f" (git diff {short(commits[0])} -- params.yaml)" if commits else ""
    return f"\nFirst: params.yaml has other settings by now: {join_truncated(changed)}{see}" if changed else ""


def _missing_words(experiments: Sequence[Experiment], task: str, names: Sequence[str]) -> list[str]:
    """A sentence for each recipe that some of the experiments lack, and for each that params.yaml does not have."""
    evaluated = {each.name: each.evaluated(task) for each in experiments}
    ever = dict.fromkeys(name for names in evaluated.values() for name in names)
    missing = {name: [each for each, names in evaluated.items() if name not in names] for name in ever}
    return [
        *(f"{name} was not evaluated in {', '.join(missing[name])}." for name in names if missing.get(name)),
        *(f"{name} was evaluated, but is not in params.yaml: left out." for name in ever if name not in names),
    ]


if __name__ == "__main__":
    main()
