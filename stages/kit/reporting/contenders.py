"""Reads every run of a task: what a comparison compares, and a model card shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stages.core.errors import UserError
from stages.core.params.schema import Params, made_by
from stages.core.provenance import records_dir
from stages.kit.memory_use import stage_memory_path
from stages.kit.reporting.cards import cards_dir
from stages.kit.reporting.comparison import Contender, score_contender
from stages.kit.reporting.runs import (
    Run,
    different_models,
    evaluation_stage,
    read_run,
    refuse_different_samples,
    refuse_random_beside_trained,
)
from stages.kit.reporting.task_report import TaskReport


def read_contenders(params: Params, task: str, report: TaskReport, data_dirs: Sequence[Path]) -> list[Contender]:
    """Every baseline and recipe of the task, in the order of params.yaml, evaluated or not.

    data_dirs: of one workspace, or of several, in each of which the recipes were trained under another seed.
    """
    names: dict[str, str | None] = {name: None for name, base in params.baselines.items() if base.task == task}
    names |= {name: _baseline_of(params, name) for name, recipe in params.recipes.items() if recipe.task == task}
    runs = {
        name: list(filter(None, (read_task_run(params, task, name, report, data_dir) for data_dir in data_dirs)))
        for name in names
    }
    evaluated = [run for found in runs.values() for run in found]
    if not evaluated:
        raise UserError(f"no model of task {task} has been evaluated; run: dvc repro compare@{task}")
    refuse_different_samples(evaluated)
    refuse_random_beside_trained(evaluated)
    _refuse_other_profile(params, evaluated)
    continued_by = {name: recipe.base_recipe() for name, recipe in params.recipes.items()}
    return [
        score_contender(
            report,
            name,
            different_models(runs[name]),
            baseline=baseline,
            stage_of=tuple(other for other, parent in continued_by.items() if parent == name),
        )
        for name, baseline in names.items()
    ]


def read_task_run(params: Params, task: str, name: str, report: TaskReport, data_dir: Path) -> Run | None:
    """The run of a recipe or a baseline of the task, or None where it has not been evaluated."""
    return read_run(
        cards_dir(data_dir, task) / name,
        identity=report.identity,
        columns=report.columns,
        trained=name in params.recipes,
        memory_by_stage=memory_by_stage(params, task, name, data_dir),
        records_dir=records_dir(data_dir, task),
    )


def memory_by_stage(params: Params, task: str, name: str, data_dir: Path) -> dict[str, Path]:
    """Where the stages that a recipe or a baseline went through say what they held, in their order.

    The build that it starts from is among them, and the stages of what it continues are not.
    """
    trained = name in params.recipes
    stages = ["train", "merge"] if trained else []
    paths = {f"{stage}@{name}": stage_memory_path(data_dir, task, name=name, stage=stage) for stage in stages}
    paths[evaluation_stage(name, trained=trained)] = stage_memory_path(data_dir, task, name=name, stage="evaluate")
    made_of = made_by(params.subject(name).base)
    stage, _, build = made_of.partition("@")
    if stage == "build":
        paths = {made_of: stage_memory_path(data_dir, task, name=build, stage=stage), **paths}
    return paths


def _baseline_of(params: Params, recipe_name: str) -> str:
    """The baseline of the base that a recipe comes from, through all the recipes it continues."""
    recipe = params.recipes[recipe_name]
    while parent := recipe.base_recipe():
        recipe = params.recipes[parent]
    build = recipe.base_build()
    base = params.builds[build].base if build else recipe.base
    for name, baseline in params.baselines.items():
        if baseline.base == base and baseline.task == recipe.task:
            return name
    return f"base-{base.removeprefix('bases/')}"


def _refuse_other_profile(params: Params, runs: list[Run]) -> None:
    others = [run for run in runs if run.plan and run.plan.profile != params.profile]
    if others:
        found = ", ".join(f"{run.name} ({run.plan.profile})" for run in others if run.plan)
        raise UserError(
            f"params.yaml sets profile {params.profile}, but these were trained under another: {found}; "
            f"train them again with: dvc repro {' '.join(run.stage for run in others)}"
        )
