"""Errors that are no fault of the program's."""

import errno
import logging
import os
import signal
import subprocess
import sys

import pyarrow as pa
import pytest
from safetensors import SafetensorError

from stages.core.errors import (
    UserError,
    configure_logging,
    install_excepthook,
    is_disk_full,
    join_truncated,
    listed,
    printable,
)
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
def test_a_full_disk_is_told_plainly_whoever_wrote(error: Exception, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.excepthook", None)
    install_excepthook()
    sys.excepthook(type(error), error, None)
    said = capsys.readouterr().err
    assert said.startswith("Error: the disk is full: ")
    assert said.endswith("; make room, and type the same command again\n")
    assert "Traceback" not in said


def test_ctrl_c_while_a_process_starts_ends_it_without_a_traceback() -> None:
    code = "import os, signal, time, stages; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr == "interrupted\n"


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), ValueError("full of disks")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert not is_disk_full(error)


ATTACK = "\x1b]0;owned\x07\x1b[2Ja\rb\u202e\udcff"


def test_what_a_message_quotes_cannot_command_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("prepare x")
    logging.getLogger("stages").warning("not read: %s", ATTACK)
    UserError(f"first\nsecond {ATTACK}").show()
    said = capfd.readouterr().err
    assert all(char.isprintable() for line in said.split("\n") for char in line)
    assert "first\nsecond \\x1b]0;owned" in said


def test_words_of_every_language_are_printable() -> None:
    for text in ("Tôi đọc sách .", "नमस्ते, क्‍ष", "┃ 12.52 of 21.84 GiB", "a\nb"):
        assert printable(text) == text


def test_of_many_names_the_first_are_listed_and_the_others_counted() -> None:
    assert (join_truncated(["a"], 2), join_truncated(["a", "b"], 2), join_truncated(["a", "b", "c"], 2)) == (
        "a",
        "a, b",
        "a, b and 1 more",
    )
    assert join_truncated(["x"] * 1_005).endswith("x, x and 1,000 more")
    assert listed(["a", "b", "c"], 2) == "  a\n  b\n  and 1 more"
