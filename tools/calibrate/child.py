"""One task of a calibration: what the device is, what a setting is predicted to take, or what it takes.

Run  python -m tools.calibrate.child TASK_JSON ANSWER_PATH   (children.py does)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter

from stages.core.errors import UserError
from stages.core.logs import configure_logging
from stages.kit.memory.budget import verdict
from stages.kit.memory.calibration import Calibration, load_calibration
from stages.kit.memory.predict import depth_of, predict, with_depth
from stages.kit.memory_use.out_of_memory import recognised_out_of_memory
from stages.kit.models.load import check_device, resolve_attention
from tools.calibrate.children import Task
from tools.calibrate.measured import DeviceFacts, Measured, device_facts, measure_step
from tools.calibrate.outcomes import Forecast
from tools.calibrate.settings import Setting, setting_named

SHARES = (1.0, 0.75, 0.5, 0.25, 0.125)
"""Of the language model's layers: the first that fits is measured."""


@click.command(help=__doc__)
@click.argument("task_json")
@click.argument("answer_path", type=click.Path(path_type=Path))
@recognised_out_of_memory()
def main(task_json: str, answer_path: Path) -> None:
    task: Task = TypeAdapter(Task).validate_json(task_json)
    configure_logging(f"{task.job} {task.setting}")
    jobs: dict[str, Callable[[Task], Any]] = {"facts": _facts, "predict": _predict, "measure": _measure}
    answer = jobs[task.job](task)
    answer_path.write_text(json.dumps(asdict(answer)), encoding="utf-8")


def _facts(task: Task) -> DeviceFacts:
    return device_facts(task.device)


def _predict(task: Task) -> Forecast:
    setting = setting_named(task.setting)
    return forecast(setting, task, for_device(load_calibration(), task))


def _measure(task: Task) -> Measured:
    setting = setting_named(task.setting)
    config, plan = setting.config(), setting.plan(task.device)
    check_device(plan.device, plan.precision)
    resolve_attention(plan.attn, plan.device, plan.precision)
    batch = setting.batch(config)
    if task.layers is not None:
        config = with_depth(config, task.layers)
    return measure_step(plan, config, setting.processor(), batch)


def forecast(setting: Setting, task: Task, calibration: Calibration) -> Forecast:
    """Raises UserError where not even the fewest layers fit."""
    config, plan = setting.config(), setting.plan(task.device)
    batch, processor = setting.batch(config), setting.processor()
    text, vision = depth_of(config)
    fewer = [(max(1, round(text * share)), vision) for share in SHARES]
    for layers in [task.layers] if task.layers else fewer:
        part = with_depth(config, layers)
        scaled = predict(plan, part, processor, batch, calibration)
        if task.capacity_bytes is None or verdict(scaled, task.capacity_bytes) == "fits":
            exact = predict(plan, part, processor, batch, calibration, exact=True)
            return Forecast(layers=layers, scaled=scaled, exact=exact)
    raise UserError(f"does not fit with {SHARES[-1]:.1%} of its layers")


def for_device(calibration: Calibration, task: Task) -> Calibration:
    """With cuBLAS's workspaces as they were measured: they are part of what a prediction says torch allocates."""
    if not task.workspaces:
        return calibration
    size, count = calibration.cublas_workspace_hopper_mib, calibration.cublas_workspaces
    return replace(
        calibration,
        cublas_workspace_hopper_mib=replace(size, value=task.workspace_bytes / 2**20),
        cublas_workspaces=replace(count, value=float(task.workspaces)),
    )


if __name__ == "__main__":
    main()
