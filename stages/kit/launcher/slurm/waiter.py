"""Runs a stage as a job of Slurm: submits it or finds it again, shows what it prints, and takes what it made.

A job is known by its name, which has the workspace, the stage and a fingerprint of all that the stage is to do: the
same command after a lost connection, a killed dvc or a reboot finds the job that runs, or what it left, and starts no
second one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from stages.core.errors import UserError
from stages.core.signals import GRACE_S
from stages.kit.launcher.pipeline import DeclaredStage
from stages.kit.launcher.process import ForwardedSignals, forwarded_signals
from stages.kit.launcher.slurm.client import (
    ENDING_STATE,
    QueuedJob,
    Unanswered,
    ask_to_end,
    cancel,
    described,
    queued_jobs,
    submit,
)
from stages.kit.launcher.slurm.inside_job import JOB_VARIABLE, TIME_IS_UP
from stages.kit.launcher.slurm.job_dir import End, JobDir, job_dir, job_dirs, waiting_alone

LOOK_S = 0.25
"""Between two looks at the job's files."""
ASK_S = (1.0, 20.0)
"""Between two questions to Slurm: at first, and at most."""
SETTLES_S = 1.0
"""After a signal: dvc, where it got the same, has ended by then, and it is a closed terminal or a reboot."""
APPEARS_S = 90.0
"""How long what a node has written may take to be seen here, on a network file system."""
IMPOSSIBLE = (
    *("AccountNotAllowed", "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS"),
    *("PartitionNodeLimit", "PartitionTimeLimit", "QOSNotAllowed"),
)
"""Reasons for which a job would wait for ever, however empty the cluster gets."""
USUAL = ("None", "Priority", "Resources", "BeginTime")
"""Reasons that need nobody to do anything."""


