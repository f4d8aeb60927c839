"""Stages as jobs of Slurm: submits a job or reattaches to it, shows its output, and collects its results.

A job's name has the workspace, the stage and a fingerprint of everything that the stage depends on: the same command
after a lost connection, a killed dvc or a reboot finds the job that runs, or the results it left, and starts no second
one. In the job the same launcher runs the stage (`run_inside_job`). Works with any Slurm since 20.11, without
accounting. Both sides communicate by files, as all that they are sure to share is the file system:

    data/.outputs/STAGE/waiter              locked by the launcher that waits for a job of the stage
    data/.outputs/STAGE/job-FINGERPRINT/    folder of one job
        log                                 its output
        facts.json                          what it is submitted for: inputs, settings, code
        cancel                              made before it is asked to end
        failed-START                        exit code of another node than the first, in that start of the job
        outputs/                            outputs of the stage, under their paths in the workspace
        end                                 written last: the stage's exit code

DVC removes a stage's outputs before it starts the stage, those of a job that runs or has ended unattended too. So the
job puts them aside, and the launcher that waits, or the next one, moves them to their places.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from stages.core.atomic import atomic_write
from stages.core.environment import job_environment, numeric_settings
from stages.core.errors import UserError
from stages.core.locks import hold
from stages.core.params.schema import Params
from stages.core.signals import ENDING, GRACE_S, handling
from stages.launcher.container import ASIDE_DIR, move, remove
from stages.launcher.logs import say
from stages.launcher.pipeline import JOB_VARIABLE, Request, host_gib
from stages.launcher.process import ForwardedSignals, forwarded_signals
from stages.launcher.record import code_digest, digests, used_params
from stages.planning.prediction import GIB
from stages.training.checkpoints import checkpoints_dir

PLACES = ("here", "slurm")
TIME_IS_UP = signal.SIGUSR1
"""The signal that Slurm sends before a job's time is over (sbatch --signal)."""
ENDING_STATE = "COMPLETING"
"""State of a job whose processes are being ended."""

CORES_PER_DEVICE = 2
"""In addition to one for each data-loader worker."""
EXCLUSIVE = (("--mem=", "--mem-per-"), ("--cpus-per-", "--cores-per-"), ("--gres=", "--gpus"))
"""Options that exclude each other: a person's replaces ours; without a value, as `--mem=`, by none."""

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


def runs_in_slurm(caller: Mapping[str, str], params: Params) -> bool:
    """Whether a stage is to be submitted; inside a job it is not. Raises UserError for an unknown place."""
    place = caller.get("BAKEOFF_PLACE") or params.active.place
    if place not in PLACES:
        raise UserError(
            f"BAKEOFF_PLACE is {place!r}; the places are {', '.join(PLACES)}. Set one of them, or: unset BAKEOFF_PLACE"
        )
    return place == "slurm" and JOB_VARIABLE not in caller


class Unanswered(UserError):
    """Slurm does not answer now; it may later."""


class QueuedJob(NamedTuple):
    number: str
    state: str
    """PENDING, RUNNING, COMPLETING, ..."""
    reason: str
    """Slurm's reason why it waits, e.g. Priority."""
    name: str


def queued_jobs() -> list[QueuedJob]:
    """The caller's jobs that have not ended. Raises Unanswered."""
    lines = _run("squeue", "--me", "--all", "--noheader", "--format=%i|%T|%r|%j").splitlines()
    return [QueuedJob(*line.split("|", 3)) for line in lines if line.count("|") >= 3]  # some print the cluster too


def job_info(number: str) -> dict[str, str]:
    """Slurm's facts about a job, by its names (JobState, Reason, ExitCode, ...); empty if nothing."""
    try:
        return dict(re.findall(r"(\w+)=(\S*)", _run("scontrol", "show", "job", "--oneliner", number)))
    except Unanswered:
        return {}


def ask_to_end(number: str, *, alone: bool) -> None:
    """SIGTERM to the job's own process, which passes it on; if not alone, to its processes on all nodes."""
    _run("scancel", "--quiet", *(("--batch",) if alone else ()), "--signal=TERM", number)


def _run(*command: str) -> str:
    """Raises Unanswered."""
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            process_group=0,  # a closing terminal's signal must not end the command that passes it on
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


