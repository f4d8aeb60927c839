"""The beginning of a stage, run again with today's code: if it computes the same, the recorded outputs may be kept.

A training is stopped after its first steps: their loss and gradient norm are compared with trace.csv, bit for bit. An
evaluation completes some of its samples; their rows are compared with those of predictions.parquet.
"""

from __future__ import annotations

import csv
import filecmp
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq

from stages.core.errors import UserError, join_truncated, listed, pluralize
from stages.core.params import load_params
from stages.core.records import shown
from stages.launcher.pipeline import DeclaredStage
from stages.launcher.record import code_digest
from stages.reporting.runs import EXAMPLE_COLUMN, GROUP_COLUMN
from stages.training.checkpoints import checkpoints_dir
from tools.verify.rerun import launch, launched, stage_to_compare, temporary_workspace

Trace = list[tuple[str, str]]
"""Loss and gradient norm of each step, as in trace.csv."""


def rerun_steps(workspace_dir: Path, name: str, num_steps: int, *, keep: bool) -> int:
    """Plan a recipe again, and run the first steps of its training; returns the exit code.

    Raises UserError for another stage, for missing inputs or outputs, for other data, settings or outputs than in
    dvc.lock, if a stage fails, and if something is edited meanwhile.
    """
    stage, stages = stage_to_compare(workspace_dir, name)
    kind, _, recipe = name.partition("@")
    if kind != "train":
        raise UserError(f"STEPS goes with RERUN=train@RECIPE, not with {name}")
    _require_only_code_changed(name)
    run_dir, plan = Path("data/runs") / recipe, stages[f"plan@{recipe}"]
    with (workspace_dir / run_dir / "training/trace.csv").open(encoding="utf-8") as file:
        recorded = [(row["loss"], row["grad_norm"]) for row in csv.DictReader(file)]
    changes = [f"checkpoints.every_steps={num_steps}"]  # a step that has a checkpoint can be stopped after
    with temporary_workspace(workspace_dir, stage, inputs=plan.inputs("data"), changes=changes) as folder:
        (folder / run_dir / "plan.yaml").unlink()  # a link to the workspace's
        launch(folder, plan)
        same, _, _ = filecmp.cmpfiles(workspace_dir, folder, plan.written, shallow=False)
        if (path := str(run_dir / "plan.yaml")) not in same:
            click.echo(f"{name} would follow another plan: {path} comes out DIFFERENT; see: dvc repro -s {plan.name}")
            return 1
        trace = _first_steps(folder, stage, recipe, num_steps)
        _require_unedited(workspace_dir, folder, plan, stage)
    for step, (before, now) in enumerate(zip(recorded, trace, strict=False), start=1):
        for figure, was, is_now in zip(("loss", "gradient norm"), before, now, strict=True):
            if was != is_now:
                click.echo(f"{name} computes something ELSE: at step {step} the {figure} is {is_now}, and was {was}")
                return 1
    compared = f"{min(len(trace), len(recorded))} of {pluralize(len(recorded), 'step')}"
    kept = [plan.name, name] if len(same) == len(plan.written) and not _changed_but_code(plan.name) else [name]
    return _keep(kept, f"the same bits in the first {compared} of {name}, loss and gradient norm", keep=keep)


