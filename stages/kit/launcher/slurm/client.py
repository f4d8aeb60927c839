"""Slurm's commands, as any version since 20.11 answers them: no JSON, no accounting."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from stages.core.errors import UserError

ENDING_STATE = "COMPLETING"
"""Of a job whose processes are being ended."""


class Unanswered(UserError):
    """Slurm does not answer now; it may again."""


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    number: str
    name: str
    state: str
    """PENDING, RUNNING, COMPLETING, ..."""
    reason: str
    """Why it waits, in Slurm's word, e.g. Priority."""


def submit(script: str, name: str, options: Sequence[str], *, environment: Mapping[str, str], lock: TextIO) -> str:
    """Submit a job and return its number.

    environment: the whole environment of the job, beside what Slurm sets; by names and values, as a script could be
    read by others. lock: stays locked until sbatch has ended, even where this process is killed before that.
    Raises UserError with Slurm's words where it takes no such job.
    """
    command = ["sbatch", "--parsable", f"--job-name={name}", "--export=ALL", *options]
    try:
        ended = subprocess.run(
            command,
            input=script,
            capture_output=True,
            text=True,
            check=False,
            env=dict(environment),
            pass_fds=(lock.fileno(),),
            process_group=0,  # a Ctrl-C must not leave it unknown whether there is a job
        )
    except FileNotFoundError:
        raise UserError(
            "stages are to run as jobs of Slurm, and there is no sbatch here; "
            "run them on this machine with: BAKEOFF_PLACE=here"
        ) from None
    if ended.returncode == 0:
        return ended.stdout.strip().partition(";")[0]
    for job in queued_jobs():  # it may have been taken, and the answer lost
        if job.name == name:
            return job.number
    raise UserError(
        f"Slurm takes no such job: {_reason(ended)}\nIt was asked for with: {' '.join(options)}\n"
        "These come from `slurm` and the profile in params.yaml, and from the recipe's plan"
    )


def queued_jobs() -> list[QueuedJob]:
    """The caller's jobs that have not ended. Raises Unanswered."""
    lines = _ask("squeue", "--me", "--all", "--noheader", "--format=%i|%T|%r|%j").splitlines()
    fields = (line.split("|", 3) for line in lines if line.count("|") >= 3)  # some versions name the cluster too
    return [QueuedJob(number=number, state=state, reason=reason, name=name) for number, state, reason, name in fields]


def described(number: str) -> dict[str, str]:
    """What Slurm still knows of a job, by its names for it (JobState, Reason, ExitCode, ...); empty for nothing."""
    try:
        return dict(re.findall(r"(\w+)=(\S*)", _ask("scontrol", "show", "job", "--oneliner", number)))
    except Unanswered:
        return {}


def ask_to_end(number: str, *, alone: bool) -> None:
    """SIGTERM to the job's own process, which passes it on; or, not alone, to what it has started on its nodes."""
    _ask("scancel", "--quiet", *(("--batch",) if alone else ()), "--signal=TERM", number)


def cancel(number: str) -> None:
    """Withdraw a job that waits; end one that runs, at once."""
    _ask("scancel", "--quiet", number)


def requeue(number: str) -> str | None:
    """Put a running job back into the queue; None, or why that cannot be."""
    try:
        _ask("scontrol", "requeue", number)
    except Unanswered as error:
        return error.message
    return None


def _ask(*command: str) -> str:
    """Raises Unanswered."""
    try:
        # Of its own process group: a closing terminal's signal must not end what passes it on.
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            process_group=0,
            # A person's defaults for these commands could hide a job, or wait for an answer.
            env={name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SCANCEL_"))},
        )
    except FileNotFoundError:
        raise Unanswered(f"there is no {command[0]} on this machine") from None
    if ended.returncode != 0:
        raise Unanswered(f"{command[0]} does not answer: {_reason(ended)}")
    return ended.stdout


def _reason(ended: subprocess.CompletedProcess[str]) -> str:
    return re.sub(r"^\w+: (error: )?", "", (ended.stderr.strip() or "no reason given").splitlines()[-1])
