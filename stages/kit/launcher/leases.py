"""Leases: whole GPUs for one stage at a time.

A lease is a locked file, one for each GPU, which the kernel unlocks when the holder ends, however it ends. Leases keep
the stages of one workspace apart. Processes without a lease, those of another workspace included, are seen through
NVML, and a GPU on which one computes is not leased.
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

from stages.core.errors import UserError, bytes_text, counted
from stages.kit.launcher.gpus import Gpu, read_gpus

SETTLE_S = 10.0
"""How long a GPU that is in use, though not leased, may stay so: a process that just ended is still giving back."""

POLL_S = 1.0


@dataclass(kw_only=True)
class Survey:
    """The GPUs that a stage may have, by what stands in its way."""

    free: list[Gpu] = field(default_factory=list)
    leased: list[tuple[Gpu, str]] = field(default_factory=list)
    """Each with its holder, who may run anything there."""
    occupied: list[Gpu] = field(default_factory=list)
    """Not leased, yet in use."""


@contextmanager
def leased_gpus(
    count: int,
    *,
    locks_dir: Path | None,
    holder: str,
    visible: str | None,
    say: Callable[[str], None],
) -> Iterator[tuple[Gpu, ...]]:
    """`count` empty GPUs that no other stage gets meanwhile; waits for those that other stages hold.

    locks_dir: where the leases are. None where a batch system leases, and `visible` has what it gave.
    holder: who leases, e.g. "train r1-llm-only", for other people's messages.
    visible: the caller's CUDA_VISIBLE_DEVICES; the GPUs come in its order. None: all of them.
    say: gets one line that names who is waited for, and another one when that changes.

    Raises UserError where waiting for other stages would not help: there are too few GPUs, or foreign processes
    hold them. KeyboardInterrupt or the end of the process end the wait: call this before taking over SIGINT or SIGTERM.
    What was leased is free again even after SIGKILL, and no child keeps it, since the locks are closed when a program
    starts.
    """
    if count == 0:
        yield ()
        return
    if locks_dir is not None:
        locks_dir.mkdir(parents=True, exist_ok=True)
    said = ""
    occupied_since: dict[str, float] = {}
    with ExitStack() as leases:

        def attempt() -> Survey:
            if locks_dir is None:
                return _survey(leasable(read_gpus(), visible=visible, count=count, holder=holder), None)
            # All or nothing, one stage at a time: two that want two GPUs never hold one each.
            with (locks_dir / "leasing").open("a") as leasing:
                fcntl.flock(leasing, fcntl.LOCK_EX)
                gpus = leasable(read_gpus(), visible=visible, count=count, holder=holder)
                survey = _survey(gpus, locks_dir)
                if len(survey.free) >= count:
                    for gpu in survey.free[:count]:
                        lock = leases.enter_context(_locked(gpu, locks_dir))
                        lock.truncate(0)
                        lock.write(f"{holder} (pid {os.getpid()}, since {datetime.now().astimezone():%Y-%m-%d %H:%M})")
                        lock.flush()
                return survey

        while len((survey := attempt()).free) < count:
            now = time.monotonic()
            occupied_since = {gpu.uuid: occupied_since.get(gpu.uuid, now) for gpu in survey.occupied}
            num_settling = sum(now - since < SETTLE_S for since in occupied_since.values())
            if len(survey.free) + len(survey.leased) + num_settling < count:
                raise UserError(_foreign_processes(survey, count=count, holder=holder))
            holders = ", ".join(f"GPU {gpu.index} is leased to {other}" for gpu, other in survey.leased)
            waiting = f"waiting for {counted(count, 'GPU')}, {len(survey.free)} free: {holders}"
            if survey.leased and waiting != said:
                say(waiting)
                said = waiting
            time.sleep(POLL_S)
        yield tuple(survey.free[:count])


def leasable(gpus: Sequence[Gpu], *, visible: str | None, count: int, holder: str) -> list[Gpu]:
    """The GPUs that may be leased, whether or not they are free now, in the order of `visible`.

    Raises UserError where they are fewer than `count`, or `visible` names what is not there.
    """
    wants = f"{holder} wants {counted(count, 'GPU')}"
    if not gpus:
        raise UserError(
            f"{wants}, and this machine has none that NVIDIA's driver shows. "
            f"See what it says to: nvidia-smi; stages run without a GPU on a profile whose device.kind is cpu"
        )
    seen = list(gpus) if visible is None else _visible(gpus, visible)
    usable = [gpu for gpu in seen if not gpu.obstacle]
    if len(usable) >= count:
        return usable
    obstacles = [
        f"  {gpu}: {gpu.obstacle or f'not in CUDA_VISIBLE_DEVICES={visible}'}\n"
        for gpu in gpus
        if gpu.obstacle or gpu not in seen
    ]
    usable_text = f", of which {len(gpus) - len(obstacles)} can be used" if obstacles else ""
    raise UserError(
        f"{wants}; this machine has {counted(len(gpus), 'GPU')}{usable_text}.\n{''.join(obstacles)}"
        "Set a profile that wants fewer in params.yaml"
        + (", or change CUDA_VISIBLE_DEVICES." if len(seen) < len(gpus) else ".")
    )


def _survey(gpus: Sequence[Gpu], locks_dir: Path | None) -> Survey:
    """To be called by the one process that may lease now."""
    survey = Survey()
    for gpu in gpus:
        if locks_dir is not None:
            try:
                _locked(gpu, locks_dir).close()
            except BlockingIOError:
                survey.leased.append((gpu, (locks_dir / gpu.uuid).read_text()))
                continue
        (survey.free if gpu.is_empty else survey.occupied).append(gpu)
    return survey


def _locked(gpu: Gpu, locks_dir: Path) -> TextIO:
    """The GPU's lock file, locked as long as it is open. Raises BlockingIOError where someone else holds it."""
    lock = (locks_dir / gpu.uuid).open("a")  # not "w": the holder's name stays until there is another
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise
    return lock