def rerun_samples(workspace_dir: Path, name: str, num_samples: int, *, keep: bool) -> int:
    """Evaluate some samples again, spread over the split; returns the exit code. Raises UserError as `rerun_steps`."""
    stage, _ = stage_to_compare(workspace_dir, name)
    kind, _, run = name.partition("@")
    if kind not in ("evaluate", "baseline"):
        raise UserError(f"SAMPLES goes with RERUN=evaluate@RECIPE or RERUN=baseline@NAME, not with {name}")
    _require_only_code_changed(name)
    params, predictions = load_params(workspace_dir / "params.yaml"), Path("data/runs") / run / "predictions.parquet"
    recorded = pq.read_table(workspace_dir / predictions).to_pylist()
    num_samples = min(num_samples, len(recorded))
    numbers = [number * len(recorded) // num_samples for number in range(num_samples)]
    with temporary_workspace(workspace_dir, stage) as folder:
        split = folder / "data/prepared" / params.subject(run).data / f"{params.scored}.parquet"
        chosen = pq.read_table(split).take(numbers)
        split.unlink()  # it may be a link to the workspace's
        pq.write_table(chosen, split)
        launch(folder, stage)
        rows = pq.read_table(folder / predictions).to_pylist()
        _require_unedited(workspace_dir, folder, stage)
    for number, row in zip(numbers, rows, strict=True):
        compared = [each for each in row if each not in (EXAMPLE_COLUMN, GROUP_COLUMN)]  # those depend on all samples
        if different := [column for column in compared if repr(row[column]) != repr(recorded[number].get(column))]:
            now, before = (shown(each.get(different[0])) for each in (row, recorded[number]))
            click.echo(
                f"{name} computes something ELSE: sample {number + 1} differs in {join_truncated(different)}; "
                f"{different[0]} is {now}, and was {before}"
            )
            return 1
    return _keep([name], f"the same completions and scores of {len(rows)} of {len(recorded)} samples", keep=keep)


def _require_only_code_changed(name: str) -> None:
    """Raises UserError if data, settings or outputs of a stage are not those of dvc.lock: a beginning does not show
    whether the rest would come out the same.
    """
    if different := _changed_but_code(name):
        raise UserError(
            f"{name} differs from dvc.lock in more than its code:\n{listed(different)}\n"
            f"so its beginning does not show whether its outputs are good; make them again with: dvc repro {name}"
        )


def _require_unedited(workspace_dir: Path, folder: Path, *stages: DeclaredStage) -> None:
    """Raises UserError if the workspace has other code by now than ran, or the last of the stages has other data."""
    if any(code_digest(workspace_dir, stage) != code_digest(folder, stage) for stage in stages):
        raise UserError(f"the code was edited while {stages[-1].name} ran; type the same command again")
    _require_only_code_changed(stages[-1].name)


def _changed_but_code(name: str) -> list[str]:
    """Data, settings and outputs of a stage that are not those of dvc.lock, with DVC's word for it."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo() as repo:
            changes = [group for group in repo.status(targets=[name]).get(name, ()) if isinstance(group, dict)]
    except DvcException as error:
        raise UserError(f"DVC cannot compare {name} with dvc.lock: {error}") from None
    changed = {path: how for group in changes for paths in group.values() for path, how in paths.items()}
    different = [f"{path} ({how})" for path, how in changed.items() if path.startswith("data/")]
    if isinstance(settings := changed.get("params.yaml"), dict):
        # tracking changes no result
        different += [f"params.yaml: {key} ({how})" for key, how in settings.items() if key != "tracking"]
    return different


def _first_steps(folder: Path, stage: DeclaredStage, recipe: str, num_steps: int) -> Trace:
    """The trace of at least so many steps, or of all: the training is stopped as soon as it has saved them."""
    saved_dir = checkpoints_dir(folder, recipe)
    with launched(folder, stage) as process:
        while process.poll() is None and not any(saved_dir.glob("*/step-*")):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    if process.returncode not in (0, 128 + signal.SIGTERM):
        raise UserError(f"{stage.name} failed, with exit code {process.returncode}; its own message is above")
    if process.returncode == 0:
        with (folder / "data/runs" / recipe / "training/trace.csv").open(encoding="utf-8") as file:
            return [(row["loss"], row["grad_norm"]) for row in csv.DictReader(file)]
    import torch

    newest = max(saved_dir.glob("*/step-*/process-0.pt"))
    state: dict[str, Any] = torch.load(newest, map_location="cpu", mmap=True, weights_only=True)
    assert len(state["trace"]) >= num_steps, state["trace"]
    return [(loss, grad_norm) for loss, grad_norm in state["trace"]]


def _keep(stages: list[str], result: str, *, keep: bool) -> int:
    """Have DVC take today's code as that of these stages; returns the exit code."""
    command = ["dvc", "commit", "--force", *stages]
    if not keep:
        click.echo(f"OK: {result}; keep its outputs with: {' '.join(command)}")
        return 0
    click.echo(f"OK: {result}; kept by: {' '.join(command)}")
    return subprocess.run([sys.executable, "-m", *command], check=False).returncode
