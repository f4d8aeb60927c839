"""One piece of what `make gpu` measures.

Run  python -m tools.gpu.child TASK_JSON ANSWER_PATH   (runner.py does)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from stages.core.errors import configure_logging
from stages.kit.memory_use import recognised_out_of_memory

JOBS = {
    "facts": "facts:facts",
    "recipes": "recipes:run_all_stages",
    "predictions": "training:predict_memory",
    "trainings": "training:measure_training",
    "answers": "training:measure_answers",
}
"""By step a module of this package and its function."""


def job_of(step: str) -> Callable[..., dict[str, Any]]:
    """Called with the kind of device and a piece's task, it returns what JSON can hold."""
    module, _, name = JOBS[step].partition(":")
    job: Callable[..., dict[str, Any]] = getattr(import_module(f"tools.gpu.{module}"), name)
    return job


@click.command(help=__doc__)
@click.argument("task_json")
@click.argument("answer_path", type=click.Path(path_type=Path))
@recognised_out_of_memory()
def main(task_json: str, answer_path: Path) -> None:
    asked = json.loads(task_json)
    configure_logging(asked["step"])
    answer = job_of(asked["step"])(asked["device"], **asked["task"])
    answer_path.write_text(json.dumps(answer, allow_nan=False), encoding="utf-8")


if __name__ == "__main__":
    main()