def job_options(request: Request) -> list[str]:
    """sbatch's options for the resources of one stage, the person's own last: sbatch uses the last value."""
    profile, num_gpus = request.params.active, request.num_gpus
    own = request.params.slurm.gpu if num_gpus else request.params.slurm.cpu
    devices = profile.device.count if request.stage == "train" else 1
    gib = own.memory_gb * 1e9 / GIB if own.memory_gb else host_gib(request)
    cores = devices * (CORES_PER_DEVICE + profile.dataloader_workers)
    options = [
        *(f"--nodes={request.num_nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cores}"),
        f"--mem={max(1, round(gib * 1024))}M",
        *((f"--gres=gpu:{num_gpus}",) if num_gpus else ()),
    ]
    wishes = {"time": own.minutes, "partition": own.partition, "account": own.account}
    options += [f"--{key}={value}" for key, value in wishes.items() if value]
    replaced = [names for names in EXCLUSIVE if any(each.startswith(names) for each in own.options)]
    kept = [option for option in options if not any(option.startswith(names) for names in replaced)]
    return [*kept, *(option for option in own.options if not option.endswith("="))]


class JobDir:
    """The folder of one job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_path = folder / "log"
        self.cancel_path = folder / "cancel"
        self.facts_path = folder / "facts.json"
        self.outputs_dir = folder / "outputs"

    def end(self) -> int | None:
        """The stage's exit code; None if the job has not ended, or ended without writing it."""
        try:
            return int((self.folder / "end").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def put_aside(self, workspace_dir: Path, outputs: Iterable[str]) -> None:
        """Move the outputs out of the workspace.

        A DVC run that begins at this moment may be removing them: an output that loses a file meanwhile is removed.
        """
        for out in outputs:
            place, aside = workspace_dir / out, self.outputs_dir / out
            with suppress(FileNotFoundError):
                before = _names(place)
                move(place, aside)
                if _names(aside) != before or not (before or aside.is_file()):
                    remove(aside)

    def publish(self, workspace_dir: Path, outputs: Iterable[str]) -> None:
        """Move outputs to their places, replacing what is there, and delete the folder."""
        for out in outputs:
            if (self.outputs_dir / out).exists():  # DVC reports a missing one
                move(self.outputs_dir / out, workspace_dir / out)
        self.delete()

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)  # a network file system may keep the open log


def _names(path: Path) -> set[Path]:
    """Files and folders below a path, relative to it."""
    return {file.relative_to(path) for file in path.rglob("*")}


def job_facts(request: Request) -> dict[str, object]:
    """Everything that the result of a job depends on, by names for people."""
    declared = request.require_declared()
    return {
        "command": [request.stage, *request.args],
        "inputs": digests(request.workspace_dir, declared.inputs("data")),
        "params": used_params(request.params, declared),
        "code": code_digest(request.workspace_dir, declared),
        "image": digests(request.workspace_dir, declared.inputs("docker")),
        "engine": request.engine_name,
    }


