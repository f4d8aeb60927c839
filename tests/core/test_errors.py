"""Errors that are no fault of the program's, and signals that ask a process to end."""

import errno
import os
import signal
import subprocess
import sys

import pyarrow as pa
import pytest
from safetensors import SafetensorError

from stages.core.errors import excepthook, is_disk_full
from stages.core.signals import handling
from tests import ROOT

WORDS = os.strerror(errno.ENOSPC)


def caused_by(cause: Exception) -> Exception:
    error = RuntimeError("could not be saved")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, WORDS, "data/runs/r1/.trained.partial/x"),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        SafetensorError(f"Error while serializing: I/O error: {WORDS} (os error 28)"),
        pa.ArrowException(f"Error writing bytes to file. Detail: [errno 28] {WORDS}"),
        caused_by(OSError(errno.ENOSPC, WORDS)),
    ],
)
def test_a_full_disk_is_one_line_whichever_library_writes(error: Exception, capsys) -> None:
    excepthook(type(error), error, None)
    assert capsys.readouterr().err.startswith("Error: the disk is full: ")


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), ValueError("full of disks")])
def test_other_errors_are_no_full_disk(error: Exception) -> None:
    assert not is_disk_full(error)


def test_ctrl_c_while_a_process_starts_ends_it_without_a_traceback() -> None:
    code = "import os, signal, time, stages.core; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "interrupted\n")


def test_nohup_stays_in_force() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    received: list[int] = []
    try:
        with handling(lambda number, _frame: received.append(number)):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert received == []
