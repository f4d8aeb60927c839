"""GPUs of this machine, as NVIDIA's driver reports them (NVML), and leases: whole GPUs for one stage at a time.

A lease is a locked file for each GPU, which the kernel unlocks when the holder ends, however it ends. Leases keep the
stages of one workspace apart. Processes without a lease, those of another workspace included, are seen through NVML,
and a GPU on which one computes is not leased.
"""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path

import psutil

from stages.core.errors import UserError, bytes_text, pluralize
from stages.core.locks import lock_folder, try_lock
from stages.launcher.messages import say

IDLE_BYTES = 2**30
"""At most in use on a GPU that counts as free: the driver's own memory, or a desktop's windows."""
SETTLE_S = 10.0
"""Time that a GPU may stay in use after its lease ended: a process that just ended is still freeing memory."""
POLL_S = 1.0
MIN_DRIVER = 580
"""The first driver for CUDA 13, which torch in docker/cuda.lock is built with (NVIDIA, CUDA Toolkit release notes)."""
DEVICES_DIR = Path("/dev")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    index: int
    """nvidia-smi's index (PCI order); CUDA may count differently (CUDA_DEVICE_ORDER). A stage gets the UUID."""
    uuid: str
    """GPU-8932f937-d72c-..."""
    name: str
    minor: int = -1
    """Number of its device file, /dev/nvidia0; -1 if the driver does not give it."""
    used_bytes: int = 0
    """In use by all processes, those of other containers included, without the driver's reserve."""
    total_bytes: int = 0
    processes: tuple[int, ...] = ()
    """Process ids that compute on it."""

    @property
    def is_free(self) -> bool:
        """Whether no process computes on it."""
        return not self.processes and self.used_bytes <= IDLE_BYTES

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def read_gpus() -> tuple[Gpu, ...]:
    """Every GPU of this machine that responds, in NVML's order; none without an NVIDIA driver.

    Raises UserError if there is a driver that does not work.
    """
    import pynvml

    try:
        with _nvml():
            gpus = [_read_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return tuple(gpu for gpu in gpus if gpu is not None)
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()
    except pynvml.NVMLError as error:
        raise UserError(f"NVIDIA's driver does not work ({error}); look at the output of: nvidia-smi") from error


def driver_version() -> str | None:
    """The version of NVIDIA's driver, e.g. "580.95.05"; None if there is none."""
    import pynvml

    try:
        with _nvml():
            return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def refuse_old_driver(what: str) -> None:
    """Raises UserError if NVIDIA's driver is older than the locked packages need. what: a stage, for the message."""
    version = driver_version()
    if version is not None and int(version.partition(".")[0]) < MIN_DRIVER:
        raise UserError(
            f"{what} needs NVIDIA's driver {MIN_DRIVER} or newer, for the CUDA 13 of docker/cuda.lock; this machine "
            f"has {version}. A container uses the machine's driver too. Install a newer one, or use another machine"
        )


def device_files(gpus: Sequence[Gpu]) -> list[Path]:
    """The device files of these GPUs and those that all of them share, as far as they exist."""
    shared = ("nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools")
    paths = [DEVICES_DIR / name for name in (*(f"nvidia{gpu.minor}" for gpu in gpus), *shared)]
    return [path for path in paths if path.exists()]


@contextmanager
def _nvml() -> Iterator[None]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(index: int) -> Gpu | None:
    """None for a GPU that the driver has lost."""
    import pynvml

    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        # Version 1 counts the hundreds of MiB that the driver reserves as used.
        memory = pynvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2)
        minor = -1
        with suppress(pynvml.NVMLError_NotSupported):  # in WSL, which has no device files
            minor = pynvml.nvmlDeviceGetMinorNumber(device)
        return Gpu(
            index=index,
            uuid=pynvml.nvmlDeviceGetUUID(device),
            name=pynvml.nvmlDeviceGetName(device),
            minor=minor,
            used_bytes=memory.used,
            total_bytes=memory.total,
            processes=tuple(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(device)),
        )
    except pynvml.NVMLError_GpuIsLost:
        return None


