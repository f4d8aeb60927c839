"""Processes of a training: one, or with placements ddp and sharded one a device, started by torchrun."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from stages.core.errors import OUT_OF_MEMORY, OutOfMemory, UserError
from stages.core.params.schema import DeviceParams
from stages.core.signals import ENDING, GRACE_S, end_with_own_parent, handled_signals
from stages.internals.torch_internals import expand_segments
from stages.models.load import limit_visible_gpus
from stages.planning.plan import Plan
from stages.training.kernels import prepare_kernels
from stages.training.randomness import seed_everything


def is_first_process() -> bool:
    """Whether this process writes what the training leaves."""
    return int(os.environ.get("RANK", "0")) == 0


def is_worker() -> bool:
    """Whether torchrun started this process."""
    return "LOCAL_RANK" in os.environ


def set_up(plan: Plan) -> None:
    """This process's GPUs, allocator, kernels and seeds, before CUDA starts; a worker ends with torchrun.

    Raises as `prepare_kernels` does.
    """
    if is_worker():
        end_with_own_parent()
    limit_visible_gpus(plan.device)
    if plan.memory.expandable_segments and plan.on_gpu:
        expand_segments()
    prepare_kernels(plan)
    seed_everything(plan.seed)


def run_workers(device: DeviceParams, command: Sequence[str]) -> None:
    """Run a module with its arguments in one process for each device of this node, and wait for them.

    Over several nodes this runs on each of them; torchrun's own variables say which node it is and where the first
    one is. Raises UserError without them, and OutOfMemory if a worker ran out of memory. Exits with 128 + the signal
    if the kernel killed a worker, or a signal asked to end and the workers have saved.
    """
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(GRACE_S)  # torchrun's default, 30 s, may not suffice to save
    signals = ",".join(number.name for number in handled_signals())
    if device.nodes > 1 and not {"PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"} <= os.environ.keys():
        raise UserError(f"a training over {device.nodes} nodes is started on each of them: BAKEOFF_PLACE=slurm")
    nodes = ["--standalone"] if device.nodes == 1 else [f"--nnodes={device.nodes}"]
    try:
        torchrun([*nodes, f"--nproc-per-node={device.count}", "--signals-to-handle", signals, "-m", *command])
    except SignalException as request:
        sys.exit(128 + request.sigval)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if OUT_OF_MEMORY in codes:
            raise OutOfMemory("a process of the training ran out of memory") from None
        if -signal.SIGKILL in codes:
            sys.exit(128 + signal.SIGKILL)
        if ended_by := codes & {128 + number for number in ENDING}:
            sys.exit(max(ended_by))
        raise
