"""The dvc command that runs the launcher, and changes that it leaves in params.yaml."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

DVC_VARIABLE = "BAKEOFF_DVC"
"""The command line of dvc: in a job, of the one on the machine that it was submitted from; side by side, of the one
command in whose place `tools.run` has several dvc run."""


def dvc_command_line(caller: Mapping[str, str]) -> list[str]:
    """The command line of the dvc that runs the launcher; empty where unknown.

    caller: the launcher's environment.
    """
    if DVC_VARIABLE in caller:
        command_line: list[str] = json.loads(caller[DVC_VARIABLE])
        return command_line
    try:
        return psutil.Process(caller_pid()).cmdline()
    except (psutil.Error, OSError):
        return []


def params_left(command_line: Sequence[str], caller: Mapping[str, str], workspace_dir: Path) -> str | None:
    """How to undo what a failed `dvc exp run -S` leaves in the workspace; None for another command.

    command_line: of DVC. caller: the environment that DVC gives to its stages.
    """
    sets_params = any(re.match(r"-S|--set-p", argument) for argument in command_line)
    # With --temp and in the queue it works in a clone, which it throws away.
    in_place = "DVC_EXP_BASELINE_REV" in caller and Path(caller.get("DVC_ROOT") or ".").resolve() == workspace_dir
    if not (sets_params and in_place):
        return None
    try:
        git = ["git", "diff", "--quiet", "HEAD", "--", "params.yaml"]  # DVC may have staged it
        changed = subprocess.run(git, cwd=workspace_dir, capture_output=True, check=False).returncode == 1
    except OSError:
        changed = False
    if not changed:
        return None
    stage, lock_path = caller.get("DVC_STAGE", ""), workspace_dir / "dvc.lock"
    lock = lock_path.read_text(encoding="utf-8") if lock_path.exists() else ""
    ran_before = re.search(rf"^  {re.escape(stage)}:$", lock, re.MULTILINE)
    back = "git checkout params.yaml" + (f" && dvc checkout {stage}" if ran_before else "")
    return (
        f"params.yaml stays as -S has changed it. Bring it back with: {back}\n"
        "(which also drops changes of your own to it that are neither committed nor staged). "
        "`dvc exp run --temp` leaves the workspace as it is"
    )


def caller_pid() -> int:
    """Process that started docker/run: dvc, where it runs a stage."""
    return int(os.environ.get("BAKEOFF_CALLER") or os.getppid())
