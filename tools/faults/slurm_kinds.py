"""Kinds of faults of stages that run as jobs of Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import psutil

from tools.faults.judge import Outcome, Wrong
from tools.faults.kinds import TRAIN, Trial, try_again
from tools.faults.workspaces import CHAIN


def kill_with_slurm(trial: Trial, *, victims: Sequence[str]) -> Outcome:
    """A stage that runs as a job: the launcher that waits for it, or the job, is killed at a moment.

    The same command takes the job up, or what it left, and starts a new one only where the job itself was killed.
    """
    stage = trial.draw.choice((*CHAIN[1:], TRAIN, TRAIN))
    share, victim = trial.draw.random(), trial.draw.choice(victims)
    workspace = trial.copy(stage)
    slurm = {"BAKEOFF_PLACE": "slurm", "SLURM_CONF": os.environ["SLURM_CONF"]}
    trial.workspace = workspace = replace(workspace, environment={**workspace.environment, **slurm})
    trial.moment = f"{victim}, at {share:.0%} of it"
    came = False

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        nonlocal came
        while workspace.process_of("job") is None and process.poll() is None:
            time.sleep(0.05)
        with suppress(subprocess.TimeoutExpired):
            process.wait(share * max(1.0, trial.reference.seconds[stage] - 2))
        for role in victim.split(" and "):
            if process.poll() is None and (found := workspace.process_of(role)) is not None:
                with suppress(psutil.NoSuchProcess):
                    found.kill()
                    came = True

    ended = workspace.dvc("repro", stage, meanwhile=meanwhile)
    outcome = try_again(trial, stage, ended, came=came and ended.code != 0)
    log = trial.folder.with_name(f"{trial.folder.name}.log").read_text(encoding="utf-8", errors="replace")
    if "stage" not in victim and "job" not in victim and len(re.findall(r"launcher: job \d+\n", log)) > 1:
        raise Wrong("a second job was submitted")
    return outcome


SLURM_KINDS: dict[str, Callable[[Trial], Outcome]] = {
    "SIGKILL, job left alone": partial(kill_with_slurm, victims=("launcher", "dvc", "dvc and launcher")),
    "SIGKILL of the job": partial(kill_with_slurm, victims=("job", "stage")),
}
