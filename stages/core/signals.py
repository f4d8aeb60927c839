"""Ending a run early: the signals that request it, the time limits, and children that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SIGUSR1 is the signal that Slurm commonly sends before a job's time is up (sbatch --signal)."""

SAME_REQUEST_S = 2.0
"""Signals within this time are one request to end: a closed terminal, a killed dvc or Slurm send several, and a stage
that is saving its work must not be interrupted by the second."""

GRACE_S = 120
"""Time from the request to end until a stage is killed: enough to save a checkpoint."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within the block, the signals that ask to end go to `handler`."""
    before = {number: signal.signal(number, handler) for number in handled_signals()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def interrupt(*_: object) -> None:
    """For `handling`: raises KeyboardInterrupt, once, as a second one would break off the cleaning up."""
    for each in handled_signals():
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def handled_signals() -> tuple[signal.Signals, ...]:
    """ENDING, without SIGHUP if the caller, nohup, has this process ignore it."""
    hung_up_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in ENDING if number != signal.SIGHUP or not hung_up_ignored)


def end_with_parent() -> Callable[[], None] | None:
    """A function for `Popen(preexec_fn=...)`: the child gets SIGTERM when the caller is killed, SIGKILL included.

    SIGTERM, so that a stage can save its work. None outside Linux, which alone has prctl(2)'s PR_SET_PDEATHSIG.
    """
    # preexec_fn runs between fork and exec: prctl is found before that.
    return partial(end_with_own_parent, os.getpid()) if _prctl() else None


def end_with_own_parent(parent: int | None = None) -> None:
    """Have this process get SIGTERM when its parent ends. Does nothing outside Linux.

    parent: the parent's process id as it was seen earlier; if that has ended already, this process ends now.
    """
    prctl = _prctl()
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


@cache
def _prctl() -> Callable[[int, int], int] | None:
    return ctypes.CDLL(None).prctl if sys.platform == "linux" else None