@dataclass(kw_only=True)
class StageJob:
    """A stage that is to run as a job."""

    declared: DeclaredStage
    workspace_dir: Path
    facts: Mapping[str, object]
    """The job's inputs, settings and code; it compares them with those that it finds when it starts."""
    fingerprint: str
    """Digest of all that it is to do: 12 hexadecimal digits."""
    command: tuple[str, ...]
    """Of the launcher, e.g. ("docker/run", "train", "r1-llm-only")."""
    options: list[str]
    """sbatch's, for the resources."""
    save_seconds: int
    num_nodes: int
    """On each of them a launcher is started."""
    environment: Mapping[str, str]
    """The whole environment of the launcher in the job."""
    comes_back: bool
    """Whether the same command can find the job again: not in a folder that DVC throws away."""
    is_orphan: Callable[[], bool]
    """Whether whoever started this process has ended."""
    say: Callable[[str], None]

    number: str = ""
    _shown_bytes: int = 0
    _said: str = ""
    _asked_at: float | None = field(default=None)

    @property
    def name(self) -> str:
        return f"{self._names}-{self.fingerprint}"

    @property
    def _names(self) -> str:
        """The beginning of the names of all jobs of this stage."""
        workspace = hashlib.sha256(os.fsencode(self.workspace_dir)).hexdigest()[:8]
        return f"bakeoff-{workspace}-{self.declared.name}"

    @property
    def dir(self) -> JobDir:
        return job_dir(self.declared, self.workspace_dir, self.fingerprint)

    def run(self) -> int:
        """Run the stage to its end, and return its exit code: 128 + n where signal n had this launcher leave the job,
        or had it cancelled.

        Raises UserError where Slurm does not take the job, would never start it, or ended it.
        """
        with forwarded_signals() as signals, waiting_alone(self.declared, self.workspace_dir) as lock:
            own = self._end_others(signals)
            if own is None and self.dir.is_taken():
                self.say("a launcher was killed while it took what the job left; it runs again")
                self.dir.forget()
            while not signals.received:
                submitted = own is None and self.dir.end() is None
                if submitted:
                    self._submit(lock)
                elif own is not None:
                    self.number = own.number
                    self.say(f"takes up job {own.number}, {own.state.lower()}")
                else:
                    self.say("takes what its job left, which ended while nobody waited")
                end = self._follow(signals)
                if end is None:
                    break
                if end.code != 0:
                    self._out_of_the_queue()
                    self.dir.forget()
                    return end.code
                lost = not submitted and set(end.outputs) != set(self.declared.outs)
                if not lost:
                    self.dir.publish(self.workspace_dir, self.declared.outs)
                    self.dir.forget()
                    return 0
                self.say("dvc has removed outputs of the job while it ended; it runs again")
                self._out_of_the_queue()
                self.dir.forget()
                own = None
            return 128 + (signals.received or [signal.SIGHUP])[-1]

    def _end_others(self, signals: ForwardedSignals) -> QueuedJob | None:
        """Cancel the jobs of the stage that are to do something else, and wait for their end; returns the own one."""
        cancelled: set[str] = set()
        while not signals.received:
            found = {job.name.rpartition("-")[2]: job for job in queued_jobs() if self._is_of_stage(job)}
            own = found.pop(self.fingerprint, None)
            for job in found.values():
                if job.number not in cancelled:
                    self.say(f"job {job.number} is of other inputs, settings or code: cancelled")
                    cancelled.add(job.number)
                    with suppress(Unanswered):  # it has just ended
                        cancel(job.number)
            if not found and (own is None or own.state != ENDING_STATE):
                for other in job_dirs(self.declared, self.workspace_dir):
                    if other != self.dir:
                        other.forget()
                return own
            time.sleep(ASK_S[0])
        return None

    def _is_of_stage(self, job: QueuedJob) -> bool:
        return job.name.rpartition("-")[0] == self._names

    def _submit(self, lock: TextIO) -> None:
        self.dir.renew(self.facts)
        self._shown_bytes = 0
        log_path = str(self.dir.log_path).replace("%", "%%")  # as in %j, the job's number
        options = [
            *("--requeue", "--open-mode=append", f"--output={log_path}", f"--chdir={self.workspace_dir}"),
            f"--signal={'B:' if self.num_nodes == 1 else ''}{TIME_IS_UP.name.removeprefix('SIG')}@{self.save_seconds}",
            *self.options,
        ]
        # One launcher alone is the job's own process. srun would answer a signal by killing what it has started.
        srun = 'srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" ' if self.num_nodes > 1 else ""
        script = f"#!/bin/bash\nexec {srun}{shlex.join(self.command)}\n"
        environment = {**self.environment, JOB_VARIABLE: str(self.dir.folder)}
        self.number = submit(script, self.name, options, environment=environment, lock=lock)
        self.say(f"job {self.number}")

    # Waiting.

    def _follow(self, signals: ForwardedSignals) -> End | None:
        """Show what the job prints until it has ended; None where this launcher leaves it, or it was cancelled.

        Raises UserError where it will not end, or has ended without a word.
        """
        ask_at, between_s = time.monotonic(), ASK_S[0]
        gone_at: float | None = None
        asked_often = 0
        while True:
            end = self.dir.end()
            self._show()
            if end is not None:
                return end
            if asked := len(signals.received) > asked_often:
                time.sleep(SETTLES_S)
            if signal.SIGHUP in signals.received or self.is_orphan():
                self._leave()
                return None
            if asked or self._is_late():
                asked_often = len(signals.received)
                self._ask_to_end()
            if time.monotonic() >= ask_at:
                with suppress(Unanswered):  # the job does not need an answer, nor does its end
                    job = next((job for job in queued_jobs() if job.number == self.number), None)
                    gone_at = gone_at or time.monotonic() if job is None else None
                    if job is not None and job.state == "PENDING":
                        self._say_why_it_waits(job)
                between_s = ASK_S[0] if gone_at or self._asked_at else min(1.5 * between_s, ASK_S[1])
                ask_at = time.monotonic() + between_s
                if gone_at is not None and self.dir.end() is None:
                    if self._asked_at is not None and not self.dir.outputs_dir.exists():
                        self.dir.forget()
                        return None
                    self._refuse_if_dead(time.monotonic() - gone_at)
            time.sleep(LOOK_S)

    def _show(self) -> None:
        """What the job has printed since the last time."""
        with suppress(FileNotFoundError), self.dir.log_path.open("rb") as log:
            log.seek(self._shown_bytes)
            printed = log.read()
            self._shown_bytes += len(printed)
            if printed:
                with suppress(OSError):  # a closed terminal
                    sys.stdout.buffer.write(printed)
                    sys.stdout.buffer.flush()

    def _say_why_it_waits(self, job: QueuedJob) -> None:
        """Once for each reason. Raises UserError, the job withdrawn, where it would wait for ever."""
        if job.reason in IMPOSSIBLE:
            cancel(self.number)
            self.dir.forget()
            raise UserError(
                f"job {self.number} would never start: {job.reason}, says Slurm, so it was withdrawn. "
                f"It was asked for with: {' '.join(self.options)}"
            )
        line = f"job {self.number} waits in the queue: {job.reason}"
        if job.reason not in USUAL:
            line += f"; see what that means to: scontrol show job {self.number}"
        if line != self._said and job.reason != "None":
            self._said = line
            self.say(line)

    def _refuse_if_dead(self, gone_s: float) -> None:
        """Raises UserError where the job has ended without a word, and none can be on its way."""
        job = described(self.number)
        state, code = job.get("JobState", "unknown to Slurm"), job.get("ExitCode", "")
        # It writes how it ended, unless a signal killed it: that is the second number. A ladder in it may have survived
        # what Slurm calls OUT_OF_MEMORY.
        by_itself = state in ("COMPLETED", "FAILED", "OUT_OF_MEMORY", "unknown to Slurm")
        by_itself = (by_itself and code.partition(":")[2] in ("", "0")) or self.dir.outputs_dir.exists()
        if state in ("PENDING", "RUNNING", ENDING_STATE) or (by_itself and gone_s < APPEARS_S):
            return
        printed = self.dir.log_path.exists()
        self.dir.forget()
        fix = {
            "TIMEOUT": "; it had no time to save: raise slurm.save_seconds in params.yaml",
            "OUT_OF_MEMORY": "; ask for more of the host's memory: slurm.gpu.memory_gb or slurm.cpu.memory_gb",
        }.get(state, "" if printed else f"; it printed nothing: do the nodes see {self.workspace_dir}?")
        reason = "" if job.get("Reason", "None") == "None" else f", {job['Reason']}"
        raise UserError(
            f"job {self.number} of {self.declared.name} has ended without a result: {state}{reason}"
            f"{f', exit code {code}' if code else ''}{fix}. The same command submits it anew"
        )

    def _out_of_the_queue(self) -> None:
        """Wait until nobody would take the job, which has ended, for one that runs."""
        patience_ends = time.monotonic() + APPEARS_S
        with suppress(Unanswered):
            while any(job.name == self.name for job in queued_jobs()) and time.monotonic() < patience_ends:
                time.sleep(LOOK_S)

    # Leaving and ending.

    def _leave(self) -> None:
        """The terminal is closed, or dvc has ended."""
        if self.comes_back:
            with suppress(OSError):  # there may be nobody to say it to
                self.say(f"leaves job {self.number} to itself; the same command takes it up")
            return
        with suppress(OSError):
            self.say(f"asks job {self.number} to save its work and end, as nothing would find it again")
        with suppress(Unanswered):
            self._send_end()

    def _is_late(self) -> bool:
        """Whether the job was asked to end, and has had its time."""
        return self._asked_at is not None and time.monotonic() - self._asked_at > GRACE_S

    def _ask_to_end(self) -> None:
        """At first so that it can save its work; a second time, or when it takes too long, at once."""
        try:
            if self._asked_at is None:
                if self._send_end():
                    self.say(
                        f"asks job {self.number} to save its work and end; it is ended after {GRACE_S} s, "
                        "or when you ask again"
                    )
                else:
                    self.say(f"job {self.number} was waiting in the queue, and is withdrawn")
                self._asked_at = time.monotonic()
            else:
                self.say(f"ends job {self.number}")
                cancel(self.number)
                self._asked_at = time.monotonic()
        except Unanswered as error:
            self.say(f"job {self.number} was not asked to end: {error.message}")

    def _send_end(self) -> bool:
        """Whether it runs, and is asked; one that waits is withdrawn."""
        self.dir.cancel_path.touch()
        try:
            waits = any(job.number == self.number and job.state == "PENDING" for job in queued_jobs())
            if waits:
                cancel(self.number)
            else:
                ask_to_end(self.number, alone=self.num_nodes == 1)
        except Unanswered:
            self.dir.cancel_path.unlink()  # or the job would take its time limit for this request
            raise
        return not waits


def digest(facts: object) -> str:
    """The fingerprint of a job, from all that identifies what it is to do."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