@contextmanager
def leased_gpus(count: int, *, locks_dir: Path, holder: str, visible: str | None) -> Iterator[tuple[Gpu, ...]]:
    """`count` free GPUs that no other stage gets meanwhile; waits for those that other stages hold, and names those.

    locks_dir: folder of the leases, one for each UUID.
    holder: who leases, e.g. "train r1-llm-only", for messages to others.
    visible: the caller's CUDA_VISIBLE_DEVICES, which a batch system sets too; the GPUs come in its order. None: all.

    Raises UserError if waiting for other stages would not help: the driver is too old, there are too few GPUs, or
    foreign processes use them.
    KeyboardInterrupt or the end of the process end the wait, so call this before handling SIGINT or SIGTERM. A lease
    ends with this process even after SIGKILL, and no child keeps it: the locks are closed when a program starts.
    """
    if count == 0:
        yield ()
        return
    refuse_old_driver(holder)
    with ExitStack() as locks:
        waits_for, settled_at = dict[int, str](), time.monotonic() + SETTLE_S
        while True:
            # All or none, one process at a time: two that want two GPUs never hold one each.
            with lock_folder(locks_dir):
                gpus = leasable(read_gpus(), visible=visible, count=count, holder=holder)
                held = {gpu.index: other for gpu in gpus if (other := _holder(locks_dir / gpu.uuid)) is not None}
                free = [gpu for gpu in gpus if gpu.is_free and gpu.index not in held]
                if len(free) >= count:
                    for gpu in free[:count]:
                        lock = try_lock(locks_dir / gpu.uuid)
                        assert lock is not None
                        locks.enter_context(lock)
                        lock.truncate(0)
                        lock.write(f"{holder} (pid {os.getpid()}, since {datetime.now().astimezone():%Y-%m-%d %H:%M})")
                        lock.flush()
                    break
            if held != waits_for:  # a lease has ended or begun
                waits_for, settled_at = held, time.monotonic() + SETTLE_S
                if holders := ", ".join(f"GPU {index} is leased to {other}" for index, other in held.items()):
                    say(f"waiting for {pluralize(count, 'GPU')}, {len(free)} free: {holders}")
            if len(free) + len(held) < count and time.monotonic() >= settled_at:
                in_use = [gpu for gpu in gpus if not gpu.is_free and gpu.index not in held]
                tally = f"{len(free)} free, {len(held)} leased to other stages, {len(in_use)} in use"
                raise UserError(
                    f"{holder} wants {pluralize(count, 'GPU')}; {tally} by processes without a lease:\n"
                    + "".join(f"  {_use(gpu)}\n" for gpu in in_use)
                    + "End these processes, or choose other GPUs with CUDA_VISIBLE_DEVICES."
                )
            time.sleep(POLL_S)
        yield tuple(free[:count])


def _use(gpu: Gpu) -> str:
    """The memory in use on a GPU, and the processes that use it, as far as they are known."""
    others = ", ".join(_command_and_user(pid) for pid in gpu.processes) or "a process that is not listed"
    return f"{gpu}: {bytes_text(gpu.used_bytes)} of {bytes_text(gpu.total_bytes)} in use by {others}"


def leasable(gpus: Sequence[Gpu], *, visible: str | None, count: int, holder: str) -> list[Gpu]:
    """The GPUs that may be leased, free or not, in the order of `visible`.

    Raises UserError if they are fewer than `count`, or `visible` names one that is not there.
    """
    seen = list(gpus) if visible is None else _visible(gpus, visible)
    if len(seen) >= count:
        return seen
    has = f"{pluralize(len(gpus), 'GPU')} that NVIDIA's driver shows"
    if visible is not None:
        has += f", {len(seen)} of them in CUDA_VISIBLE_DEVICES={visible}"
    raise UserError(
        f"{holder} wants {pluralize(count, 'GPU')}; this machine has {has}. Look at the output of nvidia-smi, or "
        "set gpus in params.yaml to that number, or choose a profile that runs on a CPU: -S profile=tiny -S gpu=null"
    )


def _holder(path: Path) -> str | None:
    """The holder of the lease of a GPU, by its lock file; None if nobody has it."""
    if lock := try_lock(path):
        lock.close()
        return None
    return path.read_text()


def _visible(gpus: Sequence[Gpu], visible: str) -> list[Gpu]:
    """The GPUs of CUDA_VISIBLE_DEVICES: indices or beginnings of UUIDs; an empty entry or -1 ends the list."""
    named_gpus: list[Gpu] = []
    entries = takewhile(lambda entry: entry not in ("", "-1"), (entry.strip() for entry in visible.split(",")))
    for entry in dict.fromkeys(entries):
        is_uuid = entry.startswith("GPU-")
        named = [gpu for gpu in gpus if entry == str(gpu.index) or (is_uuid and gpu.uuid.startswith(entry))]
        if len(named) != 1:
            raise UserError(
                f"CUDA_VISIBLE_DEVICES names {entry!r}, which is {pluralize(len(named), 'GPU')} here; "
                f"expected indices or UUIDs of: {', '.join(f'{gpu} {gpu.uuid}' for gpu in gpus)}"
            )
        named_gpus += named
    return named_gpus


def _command_and_user(pid: int) -> str:
    """The process, its command and its user, if the system reports them: it may be in another container."""
    try:
        process = psutil.Process(pid)
        return f"pid {pid} ({textwrap.shorten(' '.join(process.cmdline()), width=80)}, {process.username()})"
    except psutil.Error:
        return f"pid {pid}"
