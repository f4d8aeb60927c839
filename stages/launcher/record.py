"""Records the provenance of a stage (stages/core/provenance.py).

Imports nothing heavy: every stage waits for it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stages.core.environment import installed_packages, numeric_settings
from stages.core.errors import UserError
from stages.core.lineage import combined_digest, content_digest, file_digest
from stages.core.params.schema import Params
from stages.core.provenance import Provenance
from stages.launcher.engines import Engine
from stages.launcher.gpus import driver_version
from stages.launcher.images import BELOW_VLLM, below
from stages.launcher.pipeline import DeclaredStage, Request
from stages.launcher.process import Ended
from stages.planning.ladder import lowered
from stages.planning.plan import Plan, read_plan

SEEN_BY_STAGES = ("stages", "docker", "params.yaml", "dvc.yaml", "pyproject.toml")
"""Other changes in a checkout do not concern a run; every stage changes dvc.lock."""


def recorder(request: Request, engine: Engine) -> Callable[[Ended, int], None]:
    """Note commit, code, settings and inputs of a stage now, when it starts: files may be edited while a training runs.

    Returns what writes the record when the stage has succeeded, given how it ended and the number of that attempt.
    """
    stage, workspace_dir, target = request.require_declared(), request.workspace_dir, request.image_target
    started, clock = datetime.now(UTC), time.monotonic()
    commit, changed = git_state(workspace_dir, (*SEEN_BY_STAGES, *stage.inputs("data")))
    uses_vllm = target in BELOW_VLLM and request.stage == "evaluate"
    image, image_digest = engine.image or (None, None)
    names = [gpu.name for gpu in request.gpus]
    noted: dict[str, Any] = {
        "code": code_digest(workspace_dir, stage),
        "params": used_params(request.params, stage),
        "inputs": digests(workspace_dir, stage.inputs("data")),
        "lock": lock_digest(workspace_dir, engine, target=below(target)),
        "vllm_lock": file_digest(workspace_dir / f"docker/{target}.lock") if uses_vllm else None,
    }

    def write(ended: Ended, attempt: int) -> None:
        if stage.provenance is None:
            return
        plan = plan_followed(request, stage, attempt)
        provenance = Provenance(
            stage=stage.name,
            started=started.isoformat(timespec="seconds"),
            ended=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - clock, 2),
            commit=commit,
            changed=changed,
            experiment=request.caller.get("DVC_EXP_NAME"),
            plan=None if plan is None else asdict(plan),
            attempt=attempt,
            engine=engine.name,
            image=image,
            image_digest=image_digest,
            machine=ended.machine,
            gpus=names,
            driver=driver_version() if names else None,
            environment=numeric_settings(request.caller),
            **noted,
        )
        provenance.write(workspace_dir / stage.provenance)

    return write


def digests(workspace_dir: Path, paths: Iterable[str]) -> dict[str, str]:
    """Digests by path. Missing and unreadable ones are left out; the stage, or DVC, reports them."""
    by_path = {}
    for path in paths:
        with suppress(UserError, OSError):
            by_path[path] = content_digest(workspace_dir / path)
    return by_path


def git_state(workspace_dir: Path, paths: Iterable[str]) -> tuple[str | None, list[str]]:
    """(commit, files below these paths that differ from it); (None, []) without a commit."""

    def git(*command: str) -> str:
        # Without locks: git would otherwise write to the index, at the same time as dvc.
        full = ["git", "--no-optional-locks", "-C", str(workspace_dir), *command]
        return os.fsdecode(subprocess.run(full, capture_output=True, check=True).stdout)

    try:
        lines = git("status", "--porcelain", "--no-renames", "--untracked-files=all", "-z", "--", *paths).split("\0")
        changed = sorted(line[3:] for line in lines if line)
        return git("rev-parse", "--verify", "--quiet", "HEAD").strip(), changed
    except (OSError, subprocess.CalledProcessError):
        return None, []


def code_digest(workspace_dir: Path, stage: DeclaredStage) -> str:
    """Digest of the code that the stage declares."""
    declared = [workspace_dir / path for path in stage.inputs("stages")]
    files = [file for path in declared for file in (path, *path.rglob("*"))]
    return combined_digest(
        {
            file.relative_to(workspace_dir).as_posix(): file_digest(file)
            for file in files
            if file.is_file() and "__pycache__" not in file.parts
        }
    )


def used_params(params: Params, stage: DeclaredStage) -> dict[str, Any]:
    """The values of the params that the stage declares, by dotted path, defaults filled in; missing ones left out."""
    everything, used = asdict(params), {}
    for path in (declared.replace("${profile}", params.profile) for declared in stage.params):
        here: Any = everything
        for step in path.split("."):
            here = here.get(step) if isinstance(here, dict) else None
        if here is not None:
            used[path] = here
    return used


def plan_followed(request: Request, stage: DeclaredStage, attempt: int) -> Plan | None:
    """The plan that the stage reads; for a training, as lowered by earlier attempts that ran out of memory."""
    for path in stage.inputs("data"):
        if path.endswith("/plan.yaml"):
            folder = (request.workspace_dir / path).parent
            plan = read_plan(folder.name, runs_dir=folder.parent)
            return lowered(plan, attempt) if request.stage == "train" else plan
    return None


def lock_digest(workspace_dir: Path, engine: Engine, *, target: str) -> str | None:
    """Digest of the lock that the image was built from, or that docker/setup installed completely; None if another
    installation has since changed the version of one of its packages."""
    lock = workspace_dir / "docker" / f"{target}.lock"
    if engine.image is None:
        setup_dir = Path(sys.prefix) / ".bakeoff"
        if not (setup_dir / "target").is_file():
            return None
        lock = setup_dir / f"{(setup_dir / 'target').read_text().strip()}.lock"
        locked = dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", lock.read_text(), re.MULTILINE)) if lock.is_file() else {}
        installed = installed_packages(sys.path)
        if any(installed.get(name, version) != version for name, version in locked.items()):
            return None
    return file_digest(lock) if lock.is_file() else None
