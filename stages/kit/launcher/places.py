"""Where a stage runs: on this machine, or as a job of Slurm, in which the same launcher runs it on a node."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stages.core.environment import job_environment, numeric_settings
from stages.core.errors import UserError
from stages.core.lineage import file_digest
from stages.core.params.schema import Params
from stages.kit.launcher.dvc_command import DVC_VARIABLE, caller_pid, dvc_command_line
from stages.kit.launcher.engines import DEFAULT_ENGINE
from stages.kit.launcher.needs import gpus_wanted, repository_dir, source_of
from stages.kit.launcher.pipeline import DeclaredStage
from stages.kit.launcher.provenance_recorder import code_digest, recorded_inputs, used_params
from stages.kit.launcher.slurm.inside_job import JOB_VARIABLE
from stages.kit.launcher.slurm.nodes import nodes_of
from stages.kit.launcher.slurm.resources import job_options
from stages.kit.launcher.slurm.waiter import StageJob, digest

PLACES = ("here", "slurm")
ALWAYS_HERE = ("check",)
"""A second's work, and a mistake in params.yaml is not to wait in a queue."""


def runs_in_slurm(stage: str, caller: Mapping[str, str], params: Params) -> bool:
    """Whether a stage is to be submitted; in a job it is where it belongs. Raises UserError for an unknown place."""
    place = caller.get("BAKEOFF_PLACE") or params.active.place
    if place not in PLACES:
        raise UserError(
            f"BAKEOFF_PLACE is {place!r}; the places are {', '.join(PLACES)}. Set one of them, or: unset BAKEOFF_PLACE"
        )
    return place == "slurm" and stage not in ALWAYS_HERE and JOB_VARIABLE not in caller


def stage_job(
    stage: str,
    args: tuple[str, ...],
    declared: DeclaredStage,
    params: Params,
    stages: Sequence[DeclaredStage],
    workspace_dir: Path,
    caller: Mapping[str, str],
    *,
    say: Callable[[str], None],
) -> StageJob:
    """The job of a stage. Raises UserError as `job_facts`."""
    facts = job_facts(stage, args, declared, params, stages, workspace_dir, caller)
    name, by_dvc = args[0] if args else "", "DVC_STAGE" in caller
    environment = job_environment(stage, caller, network=source_of(stage, name, params).startswith("hub:"))
    if by_dvc:
        environment[DVC_VARIABLE] = json.dumps(dvc_command_line(caller))
    return StageJob(
        declared=declared,
        workspace_dir=workspace_dir,
        facts=facts,
        fingerprint=digest({**facts, "environment": numeric_settings(caller)}),
        command=("docker/run", stage, *args),
        options=job_options(
            stage, name, params, num_gpus=gpus_wanted(stage, params.active.device), workspace_dir=workspace_dir
        ),
        save_seconds=params.slurm.save_seconds,
        num_nodes=nodes_of(stage, params.active.device),
        environment=environment,
        comes_back=repository_dir(caller, workspace_dir).resolve() == workspace_dir,
        is_orphan=lambda: by_dvc and os.getppid() != caller_pid(),
        say=say,
    )


def job_facts(
    stage: str,
    args: tuple[str, ...],
    declared: DeclaredStage,
    params: Params,
    stages: Sequence[DeclaredStage],
    workspace_dir: Path,
    caller: Mapping[str, str],
) -> dict[str, object]:
    """All that a job is to do, by names for people. stages: all of dvc.yaml.

    Raises UserError where an input is not what its stage made.
    """
    engine = caller.get("BAKEOFF_ENGINE") or DEFAULT_ENGINE
    image_inputs = (path for dep in declared.inputs("docker") for path in sorted((workspace_dir / dep).rglob("*")))
    return {
        "command": [stage, *args],
        "inputs": recorded_inputs(workspace_dir, stages, declared),
        "params": used_params(params, declared),
        "code": code_digest(workspace_dir, declared),
        "image": {path.name: file_digest(path) for path in image_inputs if path.is_file()},
        "engine": engine,
    }
