"""GPUs of this machine, as NVIDIA's driver reports them (NVML), and leases: whole GPUs for one stage at a time.

A lease is a locked file for each GPU, which the kernel unlocks when the holder ends, however it ends. Leases keep the
stages of one workspace apart. Processes without a lease, those of another workspace included, are seen through NVML,
and a GPU on which one computes is not leased.
"""

from __future__ import annotations

import fcntl
import os
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import TextIO

import psutil

from stages.core.errors import UserError, bytes_text, pluralize

IDLE_BYTES = 2**30
"""At most in use on a GPU that counts as free: the driver's own memory, or a desktop's windows."""
SETTLE_S = 10.0
"""Time that a GPU may stay in use after its lease ended: a process that just ended is still freeing memory."""
POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    index: int
    """nvidia-smi's index (PCI order); CUDA may count differently (CUDA_DEVICE_ORDER). A stage gets the UUID."""
    uuid: str
    """GPU-8932f937-d72c-..."""
    name: str
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
    """Every GPU of this machine that answers, in NVML's order; none without an NVIDIA driver.

    Raises UserError if there is a driver that does not work.
    """
    import pynvml

    try:
        with _nvml():
            found = [_read_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return tuple(gpu for gpu in found if gpu is not None)
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
        return Gpu(
            index=index,
            uuid=pynvml.nvmlDeviceGetUUID(device),
            name=pynvml.nvmlDeviceGetName(device),
            used_bytes=memory.used,
            total_bytes=memory.total,
            processes=tuple(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(device)),
        )
    except pynvml.NVMLError_GpuIsLost:
        return None


@contextmanager
def leased_gpus(
    count: int, *, locks_dir: Path, holder: str, visible: str | None, say: Callable[[str], None]
) -> Iterator[tuple[Gpu, ...]]:
    """`count` free GPUs that no other stage gets meanwhile; waits for those that other stages hold.

    locks_dir: folder of the leases, one for each UUID.
    holder: who leases, e.g. "train r1-llm-only", for messages to others.
    visible: the caller's CUDA_VISIBLE_DEVICES, which a batch system sets too; the GPUs come in its order. None: all.
    say: gets one line that names the holders that it waits for, and another one when they change.

    Raises UserError if waiting for other stages would not help: there are too few GPUs, or foreign processes use them.
    KeyboardInterrupt or the end of the process end the wait, so call this before handling SIGINT or SIGTERM. A lease
    ends with this process even after SIGKILL, and no child keeps it: the locks are closed when a program starts.
    """
    if count == 0:
        yield ()
        return
    locks_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as locks:
        lease = _Lease(count, locks_dir, holder, visible, locks)
        waits_for, settled_at = None, time.monotonic() + SETTLE_S
        while not lease.attempt():
            if waits_for != lease.held:  # a lease has ended or begun
                settled_at = time.monotonic() + SETTLE_S
                waits_for = lease.held
                if holders := ", ".join(f"GPU {gpu.index} is leased to {other}" for gpu, other in lease.held):
                    say(f"waiting for {pluralize(count, 'GPU')}, {len(lease.free)} free: {holders}")
            if len(lease.free) + len(lease.held) < count and time.monotonic() >= settled_at:
                raise UserError(lease.refusal())
            time.sleep(POLL_S)
        yield tuple(lease.free[:count])


@dataclass
class _Lease:
    """The attempts to lease, and the state of the GPUs at the last one."""

    count: int
    locks_dir: Path
    holder: str
    visible: str | None
    locks: ExitStack
    free: list[Gpu] = field(default_factory=list)
    held: list[tuple[Gpu, str]] = field(default_factory=list)
    """GPUs that are leased, each with its holder."""
    in_use: list[Gpu] = field(default_factory=list)
    """GPUs that are not leased, yet in use."""

    def attempt(self) -> bool:
        """Lock `count` free GPUs; all or none, one process at a time: two that want two GPUs never hold one each."""
        self.free, self.held, self.in_use = [], [], []
        with (self.locks_dir / "leasing").open("a") as leasing:
            fcntl.flock(leasing, fcntl.LOCK_EX)
            for gpu in leasable(read_gpus(), visible=self.visible, count=self.count, holder=self.holder):
                try:
                    _locked(self.locks_dir / gpu.uuid).close()
                    (self.free if gpu.is_free else self.in_use).append(gpu)
                except BlockingIOError:
                    self.held.append((gpu, (self.locks_dir / gpu.uuid).read_text()))
            if len(self.free) < self.count:
                return False
            for gpu in self.free[: self.count]:
                lock = self.locks.enter_context(_locked(self.locks_dir / gpu.uuid))
                lock.truncate(0)
                lock.write(f"{self.holder} (pid {os.getpid()}, since {datetime.now().astimezone():%Y-%m-%d %H:%M})")
                lock.flush()
            return True

    def refusal(self) -> str:
        """The GPUs in use, and their processes as far as they are known."""
        tally = f"{len(self.free)} free, {len(self.held)} leased to other stages, {len(self.in_use)} in use"
        lines = [f"{self.holder} wants {pluralize(self.count, 'GPU')}; {tally} by processes without a lease:"]
        for gpu in self.in_use:
            others = ", ".join(_command_and_user(pid) for pid in gpu.processes) or "a process that is not listed"
            lines.append(f"  {gpu}: {bytes_text(gpu.used_bytes)} of {bytes_text(gpu.total_bytes)} in use by {others}")
        return "\n".join([*lines, "End these processes, or choose other GPUs with CUDA_VISIBLE_DEVICES."])


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
        "choose another profile in params.yaml: one with a smaller device.count, or device.kind cpu"
    )


def _locked(path: Path) -> TextIO:
    """The lock file of a GPU, locked as long as it is open. Raises BlockingIOError if somebody else holds it."""
    lock = path.open("a")  # not "w": the holder's name stays until there is another
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise
    return lock


def _visible(gpus: Sequence[Gpu], visible: str) -> list[Gpu]:
    """The GPUs of CUDA_VISIBLE_DEVICES: indices or beginnings of UUIDs; an empty entry or -1 ends the list."""
    found = []
    entries = takewhile(lambda entry: entry not in ("", "-1"), (entry.strip() for entry in visible.split(",")))
    for entry in dict.fromkeys(entries):
        is_uuid = entry.startswith("GPU-")
        named = [gpu for gpu in gpus if entry == str(gpu.index) or (is_uuid and gpu.uuid.startswith(entry))]
        if len(named) != 1:
            raise UserError(
                f"CUDA_VISIBLE_DEVICES names {entry!r}, which is {pluralize(len(named), 'GPU')} here; "
                f"expected indices or UUIDs of: {', '.join(f'{gpu} {gpu.uuid}' for gpu in gpus)}"
            )
        found += named
    return found


def _command_and_user(pid: int) -> str:
    """The process, its command and its user, if the system reports them: it may be in another container."""
    try:
        process = psutil.Process(pid)
        return f"pid {pid} ({textwrap.shorten(' '.join(process.cmdline()), width=80)}, {process.username()})"
    except psutil.Error:
        return f"pid {pid}"
