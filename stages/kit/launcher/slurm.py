"""Jobs of Slurm: its commands, the folder of a job, the resources that it requests, and the launcher inside a job.

Works with any Slurm since 20.11, without accounting. slurm_wait.py submits jobs and waits for them. Both sides
communicate by files, as all that they are sure to share is the file system:

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

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from stages.core.errors import UserError
from stages.core.params.schema import Params
from stages.core.records import publish_text
from stages.core.signals import ENDING
from stages.kit.launcher.container import ASIDE_DIR, remove
from stages.kit.launcher.pipeline import JOB_VARIABLE, DeclaredStage, Request, repository_of
from stages.kit.planning.disk import TRAINED_BYTES, WEIGHT_BYTES
from stages.kit.planning.plan import read_plan
from stages.kit.planning.prediction import GIB, MemoryRecord
from stages.kit.training.checkpoints import checkpoints_dir

PLACES = ("here", "slurm")
ALWAYS_HERE = ("check",)
"""It takes a second, and a mistake in params.yaml is not to wait in a queue."""
TIME_IS_UP = signal.SIGUSR1
"""The signal that Slurm sends before a job's time is over (sbatch --signal)."""
ENDING_STATE = "COMPLETING"
"""State of a job whose processes are being ended."""

PROCESS_GIB = 4.0
"""Host memory of one process of torch: its libraries, CUDA's context, buffers for transfers."""
OTHER_GIB = 8.0
"""Host memory of a stage without a plan."""
MARGIN = 1.25
CORES_PER_DEVICE = 2
"""In addition to one for each data-loader worker."""
EXCLUSIVE = {
    "memory": ("--mem=", "--mem-per-"),
    "cores": ("--cpus-per-", "--cores-per-"),
    "gpus": ("--gres=", "--gpus"),
}
"""Options that exclude each other: a person's replaces ours; without a value, as `--mem=`, by none."""
PORTS = range(20000, 30000)
"""Ports of the rendezvous on the first node, one of them by the job's number. Linux assigns none of them by itself
(net.ipv4.ip_local_port_range begins at 32768)."""


class Unanswered(UserError):
    """Slurm does not answer now; it may later."""


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    number: str
    name: str
    state: str
    """PENDING, RUNNING, COMPLETING, ..."""
    reason: str
    """Slurm's reason why it waits, e.g. Priority."""


def submit(script: str, options: Sequence[str], *, environment: Mapping[str, str], lock: TextIO) -> str:
    """Submit a job and return its number.

    environment: the job's whole environment, besides what Slurm sets; not in the script, which others could read.
    lock: stays locked until sbatch has ended, even if this process is killed before that.
    Raises UserError with Slurm's reason if it refuses the job.
    """
    if not shutil.which("sbatch"):
        raise UserError(
            "stages are to run as jobs of Slurm, and there is no sbatch here; "
            "run them on this machine with: BAKEOFF_PLACE=here"
        )
    ended = subprocess.run(
        ["sbatch", *options, "--parsable", "--export=ALL"],
        input=script,
        capture_output=True,
        text=True,
        check=False,
        env=dict(environment),
        pass_fds=(lock.fileno(),),
        process_group=0,  # a Ctrl-C must not leave it unknown whether there is a job
    )
    if ended.returncode != 0:
        raise UserError(
            f"Slurm refuses the job: {_reason(ended)}\nIts options were: {' '.join(options)}\n"
            "They come from `slurm` and the profile in params.yaml, and from the recipe's plan"
        )
    return ended.stdout.strip().partition(";")[0]


def queued_jobs() -> list[QueuedJob]:
    """The caller's jobs that have not ended. Raises Unanswered."""
    lines = _run("squeue", "--me", "--all", "--noheader", "--format=%i|%T|%r|%j").splitlines()
    fields = (line.split("|", 3) for line in lines if line.count("|") >= 3)  # some versions print the cluster too
    return [QueuedJob(number=number, state=state, reason=reason, name=name) for number, state, reason, name in fields]