def _visible(gpus: Sequence[Gpu], visible: str) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES names: indices or beginnings of UUIDs; an empty entry or -1 ends the list."""
    entries = takewhile(lambda entry: entry not in ("", "-1"), (entry.strip() for entry in visible.split(",")))
    return [_named(gpus, entry) for entry in dict.fromkeys(entries)]


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu:
    if entry.startswith("MIG-"):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES names {entry}, a part of a GPU, and a stage leases whole ones. "
            f"Name those by index or UUID; they are listed by: nvidia-smi -L"
        )
    named = [
        gpu for gpu in gpus if entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
    ]
    if len(named) != 1:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES names {entry!r}, which is {counted(len(named), 'GPU') if named else 'no GPU'} here; "
            f"expected indices or UUIDs of: {', '.join(f'{gpu} {gpu.uuid}' for gpu in gpus)}"
        )
    return named[0]


def _foreign_processes(survey: Survey, *, count: int, holder: str) -> str:
    tally = f"{len(survey.free)} free, {len(survey.leased)} leased to other stages, {len(survey.occupied)} in use"
    lines = [f"{holder} wants {counted(count, 'GPU')}; {tally} by processes that hold no lease:"]
    for gpu in survey.occupied:
        used = "" if gpu.used_bytes is None else f": {_bytes(gpu.used_bytes)} of {_bytes(gpu.total_bytes)} in use"
        lines.append(f"  {gpu}{used}")
        processes = {**gpu.graphics, **gpu.compute}
        lines += [f"    pid {pid}, {_command_and_user(pid)}: {_bytes(used)}" for pid, used in processes.items()]
        if not processes:
            lines.append("    no process to be seen: it may run in another container")
    return "\n".join([*lines, "End these processes, or choose other GPUs with CUDA_VISIBLE_DEVICES."])


def _command_and_user(pid: int) -> str:
    """As far as the system says: a process may just have ended, or run in another container."""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline()) or process.name()
        return f"{textwrap.shorten(command, width=80, placeholder=' ...')} of {process.username()}"
    except psutil.Error:
        return "command unknown"


def _bytes(num_bytes: int | None) -> str:
    return "memory unknown" if num_bytes is None else bytes_text(num_bytes)