class StageJob:
    """A stage that is to run as a job."""

    def __init__(self, request: Request) -> None:
        self.request, self.facts = request, job_facts(request)
        self.declared, self.workspace_dir = request.require_declared(), request.workspace_dir
        identity = json.dumps({**self.facts, "environment": numeric_settings(request.caller)}, sort_keys=True)
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:12]
        workspace = hashlib.sha256(os.fsencode(self.workspace_dir)).hexdigest()[:8]
        self.stage_name = f"bakeoff-{workspace}-{self.declared.name}"
        """Beginning of the names of all jobs of this stage."""
        self.name = f"{self.stage_name}-{self.fingerprint}"
        self.jobs_dir = self.workspace_dir / ASIDE_DIR / self.declared.name
        self.dir = JobDir(self.jobs_dir / f"job-{self.fingerprint}")
        self.number = ""
        self._shown_bytes = 0
        self._asked_at: float | None = None

    def run(self) -> int:
        """Run the stage to its end, and return its exit code: 128 + n if this launcher detached or cancelled the job
        on signal n.

        Raises UserError if Slurm refuses the job, would never start it, or ended it.
        """
        refusal = f"another launcher waits for {self.declared.name} in this workspace; wait for it, or end it"
        waiter = hold(self.jobs_dir / "waiter", refusal, patience_s=LOCK_S)
        with forwarded_signals() as signals, waiter as lock:
            while True:
                own = self.own_job(signals)
                if signals.received:
                    break
                submitted = own is None and self.dir.end() is None
                if submitted:
                    self._submit(lock)
                elif own is not None:
                    self.number = own.number
                    say(f"reattached to job {own.number}, {own.state.lower()}")
                else:
                    say("collecting the outputs of its job, which ended while no launcher waited")
                code = self._follow(signals)
                if code is None:
                    break
                outs = self.declared.outs
                if code == 0 and (submitted or all((self.dir.outputs_dir / out).exists() for out in outs)):
                    self.dir.publish(self.workspace_dir, outs)
                    return 0
                self.dir.delete()
                if code != 0:
                    return code
                say("outputs were removed or moved as the job or a launcher ended; running the stage again")
            return 128 + (signals.received or [signal.SIGHUP])[-1]

    def own_job(self, signals: ForwardedSignals) -> QueuedJob | None:
        """The job of this name, if it is still to run or runs. Cancels jobs of the stage with other inputs, settings or
        code, and waits until they, and one of this name that has ended, have left the queue.
        """
        told: set[str] = set()
        while not signals.received:
            jobs = [job for job in queued_jobs() if job.name.rpartition("-")[0] == self.stage_name]
            # Whoever collects a job's results removes its folder, perhaps before Slurm knows of the job's end.
            has_ended = not self.dir.folder.exists()
            ending = [job for job in jobs if job.name != self.name or has_ended or job.state == ENDING_STATE]
            for job in ending:
                if job.number in told:
                    continue
                told.add(job.number)
                if job.name == self.name:
                    say(f"waiting until job {job.number}, which has ended, leaves the queue")
                else:
                    say(f"cancelling job {job.number}: its inputs, settings or code are not the present ones")
                    with suppress(Unanswered):  # it has just ended
                        _run("scancel", job.number)
            if not ending:
                for folder in self.jobs_dir.glob("job-*"):
                    if folder != self.dir.folder:
                        JobDir(folder).delete()
                return jobs[0] if jobs else None
            time.sleep(QUERY_S[0])
        return None

    def _submit(self, lock: TextIO) -> None:
        """Submit the job. lock: stays locked until sbatch has ended, even if this process is killed before that.

        Raises UserError with Slurm's reason if it refuses the job.
        """
        if not shutil.which("sbatch"):
            raise UserError(
                "stages are to run as jobs of Slurm, and there is no sbatch here; "
                "run them on this machine with: BAKEOFF_PLACE=here"
            )
        remove(self.dir.folder)
        self.dir.folder.mkdir(parents=True)
        atomic_write(json.dumps(self.facts), self.dir.facts_path)
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
        # The job's variables are not in the script, which others could read.
        environment = job_environment(request.stage, request.caller, network=request.network)
        ended = subprocess.run(
            ["sbatch", *options, "--parsable", "--export=ALL"],
            input=f"#!/bin/bash\nexec {srun}{shlex.join(('docker/run', request.stage, *request.args))}\n",
            capture_output=True,
            text=True,
            check=False,
            env=environment | {JOB_VARIABLE: str(self.dir.folder)},
            pass_fds=(lock.fileno(),),
            process_group=0,  # a Ctrl-C must not leave it unknown whether there is a job
        )
        if ended.returncode != 0:
            raise UserError(
                f"Slurm refuses the job: {_reason(ended)}\nIts options were: {' '.join(options)}\n"
                "They come from `slurm` and the profile in params.yaml, and from the recipe's plan"
            )
        self.number = ended.stdout.strip().partition(";")[0]
        say(f"job {self.number}")

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
                        say(f"job {self.number} waits in the queue: {last_reason}{details}")
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

    def _detach(self) -> None:
        """The terminal is closed, or dvc has ended, which removes the clone of an experiment."""
        comes_back = self.request.repository_dir.resolve() == self.workspace_dir
        if not comes_back:
            with suppress(Unanswered):
                self._request_end()
        with suppress(OSError):  # there may be no terminal
            if comes_back:
                say(f"detached from job {self.number}; run the same command to reattach")
            else:
                say(f"asking job {self.number} to save and end, as no command would reattach to it")

    def _end_job(self) -> None:
        """At first so that it can save its work; a second time, or if it takes too long, at once."""
        try:
            if self._asked_at is not None:
                say(f"ending job {self.number} now")
                _run("scancel", self.number)
            elif self._request_end():
                say(f"asking job {self.number} to save and end; it is ended after {GRACE_S} s, or if you ask again")
            else:
                say(f"job {self.number} was waiting in the queue, and is withdrawn")
            self._asked_at = time.monotonic()
        except Unanswered as error:
            say(f"job {self.number} was not asked to end: {error.message}")

    def _request_end(self) -> bool:
        """Ask a running job to end, withdraw a waiting one; returns whether it runs. Raises Unanswered."""
        self.dir.cancel_path.touch()
        try:
            waits = any(job.number == self.number and job.state == "PENDING" for job in queued_jobs())
            if waits:
                _run("scancel", self.number)
            else:
                ask_to_end(self.number, alone=self.request.num_nodes == 1)
        except Unanswered:
            self.dir.cancel_path.unlink()  # or the job would take its time limit for this request
            raise
        return not waits


