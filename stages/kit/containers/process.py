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
from typing import Protocol, TypeAlias

from stages.kit.containers.environment import stage_environment
from stages.kit.containers.parent_death import end_with_parent
from stages.kit.containers.stage_run import StageRun

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SAME_WISH_S = 2.0
"""Signals within this time are one wish to end: a closed terminal or a killed dvc sends several, by several ways, and
a stage that is saving its work must not be interrupted by the second."""


class Receiver(Protocol):
    """Who gets a signal: a child process, or a container."""

    def send_signal(self, number: int, /) -> None: ...


ForwardTo: TypeAlias = Callable[[Receiver], None]


class ProcessEngine:
    """Runs a stage with the launcher's own interpreter; can take away neither the network nor the disk."""

    sealed = False

    def run(self, stage_run: StageRun) -> int:
        """Run the stage to its end and return its exit code, 128 + n where signal n ended it.

        SIGINT, SIGTERM and SIGHUP go on to the stage, which decides how to end; whatever it started and left
        behind is killed.
        """
        environment = stage_environment(
            stage_run.stage, stage_run.caller, network=stage_run.network, terminal=stage_run.terminal
        )
        if stage_run.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(stage_run.gpus)
        with forwarded_signals() as forward_to:
            return run_stage(stage_run.stage, stage_run.args, stage_run.workspace_dir, environment, forward_to)


def run_stage(
    stage: str, args: Sequence[str], working_dir: Path, environment: Mapping[str, str], forward_to: ForwardTo
) -> int:
    """Run a stage with this interpreter, kill what it leaves behind, return its exit code: 128 + n after signal n."""
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
    forward_to(child)
    code = child.wait()
    # PermissionError: what macOS says of a group of which only zombies are left.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


@contextmanager
def forwarded_signals() -> Iterator[ForwardTo]:
    """Take the signals that would end the launcher; yields the function that names who gets them.

    What arrives before that is kept for it. SIGHUP stays ignored where the caller, nohup, ignores it.
    """
    receivers: list[Receiver] = []
    early: list[int] = []
    last = -SAME_WISH_S

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last < SAME_WISH_S:
            return
        last = time.monotonic()
        if receivers:
            receivers[0].send_signal(number)
        else:
            early.append(number)

    def forward_to(receiver: Receiver) -> None:
        receivers.append(receiver)
        for number in early:
            receiver.send_signal(number)

    taken = [number for number in FORWARDED if not _is_ignored_by_nohup(number)]
    before = {number: signal.signal(number, on_signal) for number in taken}
    try:
        yield forward_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_ignored_by_nohup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
