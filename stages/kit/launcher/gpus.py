"""Whole GPUs for one stage at a time.

A stage that wants GPUs leases them: one locked file a GPU, which the kernel unlocks when the holder ends, however
it ends. Leases keep the stages of one workspace apart; of everybody else's processes, those of another workspace
included, NVML tells once they compute, and a GPU on which one does is not leased.
"""

import fcntl
import os
import pwd
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO

from stages.core.errors import UserError

IDLE_BYTES = 256 * 2**20
"""In use on a GPU where nothing runs: the driver's own, a few MiB. A CUDA context on a large GPU takes more."""

DESKTOP_BYTES = 2 * 2**30
"""In use where a desktop is drawn: two 4K screens and a browser. A workstation's only GPU must not be refused."""

SETTLE_S = 10.0
"""How long a GPU that is in use, though not leased, may stay so: a process that just ended is still giving back."""

POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One whole GPU."""

    index: int
    """As nvidia-smi counts, in PCI order; CUDA may count otherwise (CUDA_DEVICE_ORDER). A stage is given the UUID."""
    uuid: str
    """GPU-8932f937-d72c-...; empty where the GPU does not answer."""
    name: str


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that uses a GPU."""

    pid: int
    used_bytes: int | None
    """None where the driver does not tell."""


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """What NVML says of a GPU. What a GPU does not support is None or empty, and speaks against nobody."""

    gpu: Gpu
    obstacle: str = ""
    """Why no stage can have it, whoever uses it: it is split by MIG, or is lost."""
    used_bytes: int | None = None
    """By all processes, those of other containers too; without what the driver reserves for itself."""
    total_bytes: int | None = None
    compute: tuple[GpuProcess, ...] = ()
    graphics: tuple[GpuProcess, ...] = ()
    draws: bool = False
    """Whether it draws a desktop. Under WSL that is Windows', whose processes are not listed."""

    @property
    def is_empty(self) -> bool:
        """Whether nobody computes on it. A desktop's programs may, as long as they stay small."""
        desktop = {process.pid for process in self.graphics}
        allowed_bytes = DESKTOP_BYTES if self.draws or desktop else IDLE_BYTES
        return {process.pid for process in self.compute} <= desktop and (self.used_bytes or 0) <= allowed_bytes


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The GPUs that a stage may have, by what stands in its way."""

    free: tuple[GpuState, ...]
    leased: tuple[tuple[GpuState, str], ...]
    """Each with who holds it. What runs there is the holder's business."""
    occupied: tuple[GpuState, ...]
    """Not leased, yet in use."""


def read_gpus() -> tuple[GpuState, ...]:
    """Every GPU of this machine, in NVML's order; none where there is no NVIDIA driver.

    Raises UserError where there is a driver that does not work.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return tuple(_read_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()
    except pynvml.NVMLError as error:
        raise UserError(f"NVIDIA's driver does not answer ({error}); see what it says to: nvidia-smi") from error


def driver_version() -> str | None:
    """Of NVIDIA's driver, e.g. "580.95.05"; None where it does not tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


@contextmanager
def leased_gpus(
    count: int,
    *,
    locks_dir: Path,
    holder: str,
    visible: str | None,
    say: Callable[[str], None],
    read_gpus: Callable[[], Sequence[GpuState]] = read_gpus,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[Gpu, ...]]:
    """`count` empty GPUs that no other stage gets meanwhile; waits for those that other stages hold.

    holder: who leases, e.g. "train r1-llm-only", for other people's messages.
    visible: the caller's CUDA_VISIBLE_DEVICES; the GPUs come in its order. None: all of them.
    say: is told, in one line, who is waited for, and again when that changes.

    Raises UserError where waiting for other stages would not help: there are too few GPUs, or foreign processes
    hold them. The wait is ended by a signal's own doing, KeyboardInterrupt or the end of the process: call this
    before taking over SIGINT or SIGTERM. What was leased is free again even after SIGKILL, and no child keeps it,
    since the locks are closed when a program starts.
    """
    if count == 0:
        yield ()
        return
    locks_dir.mkdir(parents=True, exist_ok=True)
    said = ""
    occupied_since: dict[str, float] = {}
    with ExitStack() as leases:

        def attempt() -> Survey:
            """One look at the GPUs, and their leases if enough are free."""
            # All or nothing, one stage at a time: two that want two GPUs never hold one each.
            with (locks_dir / "leasing").open("a") as leasing:
                fcntl.flock(leasing, fcntl.LOCK_EX)
                states = leasable(read_gpus(), visible=visible, count=count, holder=holder)
                survey = take_survey(states, locks_dir)
                if len(survey.free) >= count:
                    for state in survey.free[:count]:
                        _write_holder(leases.enter_context(_locked(state.gpu, locks_dir)), holder)
                return survey

        while len((survey := attempt()).free) < count:
            now = clock()
            occupied_since = {state.gpu.uuid: occupied_since.get(state.gpu.uuid, now) for state in survey.occupied}
            num_settling = sum(now - since < SETTLE_S for since in occupied_since.values())
            if len(survey.free) + len(survey.leased) + num_settling < count:
                raise UserError(_foreign_processes(survey, count=count, holder=holder))
            if survey.leased and (waiting := _waiting_for(survey, count=count)) != said:
                say(waiting)
                said = waiting
            sleep(POLL_S)
        yield tuple(state.gpu for state in survey.free[:count])


