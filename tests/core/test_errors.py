"""Errors that are no fault of the program's, and signals that ask a process to end."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pygit2 import GitError
from safetensors import SafetensorError

from stages.core.errors import excepthook
from stages.core.signals import handling, interrupt
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
        OSError(errno.EFBIG, "File too large"),
    ],
)
def test_a_full_disk_is_one_line_whichever_library_writes(error: Exception, capsys) -> None:
    excepthook(type(error), error, None)
    assert capsys.readouterr().err.startswith("Error: the disk is full, or a limit on file sizes is reached: ")


def test_a_full_disk_is_one_line_however_many_files_were_to_be_copied(capsys) -> None:
    error = shutil.Error(
        [(f"from/{number}", f"to/{number}", f"[Errno 28] {WORDS}: 'to/{number}'") for number in range(9)]
    )
    excepthook(type(error), error, None)
    full = "Error: the disk is full, or a limit on file sizes is reached"
    assert capsys.readouterr().err == f"{full}: a copy; make room, and type the same command again\n"


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied", ".bakeoff/run.lock"),
        GitError("/a clone/.git/: repository path '/a clone' is not owned by current user"),
    ],
)
def test_a_workspace_that_may_not_be_written_is_one_line(
    error: Exception, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".git").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (".git", os.W_OK))
    read_only = OSError(errno.EROFS, "Read-only file system", "data/runs")  # the disk of a folder, wherever .git is
    for each in (error, read_only):
        excepthook(type(each), each, None)
        fix = "the workspace, or a part of it, is read-only or another account's: work in a clone of your own"
        assert capsys.readouterr().err == f"Error: {each}; {fix}\n"


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "no", "data/x"), ValueError("full of disks")])
def test_other_errors_keep_their_traceback(error: Exception, capsys) -> None:
    """Also that of a stage which writes what its container forbids."""
    excepthook(type(error), error, None)
    assert capsys.readouterr().err.startswith(f"{type(error).__name__}: ")


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


def test_a_second_signal_does_not_break_off_the_cleaning_up() -> None:
    cleaned = []
    with pytest.raises(KeyboardInterrupt), handling(interrupt):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGUSR1)
            cleaned.append(True)
    assert cleaned
