"""Errors that are no fault of the program's."""

import errno
import os
import sys

import pyarrow as pa
import pytest
from safetensors import SafetensorError

from stages.kit.errors import end_plainly_on_a_full_disk, means_full_disk

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
def test_a_full_disk_is_told_plainly_whoever_wrote(error: Exception, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.excepthook", None)
    end_plainly_on_a_full_disk()
    sys.excepthook(type(error), error, None)
    said = capsys.readouterr().err
    assert said.startswith("Error: the disk is full: ")
    assert said.endswith("; make room, and type the same command again\n")
    assert "Traceback" not in said


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), ValueError("full of disks")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert not means_full_disk(error)