def caller_pid() -> int:
    """Process that started docker/run: dvc, if it runs the stage."""
    return int(os.environ.get("BAKEOFF_CALLER") or os.getppid())


def refuse_changed_job(request: Request) -> None:
    """Raises UserError if files changed after this job was submitted, so that it would do something else."""
    if not request.in_job:
        return
    submitted = json.loads(JobDir(Path(request.caller[JOB_VARIABLE])).facts_path.read_bytes())
    now = json.loads(json.dumps(job_facts(request)))
    if changed := [name for name in now if now[name] != submitted.get(name)]:
        raise UserError(
            f"{', '.join(changed)} changed after this job was submitted; run the same command to submit it again. "
            "To change files while jobs wait, use an experiment: dvc exp run --queue"
        )


def run_inside_job(request: Request, run: Callable[[], int]) -> int:
    """Run the stage in its job: by `run`, which returns its exit code; put its outputs aside, and write how it ended.

    The outputs are put aside, as DVC removes those of a job that has ended unattended.
    """
    job, number = JobDir(Path(request.caller[JOB_VARIABLE])), request.caller.get("SLURM_JOB_ID", "")
    outs, workspace_dir = request.require_declared().outs, request.workspace_dir
    if job.end() is not None:  # put back into the queue as it ended
        return 0
    saves_in = checkpoints_dir(request.repository_dir, request.name)
    saved_before = set(saves_in.glob("*/step-*"))
    # One name for each start: a failure before the job went back into the queue must not end the next start.
    failed_path = job.folder / f"failed-{request.caller.get('SLURM_RESTART_COUNT', '0')}"
    if request.node == 0:
        for out in outs:  # DVC has removed them; a job that was cancelled after that may have left some
            remove(workspace_dir / out)
    code = _code_of(run)
    if request.node > 0:
        if code != 0 and code - 128 not in ENDING:
            failed_path.write_text(str(code), encoding="utf-8")
            with suppress(Unanswered):  # the first node would wait for this one
                ask_to_end(number, alone=False)
        return code
    if failed_path.exists():
        code = int(failed_path.read_text(encoding="utf-8") or code)
    elif code - 128 in ENDING and not job.cancel_path.exists():
        saved = code != 128 + TIME_IS_UP or set(saves_in.glob("*/step-*")) > saved_before
        if _runs_again(number, saved=saved):
            return code
    if code == 0:
        job.put_aside(workspace_dir, outs)
    atomic_write(str(code), job.folder / "end")
    return code


def _code_of(run: Callable[[], int]) -> int:
    """The exit code of `run`; 128 + n if signal n came while no stage was there to take it. By default the signal would
    end this process before it wrote how its job ended.
    """

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    try:
        with handling(end):
            return run()
    except SystemExit as asked:
        return int(str(asked.code))


def _runs_again(number: str, *, saved: bool) -> bool:
    """Put a job back into the queue that Slurm, and not the person, asked to end: its time is up (SIGUSR1), or other
    jobs come first (SIGTERM). saved: whether the next start would get further than this one.
    """
    if job_info(number).get("JobState", "RUNNING") != "RUNNING":  # without an answer it is taken to run
        return True  # cancelled, or in the queue already
    if not saved:
        say(
            "the time of its job was over before it saved a new checkpoint; "
            "increase slurm.gpu.minutes or slurm.cpu.minutes in params.yaml, or choose another partition"
        )
        return False
    say(f"job {number} goes back into the queue, and resumes from there")  # before: Slurm then ends this process
    try:
        _run("scontrol", "requeue", number)
    except Unanswered as error:
        say(f"job {number} cannot go back into the queue ({error.message}); run the same command to resume")
        return False
    return True
