"""Nobody is left running when whoever started them is killed without warning.

SIGKILL cannot be forwarded, but Linux can be asked to signal a process when its parent ends (prctl(2),
PR_SET_PDEATHSIG). Other systems have nothing like it: there an orphan stays possible.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import cache, partial

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> Callable[[], None] | None:
    """A function for `Popen(preexec_fn=...)`: the child gets SIGTERM when the caller dies.

    SIGTERM, not SIGKILL: a stage may save its work on it. None where the system has no such signal.
    """
    # It runs between fork and exec: prctl is found before that.
    return partial(end_with_own_parent, os.getpid()) if _prctl() else None


def end_with_own_parent(parent: int | None = None, number: signal.Signals = signal.SIGTERM) -> None:
    """The same for this process and whoever started it. Does nothing where unsupported.

    parent: its process id, where somebody saw it earlier: if it died before it could be watched, this process ends.
    number: the signal that this process gets.
    """
    prctl = _prctl()
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, number)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), number)


@cache
def _prctl() -> Callable[[int, int], int] | None:
    return ctypes.CDLL(None).prctl if sys.platform == "linux" else None