def leasable(states: Sequence[GpuState], *, visible: str | None, count: int, holder: str) -> list[GpuState]:
    """The GPUs that may be leased, whether or not they are free now, in the order of `visible`.

    Raises UserError where they are fewer than `count`, or `visible` names what is not there.
    """
    if not states:
        raise UserError(
            f"{holder} wants {_gpus(count)}, and this machine has none that NVIDIA's driver shows. "
            f"See what it says to: nvidia-smi; stages run without a GPU on a profile whose device.kind is cpu"
        )
    seen = list(states) if visible is None else _visible(states, visible)
    usable = [state for state in seen if not state.obstacle]
    if len(usable) < count:
        raise UserError(_too_few(states, seen, count=count, holder=holder, visible=visible))
    return usable


def take_survey(states: Iterable[GpuState], locks_dir: Path) -> Survey:
    """Sorts the GPUs by what stands in a stage's way. To be called by whoever alone may lease now."""
    free: list[GpuState] = []
    leased: list[tuple[GpuState, str]] = []
    occupied: list[GpuState] = []
    for state in states:
        try:
            _locked(state.gpu, locks_dir).close()
        except BlockingIOError:
            leased.append((state, _lock_path(state.gpu, locks_dir).read_text()))
        else:
            (free if state.is_empty else occupied).append(state)
    return Survey(free=tuple(free), leased=tuple(leased), occupied=tuple(occupied))


def _lock_path(gpu: Gpu, locks_dir: Path) -> Path:
    return locks_dir / gpu.uuid


def _locked(gpu: Gpu, locks_dir: Path) -> TextIO:
    """The GPU's lock file, locked as long as it is open. Raises BlockingIOError where someone else holds it."""
    lock = _lock_path(gpu, locks_dir).open("a")  # not "w": the holder's name stays until there is another
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise
    return lock


def _write_holder(lock: TextIO, holder: str) -> None:
    lock.truncate(0)
    lock.write(f"{holder} (pid {os.getpid()}, since {datetime.now().astimezone():%Y-%m-%d %H:%M})")
    lock.flush()


def _visible(states: Sequence[GpuState], visible: str) -> list[GpuState]:
    """The GPUs that CUDA_VISIBLE_DEVICES names: indices or beginnings of UUIDs; an empty entry or -1 ends the list."""
    entries = takewhile(lambda entry: entry not in ("", "-1"), (entry.strip() for entry in visible.split(",")))
    return [_named(states, entry) for entry in dict.fromkeys(entries)]


def _named(states: Sequence[GpuState], entry: str) -> GpuState:
    if entry.startswith("MIG-"):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES names {entry}, a part of a GPU, and a stage leases whole ones. "
            f"Name those by index or UUID; they are listed by: nvidia-smi -L"
        )
    named = [
        state
        for state in states
        if entry == str(state.gpu.index) or (entry.startswith("GPU-") and state.gpu.uuid.startswith(entry))
    ]
    if len(named) != 1:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES names {entry!r}, which is {'no GPU' if not named else _gpus(len(named))} here; "
            f"expected indices or UUIDs of: {', '.join(f'{_gpu(state)} {state.gpu.uuid}' for state in states)}"
        )
    return named[0]