def job_info(number: str) -> dict[str, str]:
    """Slurm's facts about a job, by its names (JobState, Reason, ExitCode, ...); empty if nothing."""
    try:
        return dict(re.findall(r"(\w+)=(\S*)", _run("scontrol", "show", "job", "--oneliner", number)))
    except Unanswered:
        return {}


def ask_to_end(number: str, *, alone: bool) -> None:
    """SIGTERM to the job's own process, which passes it on; if not alone, to its processes on all nodes."""
    _run("scancel", "--quiet", *(("--batch",) if alone else ()), "--signal=TERM", number)


def cancel(number: str) -> None:
    """Withdraw a job that waits; end one that runs, at once."""
    _run("scancel", "--quiet", number)


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


def runs_in_slurm(stage: str, caller: Mapping[str, str], params: Params) -> bool:
    """Whether a stage is to be submitted; inside a job it is not. Raises UserError for an unknown place."""
    place = caller.get("BAKEOFF_PLACE") or params.active.place
    if place not in PLACES:
        raise UserError(
            f"BAKEOFF_PLACE is {place!r}; the places are {', '.join(PLACES)}. Set one of them, or: unset BAKEOFF_PLACE"
        )
    return place == "slurm" and stage not in ALWAYS_HERE and JOB_VARIABLE not in caller


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
    replaced = [names for names in EXCLUSIVE.values() if any(each.startswith(names) for each in own.options)]
    kept = [option for option in options if not any(option.startswith(names) for names in replaced)]
    return [*kept, *(option for option in own.options if not option.endswith("="))]


def host_gib(request: Request) -> float:
    """Host memory of a stage in GiB, from the recipe's plan, with a margin.

    On a CPU, the predicted memory of the devices is the host's. On GPUs each process needs its own, and room for a copy
    of the weights while it loads them.
    """
    stage, runs_dir = request.stage, request.workspace_dir / "data/runs"
    try:
        plan = read_plan(request.name, runs_dir=runs_dir)
    except UserError:  # the stage reports it
        return OTHER_GIB
    if not plan.trainable or stage not in ("train", "merge", "evaluate"):
        return OTHER_GIB
    processes = plan.processes_per_node if stage == "train" else 1
    copies = 2 if stage == "merge" else 1  # a merge reads back what it wrote
    weights_gib = plan.trainable["all"] * WEIGHT_BYTES[plan.precision] / GIB
    gib = processes * (PROCESS_GIB + weights_gib * copies + plan.dataloader_workers)
    if stage == "train":
        # A checkpoint is put together in the host's memory; paged states stay there.
        gib += 3 * plan.trainable["total"] * TRAINED_BYTES / GIB
    if not plan.on_gpu:
        with suppress(UserError):
            record = MemoryRecord.read(runs_dir / request.name / "memory.json")
            gib += processes * (record.total_gib if stage == "train" else record.evaluation_gib)
    return MARGIN * gib


def node_of(job: Mapping[str, str]) -> int:
    """Index of this node among those of its job, from 0. job: the environment, which names none outside of a job."""
    return int(job.get("SLURM_NODEID", "0"))


def rendezvous(job: Mapping[str, str]) -> dict[str, str]:
    """torchrun's options for joining, as variables (torch/distributed/run.py: PET_ and an option's name).

    A launcher on each node starts torchrun; the first node is where its processes meet.
    """
    return {
        "PET_NODE_RANK": str(node_of(job)),
        "PET_MASTER_ADDR": job["SLURM_LAUNCH_NODE_IPADDR"],
        "PET_MASTER_PORT": str(PORTS[int(job["SLURM_JOB_ID"]) % len(PORTS)]),
    }


