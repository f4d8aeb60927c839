"""Lines of the launcher, and the log of a stage: a copy of all that its launcher, process and container print."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import click

from stages.core.locks import try_lock
from stages.core.signals import ENDING

LOGS_DIR = Path(".bakeoff/logs")
LAST_WORDS_S = 2.0
"""Time to wait for the copy of what was printed last: a process that a stage has left behind may print more."""


def say(line: str) -> None:
    """Print a line of the launcher's own."""
    click.echo(f"launcher: {line}", err=True)


def log_path(stage: str, *, experiment: str = "") -> Path:
    """stage: its name in dvc.yaml. experiment: DVC's name of one; it has a folder of its own."""
    folder, name = (part.replace("/", "_") for part in (experiment, stage))
    return LOGS_DIR / folder / f"{name}.log"


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Within the block, what this process and its children print goes to this file, from its beginning, and is shown.

    They see a terminal if there is one. A process of its own copies: it ends with the last one that prints, not with
    this one, so that a stage whose launcher is killed can save its work and say so. Nothing is copied if another
    launcher writes the file, if the output goes there already, or if stdout and stderr go to two places.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():  # it could lead to a file of somebody else
        path.unlink()
    log = try_lock(path)
    if log is None or not _is_shown_whole(log):
        yield
        return
    log.truncate(0)
    source, sink = os.openpty() if os.isatty(2) else os.pipe()
    if os.isatty(2):
        tty.setraw(sink)  # line ends are changed by the terminal that shows them
        termios.tcsetwinsize(sink, termios.tcgetwinsize(2))
    copied, copies = os.pipe()
    if os.fork() == 0:
        try:
            os.close(sink)
            _copy(source, log.fileno())
        finally:
            os._exit(0)
    terminal = os.dup(2)
    for stream in (1, 2):
        os.dup2(sink, stream)
    for end in (source, sink, copies):
        os.close(end)
    log.close()
    if os.isatty(2):
        signal.signal(signal.SIGWINCH, lambda *_: _resize(terminal))
    try:
        yield
    finally:
        sys.stdout.flush()
        for stream in (1, 2):
            os.dup2(terminal, stream)
        select.select([copied], [], [], LAST_WORDS_S)


def _is_shown_whole(log: TextIO) -> bool:
    """Whether stdout and stderr go to one place, which is not this log."""
    try:
        shown, others = os.fstat(2), (os.fstat(1), os.fstat(log.fileno()))
    except OSError:  # closed
        return False
    return [os.path.samestat(shown, each) for each in others] == [True, False]


def _resize(terminal: int) -> None:
    with suppress(termios.error):  # it was closed
        termios.tcsetwinsize(2, termios.tcgetwinsize(terminal))


def _copy(source: int, log: int) -> None:
    """Until nobody can print any more."""
    os.setsid()  # signals of the terminal, and those that ask to end, are for the stage
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):  # of a terminal that nobody has open
        while data := os.read(source, 1 << 16):
            for place in (log, 2):
                with suppress(OSError):  # a full disk, a closed terminal
                    _write(place, data)


def _write(place: int, data: bytes) -> None:
    """All of it, though a terminal may take a part at a time."""
    while data:
        select.select([], [place], [])
        data = data[os.write(place, data) :]