def _too_few(
    states: Sequence[GpuState], seen: Sequence[GpuState], *, count: int, holder: str, visible: str | None
) -> str:
    obstacles = {
        _gpu(state): state.obstacle or f"not in CUDA_VISIBLE_DEVICES={visible}"
        for state in states
        if state.obstacle or state not in seen
    }
    found = f"this machine has {_gpus(len(states))}"
    if obstacles:
        found += f", of which {len(states) - len(obstacles)} can be used"
    return "\n".join(
        [
            f"{holder} wants {_gpus(count)}; {found}.",
            *(f"  {gpu}: {obstacle}" for gpu, obstacle in obstacles.items()),
            "Set a profile that wants fewer in params.yaml"
            + (", or change CUDA_VISIBLE_DEVICES." if len(seen) < len(states) else "."),
        ]
    )


def _waiting_for(survey: Survey, *, count: int) -> str:
    holders = ", ".join(f"GPU {state.gpu.index} is leased to {holder}" for state, holder in survey.leased)
    return f"waiting for {_gpus(count)}, {len(survey.free)} free: {holders}"


def _foreign_processes(survey: Survey, *, count: int, holder: str) -> str:
    found = (
        f"{len(survey.free)} free, {len(survey.leased)} leased to other stages, "
        f"{len(survey.occupied)} in use by processes that hold no lease"
    )
    return "\n".join(
        [
            f"{holder} wants {_gpus(count)}; {found}:",
            *(line for state in survey.occupied for line in _occupied(state)),
            "End these processes, or choose other GPUs with CUDA_VISIBLE_DEVICES.",
        ]
    )


def _occupied(state: GpuState) -> Iterator[str]:
    used = "" if state.used_bytes is None else f": {_gib(state.used_bytes)} of {_gib(state.total_bytes)} in use"
    yield f"  {_gpu(state)}{used}"
    processes = {process.pid: process for process in (*state.compute, *state.graphics)}
    for process in processes.values():
        yield f"    pid {process.pid}, {_command_and_user(process.pid)}: {_gib(process.used_bytes)}"
    if not processes:
        yield "    no process to be seen: it may run in another container"


def _command_and_user(pid: int) -> str:
    """As far as /proc tells: a process may just have ended, be in another container, or this be no Linux."""
    process_dir = Path("/proc", str(pid))
    try:
        command = (process_dir / "cmdline").read_bytes() or (process_dir / "comm").read_bytes()
        uid = process_dir.stat().st_uid
    except OSError:
        return "command unknown"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"uid {uid}"
    words = command.replace(b"\0", b" ").decode(errors="replace")
    return f"{textwrap.shorten(words, width=80, placeholder=' ...')} of {user}"


def _gpu(state: GpuState) -> str:
    return f"GPU {state.gpu.index} ({state.gpu.name})"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _gib(num_bytes: int | None) -> str:
    return "memory unknown" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def _read_gpu(index: int) -> GpuState:
    import pynvml

    def ask(query: Callable[..., Any], *args: Any, otherwise: Any) -> Any:
        """What WSL, Jetsons, vGPUs and older drivers do not answer is no obstacle."""
        try:
            return query(*args)
        except (
            pynvml.NVMLError_NotSupported,
            pynvml.NVMLError_FunctionNotFound,
            pynvml.NVMLError_NoPermission,
        ):
            return otherwise

    def processes(query: Callable[..., Any]) -> tuple[GpuProcess, ...]:
        listed = ask(query, device, otherwise=())
        return tuple(GpuProcess(pid=process.pid, used_bytes=process.usedGpuMemory) for process in listed)

    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpu = Gpu(index=index, uuid=pynvml.nvmlDeviceGetUUID(device), name=pynvml.nvmlDeviceGetName(device))
        if ask(pynvml.nvmlDeviceGetMigMode, device, otherwise=(0, 0))[0]:
            return GpuState(gpu=gpu, obstacle=f"split by MIG; made whole by: nvidia-smi -i {index} -mig 0")
        # Version 1 counts the hundreds of MiB that the driver reserves as used.
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo, device, pynvml.nvmlMemory_v2, otherwise=None)
        return GpuState(
            gpu=gpu,
            used_bytes=memory and memory.used,
            total_bytes=memory and memory.total,
            # By version: the plain names raise something else than NVMLError where the driver is too old.
            compute=processes(pynvml.nvmlDeviceGetComputeRunningProcesses_v3),
            graphics=processes(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3),
            draws=bool(ask(pynvml.nvmlDeviceGetDisplayActive, device, otherwise=True)),
        )
    except pynvml.NVMLError as error:  # lost, say: the others are not
        return GpuState(gpu=Gpu(index=index, uuid="", name="not answering"), obstacle=str(error))
