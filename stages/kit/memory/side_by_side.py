"""Independent calls at once, each in a copy of this process: threads would take turns at Python's lock."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch

Result = TypeVar("Result")


def side_by_side(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """What the calls return, in their order. Results are pickled; what else a call changes stays in its copy.

    What a copy cannot do is done here, and what fails there fails here: torch refuses a backward pass in the copy of a
    process that has made one, and everything on a GPU in that of one that has used it.
    """
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) == 1 or len(calls) == 1:
        return [call() for call in calls]
    copies = [_begin(call) for call in calls]
    try:
        return [_result(receiver, call) for (_, receiver), call in zip(copies, calls, strict=True)]
    finally:
        for process, receiver in copies:
            receiver.close()
            process.kill()
            process.join()


def _begin(call: Callable[[], Result]) -> tuple[BaseProcess, Connection]:
    fork = multiprocessing.get_context("fork")  # so that nothing is imported again, and no call pickled
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_answer, args=(call, sender), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of threads that a copy does not have
        process.start()
    sender.close()
    return process, receiver


def _answer(call: Callable[[], Result], sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever began it ends it
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    try:
        sender.send(call())
    except Exception:  # noqa: BLE001  the caller finds out by calling itself
        sender.close()


def _result(receiver: Connection, call: Callable[[], Result]) -> Result:
    try:
        result: Result = receiver.recv()
    except EOFError:
        return call()
    return result
