"""The engine without containers: a stage is a fresh process on the host."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

from stages.core.environment import stage_environment
from stages.core.errors import OUT_OF_MEMORY
from stages.core.parent_death import end_with_parent
from stages.core.signals import SAME_REQUEST_S, handled_signals
from stages.kit.launcher.machine import this_machine
from stages.kit.launcher.oom_kills import OF_THE_MACHINE, oom_kills
from stages.kit.launcher.stage_run import Ended, StageRun


class Receiver(Protocol):
    """Who gets a signal: a child process, or a container."""

    def send_signal(self, number: int, /) -> None: ...


class ForwardedSignals:
    """What was asked of the launcher while a stage ran, and who is told."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._receiver: Receiver | None = None
        self._early: list[int] = []
        self._last = -SAME_REQUEST_S

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - self._last < SAME_REQUEST_S:
            return
        self._last = time.monotonic()
        self.received.append(number)
        if self._receiver is None:
            self._early.append(number)
        else:
            self._receiver.send_signal(number)

    def forward_to(self, receiver: Receiver) -> None:
        """What arrived before is kept for it."""
        self._receiver = receiver
        for number in self._early:
            receiver.send_signal(number)

    def code_of_stage(self, code: int) -> int:
        """The stage's exit code, but never one that would have it started anew after somebody asked it to end."""
        return 128 + self.received[-1] if self.received and code == OUT_OF_MEMORY else code


class ProcessEngine:
    """Runs a stage with the launcher's own interpreter; can take away neither the network nor the disk."""

    name = "process"
    image = None
    sealed = False

    def run(self, stage_run: StageRun) -> Ended:
        """Run the stage to its end.

        The signals that ask to end go on to the stage, which decides how to end; whatever it started and left
        behind is killed. One that the kernel killed for want of memory ran out of memory.
        """
        environment = stage_environment(
            stage_run.stage, stage_run.caller, network=stage_run.network, terminal=stage_run.terminal
        )
        if stage_run.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(stage_run.gpus)
        if stage_run.triton_dir is not None:
            environment["TRITON_CACHE_DIR"] = str(stage_run.triton_dir)
        machine = this_machine(environment)
        killed_before = oom_kills(OF_THE_MACHINE)
        with forwarded_signals() as signals:
            code = run_stage(stage_run.command, stage_run.workspace_dir, environment, signals)
        if code == 128 + signal.SIGKILL and oom_kills(OF_THE_MACHINE) > killed_before:
            code = OUT_OF_MEMORY
        return Ended(code=signals.code_of_stage(code), machine=machine)


def run_stage(
    command: Sequence[str], working_dir: Path, environment: Mapping[str, str], signals: ForwardedSignals
) -> int:
    """Run a stage with this interpreter, kill what it leaves behind, return its exit code: 128 + n after signal n.

    command: its name, and what it is called with.
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
    signals.forward_to(child)
    code = child.wait()
    # PermissionError: what macOS says of a group of which only zombies are left.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


@contextmanager
def forwarded_signals() -> Iterator[ForwardedSignals]:
    """Take the signals that ask to end, for who runs the stage."""
    signals = ForwardedSignals()
    before = {number: signal.signal(number, signals.on_signal) for number in handled_signals()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
