"""Records the provenance of a stage (stages/core/provenance.py).

Imports nothing heavy: it is on the way of every stage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stages.core.environment import numeric_settings
from stages.core.errors import UserError
from stages.core.lineage import combined_digest, file_digest
from stages.core.params.schema import Params
from stages.core.provenance import Provenance, write_provenance
from stages.kit.launcher.engines import Engine
from stages.kit.launcher.gpus import Gpu, driver_version
from stages.kit.launcher.inputs import digests, recorded_inputs
from stages.kit.launcher.pipeline import DeclaredStage
from stages.kit.launcher.stage_run import Ended, StageRun
from stages.kit.planning.ladder import lowered
from stages.kit.planning.plan import Plan, read_plan

SEEN_BY_STAGES = ("stages", "docker", "params.yaml", "dvc.yaml", "pyproject.toml")
"""Whatever else is changed in a checkout, dvc.lock by every stage, is no part of a run."""


class ProvenanceRecorder:
    """Sees a stage start, and when it has ended well writes down what its outputs were made of, in place of what an
    earlier run left there.

    What a person may edit while a training runs is looked at when it starts.
    """

    def __init__(
        self,
        stage_run: StageRun,
        stage: DeclaredStage,
        path: Path,
        params: Params,
        engine: Engine,
        inputs: dict[str, str],
    ) -> None:
        self.stage_run, self.stage, self.path, self.engine, self.inputs = stage_run, stage, path, engine, inputs
        self.started, self.clock = datetime.now(UTC), time.monotonic()
        workspace_dir = stage_run.workspace_dir
        self.commit, self.changed = git_state(workspace_dir, (*SEEN_BY_STAGES, *stage.inputs("data")))
        self.code = code_digest(workspace_dir, stage)
        self.params = used_params(params, stage)
        self.lock = lock_digest(workspace_dir, engine, target=params.active.device.kind)

    @classmethod
    def called(cls, stage_run: StageRun, params: Params, engine: Engine) -> ProvenanceRecorder | None:
        """None for a run that dvc.yaml declares no record of. Raises UserError where it would read what is damaged."""
        stage = stage_run.pipeline.that_runs(stage_run.call)
        if stage is None:
            return None
        inputs = recorded_inputs(stage_run.workspace_dir, stage_run.pipeline, stage)
        if stage.provenance is None:
            return None
        return cls(stage_run, stage, stage_run.workspace_dir / stage.provenance, params, engine, inputs)

    def write(self, ended: Ended, *, attempt: int, gpus: Iterable[Gpu]) -> None:
        """Write the record. attempt: the one that ended well; those before it left nothing."""
        names = [gpu.name for gpu in gpus]
        plan = plan_followed(self.stage_run, self.stage, attempt)
        image, image_digest = self.engine.image or (None, None)
        provenance = Provenance(
            stage=self.stage.name,
            command=self.stage.command,
            started=self.started.isoformat(timespec="seconds"),
            ended=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - self.clock, 2),
            commit=self.commit,
            changed=self.changed,
            code=self.code,
            experiment=self.stage_run.caller.get("DVC_EXP_NAME"),
            params=self.params,
            plan=None if plan is None else plain(asdict(plan)),
            seed=None if plan is None else plan.seed,
            attempt=attempt,
            inputs=self.inputs,
            outputs=digests(self.stage_run.workspace_dir, self.stage.written),
            engine=self.engine.name,
            image=image,
            image_digest=image_digest,
            lock=self.lock,
            machine=ended.machine,
            gpus=names,
            driver=driver_version() if names else None,
            environment=numeric_settings(self.stage_run.caller),
        )
        try:
            write_provenance(provenance, self.path)
        except OSError as error:
            raise UserError(f"the record of {self.stage.name} cannot be written to {self.path}: {error}") from None


def git_state(workspace_dir: Path, paths: Iterable[str]) -> tuple[str | None, list[str]]:
    """(commit, those of the files below these paths that it does not have as they are); (None, []) without git."""
    status = ("status", "--porcelain=v2", "--branch", "--no-renames", "--untracked-files=all", "-z")
    try:
        asked = subprocess.run(
            ["git", *status, "--", *paths],
            cwd=workspace_dir,
            capture_output=True,
            check=True,
            # Else it would write to the index, beside dvc.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.CalledProcessError):
        return None, []
    commit, changed = None, []
    for line in os.fsdecode(asked.stdout).split("\0"):
        kind, _, rest = line.partition(" ")
        if rest.startswith("branch.oid ") and not rest.endswith("(initial)"):
            commit = rest.removeprefix("branch.oid ")
        elif kind in ("1", "u"):  # git-status(1): the path comes last, after seven or nine fields
            changed.append(rest.split(" ", {"1": 7, "u": 9}[kind])[-1])
        elif kind == "?":
            changed.append(rest)
    return commit, sorted(changed)


def code_digest(workspace_dir: Path, stage: DeclaredStage) -> str:
    """Of the code that the stage declares."""
    declared = [workspace_dir / path for path in stage.inputs("stages")]
    files = [file for path in declared for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return combined_digest(
        {
            file.relative_to(workspace_dir).as_posix(): file_digest(file)
            for file in files
            if "__pycache__" not in file.parts
        }
    )


def used_params(params: Params, stage: DeclaredStage) -> dict[str, Any]:
    """What the stage declares of params.yaml, by dotted path, defaults filled in; what is not there is left out."""
    everything, found = plain(asdict(params)), {}
    for path in (declared.replace("${profile}", params.profile) for declared in stage.params):
        here = everything
        for step in path.split("."):
            here = here.get(step) if isinstance(here, dict) else None
        if here is not None:
            found[path] = here
    return found


def plain(settings: dict[str, Any]) -> Any:
    """As JSON has it: lists for tuples."""
    return json.loads(json.dumps(settings))


def plan_followed(stage_run: StageRun, stage: DeclaredStage, attempt: int) -> Plan | None:
    """The plan that the stage reads; for a training, with what it gave up for want of memory."""
    for path in stage.inputs("data"):
        if path.endswith("/plan.yaml"):
            folder = (stage_run.workspace_dir / path).parent
            plan = read_plan(folder.name, runs_dir=folder.parent)
            return lowered(plan, attempt) if stage_run.stage == "train" else plan
    return None


def lock_digest(workspace_dir: Path, engine: Engine, *, target: str) -> str | None:
    """Of the lock that an image was built from, or that docker/setup installed completely."""
    installed = Path(sys.prefix) / ".bakeoff"
    if engine.image is None:
        if not (installed / "target").is_file():
            return None
        lock = installed / f"{(installed / 'target').read_text().strip()}.lock"
    else:
        lock = workspace_dir / "docker" / f"{target}.lock"
    return file_digest(lock) if lock.is_file() else None
