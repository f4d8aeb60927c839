"""params.yaml as the launcher reads it before every stage: checked as a whole, with the tasks that it names."""

from __future__ import annotations

from pathlib import Path

from stages.core.params import load_params
from stages.core.params.schema import Params
from stages.core.records import refusal, unknown
from stages.core.tasks import answer_format_problems, dataset_problems, load_task
from stages.planning.cards import named_card


def checked_params(workspace_dir: Path) -> Params:
    """Raises UserError with every mistake under its dotted path."""
    path = workspace_dir / "params.yaml"
    params = load_params(path)
    if card := params.active.device.card:
        named_card(card)
    if problems := unknown_tasks(params, workspace_dir / "stages/tasks") or wrong_for_tasks(params):
        raise refusal(path, problems)
    return params


def unknown_tasks(params: Params, tasks_dir: Path) -> dict[str, str]:
    """Problems by dotted path: tasks without a folder in `tasks_dir`, and predictions of one without `predictions`."""
    known = sorted(path.name for path in tasks_dir.glob("[!_]*/"))
    groups = {group: getattr(params, group) for group in ("baselines", "recipes", "builds", "exports", "predictions")}
    groups |= {f"profiles.{name}.datasets": profile.datasets for name, profile in params.profiles.items()}
    predicting = sorted(path.parent.name for path in tasks_dir.glob("*/predictions.py"))
    return {
        f"predictions.{name}.task": f"{user.task} predicts on no file ({', '.join(predicting)} does); use `make try`"
        for name, user in params.predictions.items()
        if user.task not in predicting
    } | {
        f"{group}.{name}.task": unknown("task is called", user.task, known)
        for group, users in groups.items()
        for name, user in users.items()
        if user.task not in known
    }


def wrong_for_tasks(params: Params) -> dict[str, str]:
    """Problems by dotted path: datasets of other tasks; settings of datasets, of all profiles, and answer formats that
    a task does not have."""
    problems: dict[str, str] = {}
    tasks = {name: data.task for profile in params.profiles.values() for name, data in profile.datasets.items()}
    for group, subjects in (("baselines", params.baselines), ("recipes", params.recipes)):
        for name, subject in subjects.items():
            problems |= answer_format_problems(load_task(subject.task, "samples"), subject, f"{group}.{name}")
            if (task := tasks[subject.data]) != subject.task:
                problems[f"{group}.{name}.data"] = f"is {subject.data}, which has the task {task}"
    for each in (params.on(profile) for profile in params.profiles):
        for name, dataset in each.active.datasets.items():
            problems |= dataset_problems(load_task(dataset.task, "sources"), dataset, each.dataset_path(name))
    return problems
