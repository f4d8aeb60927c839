"""The signals that ask a run to end, and how long that may take: the same for launcher, containers and stages."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SIGUSR1 is what Slurm is commonly told to send before a job's time is up (sbatch --signal)."""

SAME_REQUEST_S = 2.0
"""Signals within this time are one request to end: a closed terminal, a killed dvc or Slurm send several,
and a stage that is saving its work must not be interrupted by the second."""

GRACE_S = 120
"""What a stage has from being asked to end until it is killed: enough to save a checkpoint."""


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """The signals that ask to end go to `handler` meanwhile."""
    before = {number: signal.signal(number, handler) for number in handled_signals()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def handled_signals() -> tuple[signal.Signals, ...]:
    """All of ENDING, but not SIGHUP where the caller, nohup, has this process ignore it."""
    hung_up_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in ENDING if number != signal.SIGHUP or not hung_up_ignored)
