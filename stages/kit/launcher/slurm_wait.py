"""Runs a stage as a job of Slurm: submits it or reattaches to it, shows its output, and collects its results.

A job's name has the workspace, the stage and a fingerprint of everything that the stage depends on: the same command
after a lost connection, a killed dvc or a reboot finds the job that runs, or the results it left, and starts no second
one.
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
from typing import TextIO

from stages.core.environment import job_environment, numeric_settings
from stages.core.errors import UserError
from stages.core.signals import GRACE_S
from stages.kit.launcher.container import locked
from stages.kit.launcher.pipeline import JOB_VARIABLE, Request
from stages.kit.launcher.process import ForwardedSignals, forwarded_signals
from stages.kit.launcher.slurm import (
    ENDING_STATE,
    TIME_IS_UP,
    JobDir,
    QueuedJob,
    Unanswered,
    ask_to_end,
    cancel,
    job_info,
    job_options,
    queued_jobs,
    stage_dir,
    submit,
)

LOOK_S = 0.25
"""Between two looks at the job's files."""
QUERY_S = (1.0, 20.0)
"""Between two queries of Slurm: at first, and at most."""
SETTLES_S = 1.0
"""After a signal: if dvc got it too, it has ended by then, and the signal is a closed terminal or a reboot."""
APPEARS_S = 90.0
"""Time that a file that a node has written may take to appear here, on a network file system."""
LOCK_S = 30.0
"""Longest wait for another launcher's lock: the sbatch of one that was killed keeps it until it has ended."""
USUAL = ("None", "Priority", "Resources", "BeginTime")
"""Reasons that need no action."""


