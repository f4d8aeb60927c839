"""The engine without containers: a stage is a fresh process on the host."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from stages.kit.containers.parent_death import end_with_parent
from stages.kit.containers.stage_run import StageRun

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProcessEngine:
    """Runs a stage with the launcher's own interpreter; can take away neither the network nor the disk."""

    def run(self, stage_run: StageRun) -> int:
        """Run the stage to its end and return its exit code, 128 + n where signal n ended it.

        SIGINT, SIGTERM and SIGHUP go on to the stage, which decides how to end; whatever it started and left
        behind is killed.
        """
        with forwarded_signals() as forward_to:
            # Of its own process group: a Ctrl-C then reaches it once, from here, and not a second time from
            # the terminal while it is already saving its work.
            child = subprocess.Popen(
                [sys.executable, "-m", f"stages.{stage_run.stage}", *stage_run.args],
                cwd=stage_run.workspace_dir,
                env=dict(stage_run.environment),
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
def forwarded_signals() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Take the signals that would end the launcher; yields the function that names who gets them.

    What arrives before that is kept for it. SIGHUP stays ignored where the caller, nohup, ignores it.
    """
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if children:
            children[0].send_signal(number)
        else:
            early.append(number)

    def forward_to(child: subprocess.Popen[bytes]) -> None:
        children.append(child)
        for number in early:
            child.send_signal(number)

    taken = [number for number in FORWARDED if not _is_ignored_by_nohup(number)]
    before = {number: signal.signal(number, on_signal) for number in taken}
    try:
        yield forward_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_ignored_by_nohup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
