"""One piece of what `make gpu` measures.

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
    "facts": "tools.gpu.facts:facts",
    "recipes": "tools.gpu.recipes:go_all_the_way",
    "repeats": "tools.gpu.recipes:repeat",
    "memory": "tools.gpu.memory:calibrate",
    "speed": "tools.gpu.speed:train",
    "answers": "tools.gpu.speed:answer",
}
"""By step, what does it: called with the kind of device and the task, it returns what JSON can hold."""


@click.command(help=__doc__)
@click.argument("task_json")
@click.argument("answer_path", type=click.Path(path_type=Path))
@recognised_out_of_memory()
def main(task_json: str, answer_path: Path) -> None:
    asked = json.loads(task_json)
    configure_logging(asked["step"])
    module, _, name = JOBS[asked["step"]].partition(":")
    task = asked["task"] | ({"left_s": asked["left_s"]} if asked["step"] == "memory" else {})
    answer = getattr(import_module(module), name)(asked["device"], **task)
    answer_path.write_text(json.dumps(answer, allow_nan=False), encoding="utf-8")


if __name__ == "__main__":
    main()