class StageJob:
    """A stage that is to run as a job."""

    def __init__(self, request: Request, facts: Mapping[str, object], *, say: Callable[[str], None]) -> None:
        """facts: everything that the stage's result depends on, by names for people; the job compares them with those
        that it finds when it starts.
        """
        self.request, self.facts, self.say = request, facts, say
        self.declared, self.workspace_dir = request.require_declared(), request.workspace_dir
        identity = json.dumps({**facts, "environment": numeric_settings(request.caller)}, sort_keys=True)
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:12]
        workspace = hashlib.sha256(os.fsencode(self.workspace_dir)).hexdigest()[:8]
        self.stage_name = f"bakeoff-{workspace}-{self.declared.name}"
        """Beginning of the names of all jobs of this stage."""
        self.name = f"{self.stage_name}-{self.fingerprint}"
        self.dir = JobDir(stage_dir(self.declared, self.workspace_dir) / f"job-{self.fingerprint}")
        self.number = ""
        self._shown_bytes = 0
        self._asked_at: float | None = None

    def run(self) -> int:
        """Run the stage to its end, and return its exit code: 128 + n if this launcher detached or cancelled the job
        on signal n.

        Raises UserError if Slurm refuses the job, would never start it, or ended it.
        """
        refusal = f"another launcher waits for {self.declared.name} in this workspace; wait for it, or end it"
        waiter_path = stage_dir(self.declared, self.workspace_dir) / "waiter"
        with forwarded_signals() as signals, locked(waiter_path, refusal, patience_s=LOCK_S) as lock:
            own = self._cancel_others(signals)
            while not signals.received:
                submitted = own is None and self.dir.end() is None
                if submitted:
                    self._submit(lock)
                elif own is not None:
                    self.number = own.number
                    self.say(f"reattached to job {own.number}, {own.state.lower()}")
                else:
                    self.say("collecting the outputs of its job, which ended while no launcher waited")
                code = self._follow(signals)
                if code is None:
                    break
                if code == 0 and (submitted or self.dir.has(self.declared.outs)):
                    self.dir.publish(self.workspace_dir, self.declared.outs)
                    self.dir.delete()
                    return 0
                self._wait_until_unqueued()
                self.dir.delete()
                if code != 0:
                    return code
                self.say("outputs were removed or moved as the job or a launcher ended; running the stage again")
                own = None
            return 128 + (signals.received or [signal.SIGHUP])[-1]

    def _cancel_others(self, signals: ForwardedSignals) -> QueuedJob | None:
        """Cancel jobs of the stage with other inputs, settings or code, and wait for their end; returns our own job."""
        cancelled: set[str] = set()
        while not signals.received:
            jobs = [job for job in queued_jobs() if job.name.rpartition("-")[0] == self.stage_name]
            own = next((job for job in jobs if job.name == self.name), None)
            others = [job for job in jobs if job.name != self.name]
            for job in others:
                if job.number not in cancelled:
                    self.say(f"cancelling job {job.number}: its inputs, settings or code are not the present ones")
                    cancelled.add(job.number)
                    with suppress(Unanswered):  # it has just ended
                        cancel(job.number)
            if not others and (own is None or own.state != ENDING_STATE):
                for folder in stage_dir(self.declared, self.workspace_dir).glob("job-*"):
                    if folder != self.dir.folder:
                        JobDir(folder).delete()
                return own
            time.sleep(QUERY_S[0])
        return None

    def _submit(self, lock: TextIO) -> None:
        self.dir.renew(self.facts)
        self._shown_bytes = 0
        log_path = str(self.dir.log_path).replace("%", "%%")  # %j would be the job's number
        request, alone = self.request, self.request.num_nodes == 1
        options = [  # sbatch uses the last value
            *job_options(request),
            f"--job-name={self.name}",
            *("--requeue", "--open-mode=append", f"--output={log_path}", f"--chdir={self.workspace_dir}"),
            f"--signal={'B:' if alone else ''}{TIME_IS_UP.name[3:]}@{request.params.slurm.save_seconds}",
        ]
        # A launcher on each node. A single one is the job's own process: srun would answer a signal by killing it.
        srun = "" if alone else 'srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" '
        script = f"#!/bin/bash\nexec {srun}{shlex.join(('docker/run', request.stage, *request.args))}\n"
        environment = job_environment(request.stage, request.caller, network=request.network)
        environment[JOB_VARIABLE] = str(self.dir.folder)
        self.number = submit(script, options, environment=environment, lock=lock)
        self.say(f"job {self.number}")

    def _follow(self, signals: ForwardedSignals) -> int | None:
        """Show the job's output until it has ended; returns the stage's exit code, None if this launcher detaches from
        it or it was cancelled.

        Raises UserError if it ended without writing how.
        """
        query_at, between_s = time.monotonic(), QUERY_S[0]
        gone_at: float | None = None
        num_handled, last_reason = 0, ""
        while True:
            code = self.dir.end()
            self._show()
            if code is not None:
                return code
            if asked := len(signals.received) > num_handled:
                time.sleep(SETTLES_S)
            orphaned = self.request.by_dvc and os.getppid() != caller_pid()
            if signal.SIGHUP in signals.received or orphaned:
                self._detach()
                return None
            if asked or (self._asked_at is not None and time.monotonic() - self._asked_at > GRACE_S):
                num_handled = len(signals.received)
                self._end_job()
            if time.monotonic() >= query_at:
                with suppress(Unanswered):  # the job does not depend on an answer
                    job = next((job for job in queued_jobs() if job.number == self.number), None)
                    gone_at = gone_at or time.monotonic() if job is None else None
                    if job is not None and job.state == "PENDING" and job.reason not in ("None", last_reason):
                        last_reason = job.reason
                        details = "" if last_reason in USUAL else f"; for details: scontrol show job {self.number}"
                        self.say(f"job {self.number} waits in the queue: {last_reason}{details}")
                between_s = QUERY_S[0] if gone_at or self._asked_at else min(1.5 * between_s, QUERY_S[1])
                query_at = time.monotonic() + between_s
                if gone_at is not None and self.dir.end() is None:
                    if self._asked_at is not None and not self.dir.outputs_dir.exists():
                        self.dir.delete()
                        return None
                    self._refuse_if_dead(time.monotonic() - gone_at)
            time.sleep(LOOK_S)

    def _show(self) -> None:
        """Print the job's output since the last call."""
        with suppress(FileNotFoundError), self.dir.log_path.open("rb") as log:
            log.seek(self._shown_bytes)
            printed = log.read()
            self._shown_bytes += len(printed)
            if printed:
                with suppress(OSError):  # a closed terminal
                    sys.stdout.buffer.write(printed)
                    sys.stdout.buffer.flush()

    def _refuse_if_dead(self, gone_s: float) -> None:
        """Raises UserError if the job has ended without writing how, and no file can still be on its way."""
        job = job_info(self.number)
        state = job.get("JobState", "unknown to Slurm")
        # The job writes its end, unless Slurm has ended it. A stage that Slurm calls OUT_OF_MEMORY may have been
        # restarted by its launcher.
        by_itself = state in ("COMPLETED", "FAILED", "OUT_OF_MEMORY", "unknown to Slurm")
        if state in ("PENDING", "RUNNING", ENDING_STATE) or (by_itself and gone_s < APPEARS_S):
            return
        silent = "" if self.dir.log_path.exists() else f"; it printed nothing: do the nodes see {self.workspace_dir}?"
        self.dir.delete()
        raise UserError(
            f"job {self.number} of {self.declared.name} has ended without a result: {state}, exit code "
            f"{job.get('ExitCode', 'unknown')}{silent}. The limits of jobs are set below `slurm` in params.yaml; "
            "run the same command to resubmit it"
        )

    def _wait_until_unqueued(self) -> None:
        """Wait until the queue no longer lists the job, which has ended: the next launcher would reattach to it."""
        patience_ends = time.monotonic() + APPEARS_S
        with suppress(Unanswered):
            while any(job.name == self.name for job in queued_jobs()) and time.monotonic() < patience_ends:
                time.sleep(LOOK_S)

    def _detach(self) -> None:
        """The terminal is closed, or dvc has ended, which removes the clone of an experiment."""
        comes_back = self.request.repository_dir.resolve() == self.workspace_dir
        if not comes_back:
            with suppress(Unanswered):
                self._request_end()
        with suppress(OSError):  # there may be no terminal
            if comes_back:
                self.say(f"detached from job {self.number}; run the same command to reattach")
            else:
                self.say(f"asking job {self.number} to save and end, as no command would reattach to it")

    def _end_job(self) -> None:
        """At first so that it can save its work; a second time, or if it takes too long, at once."""
        try:
            if self._asked_at is not None:
                self.say(f"ending job {self.number} now")
                cancel(self.number)
            elif self._request_end():
                self.say(
                    f"asking job {self.number} to save and end; it is ended after {GRACE_S} s, or if you ask again"
                )
            else:
                self.say(f"job {self.number} was waiting in the queue, and is withdrawn")
            self._asked_at = time.monotonic()
        except Unanswered as error:
            self.say(f"job {self.number} was not asked to end: {error.message}")

    def _request_end(self) -> bool:
        """Ask a running job to end, withdraw a waiting one; returns whether it runs. Raises Unanswered."""
        self.dir.cancel_path.touch()
        try:
            waits = any(job.number == self.number and job.state == "PENDING" for job in queued_jobs())
            if waits:
                cancel(self.number)
            else:
                ask_to_end(self.number, alone=self.request.num_nodes == 1)
        except Unanswered:
            self.dir.cancel_path.unlink()  # or the job would take its time limit for this request
            raise
        return not waits


def caller_pid() -> int:
    """Process that started docker/run: dvc, if it runs the stage."""
    return int(os.environ.get("BAKEOFF_CALLER") or os.getppid())
