"""Stages as steps of Slurm: srun starts this launcher again on a node, prints its output and returns its exit code.

On a login node srun requests the resources and waits for them; inside an allocation (sbatch, salloc) it takes a part of
them. Nothing is remembered between two runs: a stage that was killed or ran out of time is resumed by the same command,
from its last checkpoint. Works with any Slurm since 21.08 (`--exact`).
"""

from __future__ import annotations

import shlex
import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress

from stages.core.errors import UserError
from stages.core.params.schema import Params
from stages.launcher.messages import say
from stages.launcher.pipeline import IN_STEP, PLACE_VARIABLE, Request
from stages.launcher.process import forwarded_signals, start, wait_for
from stages.planning.disk import TRAINED_BYTES, WEIGHT_BYTES
from stages.planning.plan import read_plan
from stages.planning.prediction import GIB, read_memory

PLACES = ("here", "slurm")

SAVE = signal.SIGUSR1
"""The signal that asks a stage to save and end. srun passes it on; on SIGINT it prints a status, on SIGTERM and SIGHUP
it kills the stage (Slurm 22.05, srun(1), "Signals")."""

CORES_PER_DEVICE = 2
"""In addition to one for each data-loader worker."""
PROCESS_GIB = 4.0
"""Host memory of one process of torch: its libraries, CUDA's context, buffers for transfers."""
OTHER_GIB = 8.0
"""Host memory of a stage without a plan."""
MARGIN = 1.25


def runs_in_slurm(caller: Mapping[str, str], params: Params) -> bool:
    """Whether stages are to run in steps of Slurm; false within a step. Raises UserError for an unknown place."""
    place = caller.get(PLACE_VARIABLE) or params.active.place
    if place not in (*PLACES, IN_STEP):
        raise UserError(
            f"{PLACE_VARIABLE} is {place!r}; the places are {', '.join(PLACES)}. Set one of them, or: "
            f"unset {PLACE_VARIABLE}"
        )
    return place == "slurm"


def run_step(request: Request) -> int:
    """Run the stage in a step on its nodes, and return its exit code; 128 + n if signal n asked it to end.

    The first signal lets a running stage save, and withdraws a request that still waits for resources; the second has
    Slurm kill the stage. If this launcher is killed, srun ends the step. Raises UserError without srun.
    """
    if not shutil.which("srun"):
        raise UserError(
            "stages are to run in steps of Slurm, and there is no srun here; "
            f"run them on this machine with: {PLACE_VARIABLE}=here"
        )
    command = ["srun", *step_options(request), "docker/run", request.stage, *request.args]
    say(shlex.join(command))
    with forwarded_signals() as signals:
        srun = start(command, cwd=request.workspace_dir, env={**request.caller, PLACE_VARIABLE: IN_STEP})
        signals.forward_to(lambda _: srun.send_signal(SAVE if len(signals.received) == 1 else signal.SIGTERM))
        code = wait_for(srun)
    return 128 + signals.received[-1] if code and signals.received else code


def step_options(request: Request) -> list[str]:
    """srun's options for the resources of one stage, those of params.yaml last: srun uses the last value.

    An option of params.yaml also replaces one of ours that it excludes (--mem-per-gpu and --mem); without a value, as
    `--mem=`, it only removes that.
    """
    profile, num_gpus = request.params.active, request.num_gpus
    own = request.params.slurm.gpu if num_gpus else request.params.slurm.cpu
    cores = (profile.device.count if request.stage == "train" else 1) * (CORES_PER_DEVICE + profile.dataloader_workers)
    defaults = {
        f"--mem={max(1, round(host_gib(request) * 1024))}M": ("--mem=", "--mem-per-"),
        f"--cpus-per-task={cores}": ("--cpus-per-",),
        f"--gres={f'gpu:{num_gpus}' if num_gpus else 'none'}": ("--gres=", "--gpus"),
    }
    return [
        *(f"--nodes={request.num_nodes}", "--ntasks-per-node=1", f"--job-name={request.require_declared().name}"),
        # In an allocation, steps side by side. Elsewhere, all of the caller's environment.
        *("--exact", "--export=ALL"),
        # A failure on one node ends the others; nodes may end at different times.
        *("--kill-on-bad-exit=1", "--wait=0", f"--signal={SAVE.name[3:]}@{request.params.slurm.save_seconds}"),
        *(option for option, family in defaults.items() if not any(each.startswith(family) for each in own)),
        *(option for option in own if not option.endswith("=")),
    ]


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
    processes = plan.device.count if stage == "train" and plan.is_data_parallel else 1
    copies = 2 if stage == "merge" else 1  # a merge reads back what it wrote
    weights_gib = plan.trainable["all"] * WEIGHT_BYTES[plan.memory.precision] / GIB
    gib = processes * (PROCESS_GIB + weights_gib * copies + plan.dataloader_workers)
    if stage == "train":
        # A checkpoint is put together in the host's memory; paged states stay there.
        gib += 3 * plan.trainable["total"] * TRAINED_BYTES / GIB
    if not plan.on_gpu:
        with suppress(UserError):
            record = read_memory(request.name, runs_dir=runs_dir)
            gib += processes * (record.prediction.total_bytes if stage == "train" else record.evaluation_bytes) / GIB
    return MARGIN * gib
