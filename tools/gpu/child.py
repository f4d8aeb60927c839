"""One piece of what `make gpu` and `make calibrate` measure.

Run  python -m tools.gpu.child TASK_JSON ANSWER_PATH   (runner.py does)
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import click

from stages.core.logs import configure_logging
from stages.kit.memory_use.out_of_memory import recognised_out_of_memory

JOBS = {
    "facts": "facts:facts",
    "recipes": "recipes:run_all_stages",
    "predictions": "training:predict_memory",
    "trainings": "training:measure_training",
    "answers": "training:measure_answers",
}
"""The function of each step, in a module of this package. Called with the kind of device and the task, it returns what
JSON can hold."""


@click.command(help=__doc__)
@click.argument("task_json")
@click.argument("answer_path", type=click.Path(path_type=Path))
@recognised_out_of_memory()
def main(task_json: str, answer_path: Path) -> None:
    asked = json.loads(task_json)
    configure_logging(asked["step"])
    module, _, name = JOBS[asked["step"]].partition(":")
    answer = getattr(import_module(f"tools.gpu.{module}"), name)(asked["device"], **asked["task"])
    answer_path.write_text(json.dumps(answer, allow_nan=False), encoding="utf-8")


if __name__ == "__main__":
    main()
