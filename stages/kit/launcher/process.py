"""The engine without containers: a stage is a fresh process on the host."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from stages.core.environment import stage_environment
from stages.core.errors import OUT_OF_MEMORY
from stages.core.parent_death import end_with_parent
from stages.core.signals import SAME_REQUEST_S, handling
from stages.kit.launcher.machine import this_machine
from stages.kit.launcher.stage_run import Ended, StageRun

MACHINE_COUNTERS = (Path("/proc/vmstat"),)
"""Where the kernel counts the processes that it killed for want of memory; it reports them nowhere else."""

CONTAINER_COUNTERS = (
    Path("/sys/fs/cgroup/memory.events"),  # cgroup v2
    Path("/sys/fs/cgroup/memory/memory.oom_control"),  # v1
)
"""Likewise, for a container from inside."""


class ForwardedSignals:
    """Passes on the signals that ask to end; those that arrive before anybody can have them are kept."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._early: list[int] = []
        self._send: Callable[[int], object] = self._early.append
        self._last = -SAME_REQUEST_S

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - self._last >= SAME_REQUEST_S:
            self._last = time.monotonic()
            self.received.append(number)
            self._send(number)

    def forward_to(self, send: Callable[[int], object]) -> None:
        self._send = send
        for number in self._early:
            send(number)

    def code_of_stage(self, code: int) -> int:
        """The stage's exit code, but never one that would have it started anew after somebody asked it to end."""
        return 128 + self.received[-1] if self.received and code == OUT_OF_MEMORY else code


@contextmanager
def forwarded_signals() -> Iterator[ForwardedSignals]:
    """Handle the signals that ask to end while a stage runs."""
    signals = ForwardedSignals()
    with handling(signals.on_signal):
        yield signals


class ProcessEngine:
    """Runs a stage with the launcher's own interpreter; can take away neither the network nor the disk."""

    name = "process"
    image = None

    def run(self, stage_run: StageRun) -> Ended:
        """Run the stage to its end.

        The signals that ask to end go on to the stage, which decides how to end; whatever it started and left
        behind is killed. One that the kernel killed for want of memory ran out of memory.
        """
        environment = stage_environment(
            stage_run.stage, stage_run.caller, network=stage_run.network, terminal=stage_run.terminal
        )
        environment |= stage_run.variables
        if stage_run.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(stage_run.gpus)
        machine = this_machine(environment)
        killed_before = oom_kills(MACHINE_COUNTERS)
        with forwarded_signals() as signals:
            code = run_stage(stage_run.command, stage_run.workspace_dir, environment, signals)
        code = as_out_of_memory(code, killed_before)
        return Ended(code=signals.code_of_stage(code), machine=machine)


def run_stage(
    command: Sequence[str], working_dir: Path, environment: Mapping[str, str], signals: ForwardedSignals
) -> int:
    """Run a stage (its name and arguments) with this interpreter, and kill what it leaves behind.

    Returns its exit code: 128 + n after signal n.
    """
    stage, *args = command
    # Of its own process group: a Ctrl-C then reaches it once, from here, and not a second time from
    # the terminal while it is already saving its work.
    child = subprocess.Popen(
        [sys.executable, "-m", f"stages.{stage}", *args],
        cwd=working_dir,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=end_with_parent(),
    )
    signals.forward_to(child.send_signal)
    code = child.wait()
    # PermissionError: what macOS says of a group of which only zombies are left.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def as_out_of_memory(code: int, killed_before: int) -> int:
    """OUT_OF_MEMORY for a stage that was killed while the kernel killed something on this machine for want of memory.

    killed_before: the machine's count of that before the stage began.
    """
    killed = code == 128 + signal.SIGKILL and oom_kills(MACHINE_COUNTERS) > killed_before
    return OUT_OF_MEMORY if killed else code


def oom_kills(counters: Sequence[Path]) -> int:
    """How many processes the kernel has killed for want of memory so far, by the first of the files that exists.

    All of them have a line `oom_kill N`; 0 where none does, as on another system than Linux.
    """
    for path in counters:
        if path.exists():
            lines = (line.split() for line in path.read_text().splitlines())
            return next((int(count) for name, count in lines if name == "oom_kill"), 0)
    return 0
