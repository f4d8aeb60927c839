"""Check params.yaml as a whole, before DVC removes or writes anything at a path that a name from it is part of.

Reads   params.yaml; the tasks, for the settings of their datasets
Writes  data/checked.txt, which is always the same
Run     docker/run check
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from stages.core.params import load_params
from stages.core.params.schema import Params
from stages.core.records import nearest, publish_text, refusal
from stages.core.tasks import dataset_problems, load_task

TASKS_DIR = Path(__file__).parent / "tasks"


@click.command(help=__doc__)
def main() -> None:
    path = Path("params.yaml")
    params = load_params(path)
    if found := unknown_tasks(params) or refused_datasets(params):
        raise refusal(path, found)
    publish_text("params.yaml is without mistakes.\n", Path("data/checked.txt"))


def unknown_tasks(params: Params) -> dict[str, str]:
    """Problems by dotted path: tasks that have no folder below stages/tasks."""
    known = sorted(path.parent.name for path in TASKS_DIR.glob("*/__init__.py"))
    groups: dict[str, dict[str, Any]] = {
        **{group: getattr(params, group) for group in ("baselines", "recipes", "builds", "predictions")},
        **{f"profiles.{name}.datasets": profile.datasets for name, profile in params.profiles.items()},
    }
    there_are = f"there are {', '.join(known)}"
    return {
        f"{group}.{name}.task": f"no task is called {user.task!r}{nearest(user.task, known)}; {there_are}"
        for group, users in groups.items()
        for name, user in users.items()
        if user.task not in known
    }


def refused_datasets(params: Params) -> dict[str, str]:
    """Problems by dotted path: settings of datasets, of all profiles, that their tasks do not have."""
    found: dict[str, str] = {}
    for each in (params.on(profile) for profile in params.profiles):
        for name, dataset in each.active.datasets.items():
            found |= dataset_problems(load_task(dataset.task, "sources"), dataset, each.dataset_path(name))
    return found


if __name__ == "__main__":
    main()