class JobDir:
    """The folder of one job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_path = folder / "log"
        self.cancel_path = folder / "cancel"
        self.outputs_dir = folder / "outputs"

    def end(self) -> int | None:
        """The stage's exit code; None if the job has not ended, or ended without writing it."""
        try:
            return int((self.folder / "end").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def renew(self, facts: Mapping[str, object]) -> None:
        """Empty the folder, and note what the new job is submitted for."""
        remove(self.folder)
        self.folder.mkdir(parents=True)
        publish_text(json.dumps(facts), self.folder / "facts.json")

    def changed_since(self, facts: Mapping[str, object]) -> list[str]:
        """Names of the facts that are not as they were when the job was submitted."""
        submitted = json.loads((self.folder / "facts.json").read_bytes())
        now = json.loads(json.dumps(facts))
        return [name for name in now if now[name] != submitted.get(name)]

    def put_aside(self, workspace_dir: Path, outputs: Iterable[str]) -> None:
        """Move the outputs out of the workspace.

        A DVC run that begins at this moment may be removing them: an output that loses a file meanwhile is removed.
        """
        for out in outputs:
            place, aside = workspace_dir / out, self.outputs_dir / out
            remove(aside)
            aside.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                before = _names(place)
                place.rename(aside)
                if _names(aside) != before or not (before or aside.is_file()):
                    remove(aside)

    def has(self, outputs: Iterable[str]) -> bool:
        return all((self.outputs_dir / out).exists() for out in outputs)

    def publish(self, workspace_dir: Path, outputs: Iterable[str]) -> None:
        """Move outputs to their places, replacing what is there."""
        for out in outputs:
            place = workspace_dir / out
            if (self.outputs_dir / out).exists():  # DVC reports a missing one
                remove(place)
                place.parent.mkdir(parents=True, exist_ok=True)
                (self.outputs_dir / out).rename(place)

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)  # a network file system may keep the open log


def stage_dir(stage: DeclaredStage, workspace_dir: Path) -> Path:
    """The folder of all jobs of a stage."""
    return workspace_dir / ASIDE_DIR / stage.name


def _names(path: Path) -> set[Path]:
    """Files and folders below a path, relative to it."""
    return {file.relative_to(path) for file in path.rglob("*")}


def run_inside_job(
    stage: str,
    name: str,
    declared: DeclaredStage,
    run: Callable[[], int],
    workspace_dir: Path,
    say: Callable[[str], None],
) -> int:
    """Run the stage in its job: by `run`, which returns its exit code; put its outputs aside, and write how it ended.

    The outputs are put aside, as DVC removes those of a job that has ended unattended.
    """
    job, number = JobDir(Path(os.environ[JOB_VARIABLE])), os.environ.get("SLURM_JOB_ID", "")
    if job.end() is not None:  # put back into the queue as it ended
        return 0
    # One name for each start: a failure before the job went back into the queue must not end the next start.
    failed_path = job.folder / f"failed-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    if node_of(os.environ) > 0:
        code = run()
        if code != 0 and code - 128 not in ENDING:
            failed_path.write_text(str(code), encoding="utf-8")
            with suppress(Unanswered):  # the first node would wait for this one
                ask_to_end(number, alone=False)
        return code
    saves_in = checkpoints_dir(repository_of(os.environ, workspace_dir), name) if stage == "train" else None
    saved_before = _checkpoints(saves_in)
    for out in declared.outs:  # DVC has removed them; a job that was cancelled after that may have left some
        remove(workspace_dir / out)
    code = run()
    if failed_path.exists():
        code = int(failed_path.read_text(encoding="utf-8") or code)
    elif code - 128 in ENDING and not job.cancel_path.exists():
        saved = code != 128 + TIME_IS_UP or _checkpoints(saves_in) > saved_before
        if _runs_again(number, saved=saved, say=say):
            return code
    if code == 0:
        job.put_aside(workspace_dir, declared.outs)
    publish_text(str(code), job.folder / "end")
    return code


def _runs_again(number: str, *, saved: bool, say: Callable[[str], None]) -> bool:
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
    try:
        _run("scontrol", "requeue", number)
    except Unanswered as error:
        say(f"job {number} cannot go back into the queue ({error.message}); run the same command to resume")
        return False
    say(f"job {number} goes back into the queue, and resumes from there")
    return True


def _checkpoints(recipe_dir: Path | None) -> set[Path]:
    return set(recipe_dir.glob("*/step-*")) if recipe_dir else set()
