"""File locks (flock): a process holds one until it closes the file or ends, however it ends."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from stages.core.errors import UserError

LOCK = "lock"
"""Name of the lock of a folder, which is in it."""

log = logging.getLogger(__name__)


def try_lock(path: Path) -> TextIO | None:
    """Open a file and take its lock; None if another process holds it. Raises OSError, also for a link: a stage in a
    container could make one that leads out of the container's view."""
    lock = _opened(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


@contextmanager
def hold(path: Path, refusal: str) -> Iterator[TextIO]:
    """Hold the lock of a file. Raises UserError with the refusal if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if (lock := try_lock(path)) is None:
        raise UserError(refusal)
    with lock:  # the file stays: were it removed, two processes could each lock one of its name
        yield lock


def lock_folder(folder: Path, *, shared: bool = False) -> TextIO:
    """The folder's lock, held; makes the folder, and waits for processes that hold it otherwise."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _opened(folder / LOCK)
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that works in %s, or saves its work there", folder)
            fcntl.flock(lock, kind)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), (folder / LOCK).stat()):
                return lock
        lock.close()  # the process that held it has removed the folder


def idle_folders(folders: Iterable[Path]) -> Iterator[Path]:
    """The folders that no process has locked; each is locked until the next one is taken."""
    for folder in folders:
        with suppress(OSError):
            if lock := try_lock(folder / LOCK):
                with lock:
                    yield folder


def _opened(path: Path) -> TextIO:
    # "a" does not empty it: what the holder wrote stays until there is another.
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "a")
