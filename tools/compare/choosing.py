"""Choose the best value of a setting for each recipe, on samples that no report scores."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from stages.core.errors import UserError
from stages.core.params.schema import Params
from stages.kit.reporting.compare import TaskReport, evidence_of, read_task_run
from stages.kit.reporting.runs import Run, different_models, refuse_different_samples
from stages.kit.reporting.tables import Column, Row, Table
from stages.kit.statistics import Score, score
from tools.compare.conditions import conditions
from tools.compare.experiments import Experiment

SELECTION = "selection"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A recipe with some values of what was varied."""

    recipe: str
    settings: Mapping[str, str]
    """By dotted path in params.yaml; of the recipe and of all that it is made from."""
    score: Score


def candidates(
    experiments: Sequence[Experiment], params: Params, report: TaskReport, pattern: str
) -> dict[str, list[Candidate]]:
    """By recipe, those of its candidates that differ, the best one first. A recipe with a single one is left out.

    pattern: of the settings that were varied, with * for any name.
    Raises UserError where none was scored on the selection split, or not all on the same samples.
    """
    found: dict[str, dict[tuple[tuple[str, str], ...], list[Run]]] = {}
    for recipe in (name for name, each in params.recipes.items() if each.task == report.task):
        for experiment in experiments:
            run = read_task_run(params, report.task, recipe, report, experiment.data_dir)
            if run and run.metrics.get("split") == SELECTION:  # the cards of others are still of the validation split
                settings = _varied(conditions(experiment, report.task, [recipe]), pattern)
                found.setdefault(recipe, {}).setdefault(tuple(sorted(settings.items())), []).append(run)
    runs = [run for by_settings in found.values() for same in by_settings.values() for run in same]
    if not runs:
        raise UserError(
            "no model was scored on the selection split, and by the samples of reports nothing may be chosen: a report "
            "on them would flatter the choice; run with: -S data.selection=0.15 -S scored=selection"
        )
    refuse_different_samples(runs)
    ranked = {}
    for recipe, by_settings in found.items():
        scored = [_candidate(recipe, dict(settings), same, report) for settings, same in by_settings.items()]
        scored.sort(key=lambda each: each.score.mean, reverse=report.primary.higher_is_better)
        if len(scored) > 1:
            ranked[recipe] = scored
    if not ranked:
        raise UserError(f"no recipe was run with several values of {pattern}")
    return ranked


def on_selection(experiment: Experiment, task: str) -> bool:
    """Whether its models were scored on the samples that settings are chosen by."""
    return any(
        fact.endswith(": scored") and value == f'"{SELECTION}"' for fact, value in conditions(experiment, task).items()
    )


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
        for rank, each in enumerate(by_rank):
            settings = [f"{path.removeprefix(f'recipes.{recipe}.')}={value}" for path, value in each.settings.items()]
            cells = (
                recipe,
                ", ".join(settings),
                each.score.mean,
                each.score.interval,
                len(each.score.by_training),
                "" if rank else "chosen",
            )
            rows.append(Row(cells=cells, emphasised=rank == 0))
    return Table(columns=columns, rows=tuple(rows))


def chosen_command(ranked: Mapping[str, Sequence[Candidate]], share: str, task: str) -> str:
    """Trains every recipe with what was chosen for it, under three seeds, and scores it on the validation samples.

    share: of the training samples, as it was set aside; with another one the recipes would train on others. Where two
    recipes chose another value of what one is made from, that of the later one counts. `++` sets a value whether or not
    params.yaml has it.
    """
    settings = {path: value for best, *_ in ranked.values() for path, value in best.settings.items()}
    chosen = " ".join(f"-S {shlex.quote(f'++{path}={value}')}" for path, value in settings.items())
    return f"dvc exp run --queue {chosen} -S data.selection={share} -S scored=val -S 'seed=42,43,44' compare@{task}"


def _varied(facts: Mapping[str, str], pattern: str) -> dict[str, str]:
    settings = {fact.partition(": ")[2]: value for fact, value in facts.items() if ": " in fact}
    return {path: value for path, value in settings.items() if fnmatchcase(path, pattern)}


def _candidate(recipe: str, settings: dict[str, str], runs: Sequence[Run], report: TaskReport) -> Candidate:
    evidence = np.stack([evidence_of(report.primary, run) for run in different_models(runs)])
    return Candidate(recipe=recipe, settings=settings, score=score(evidence, report.primary.statistic))
