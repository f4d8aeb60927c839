"""Errors that a user can fix, their words, and the logging of a stage."""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import click

MAX_SHOWN = 50
"""Problems that a message lists before it only counts the rest."""
OUT_OF_MEMORY = 79
"""The exit code of a stage that ran out of memory. sysexits.h ends at 78, an engine's own codes begin at 125."""

FOREIGN = "the workspace, or a part of it, is read-only or another account's: work in a clone of your own"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


class UserError(click.ClickException):
    """A user's fault: click prints the message and exits with 1, without a traceback.

    The message says what was found, what was expected, and the command that fixes it.
    """


class OutOfMemory(UserError):
    """Ends the stage; the launcher restarts it with settings that need less memory."""

    exit_code = OUT_OF_MEMORY


def pluralize(count: int, what: str) -> str:
    """`1 image`, `2 images`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def bytes_text(num_bytes: float) -> str:
    """Binary units, three digits: 1.50 GiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log(max(num_bytes, 1), 1024)), len(units) - 1)
    amount = num_bytes / 1024**power
    digits = 0 if power == 0 or amount >= 100 else 1 if amount >= 10 else 2
    return f"{amount:.{digits}f} {units[power]}"


def listed(lines: Sequence[str], most: int = MAX_SHOWN) -> str:
    """The first `most` problems, one a line, and the number of the others."""
    shown = [f"  {line}" for line in lines[:most]]
    if len(lines) > most:
        shown.append(f"  and {len(lines) - most:,} more")
    return "\n".join(shown)


def join_truncated(names: Sequence[str], most: int = 5) -> str:
    """`a, b and 7 more`: the first `most` names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """For `sys.excepthook`: a message instead of a traceback on a full disk, a workspace that may not be written and
    Ctrl-C.

    A hook, not a handler around each write: any write may fail, inside libraries too, and Ctrl-C may interrupt imports.
    """
    reason = str(error).strip().partition("\n")[0]
    if isinstance(error, shutil.Error):  # its text lists all files that were to be copied
        reason = "a copy"
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    elif is_disk_full(error):
        full = "the disk is full, or a limit on file sizes is reached"
        print(f"Error: {full}: {reason}; make room, and type the same command again", file=sys.stderr)
    elif is_foreign(error):
        print(f"Error: {reason}; {FOREIGN}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or one that caused it, means that a disk or a quota is full.

    safetensors and Arrow raise errors of their own, without an errno: their messages contain the system's.
    """
    chain: BaseException | None = error
    while chain is not None:
        if getattr(chain, "errno", None) in _FULL or any(os.strerror(code) in str(chain) for code in _FULL):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def is_foreign(error: BaseException) -> bool:
    """Whether the system refuses a file, on a disk or in a repository that may not be written, or libgit2 that."""
    if isinstance(error, OSError) and error.errno in _REFUSED:
        read_only = error.errno == errno.EROFS or not os.access(".git", os.W_OK)
        return read_only and Path(".git").exists()  # containers have none
    return str(error).endswith("is not owned by current user")


def configure_logging(stage: str, *, facts: bool = True) -> None:
    """Log facts to stderr, one a line, and libraries' messages only from warnings up. For entry points.

    facts: False leaves only warnings, for all but one process of a distributed run.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, force=True)
    logging.getLogger().handlers[0].setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    # Libraries warn of each other's deprecated names; nobody who runs a stage can fix that.
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("stages").setLevel(logging.INFO if facts else logging.WARNING)
    logging.getLogger("stages").info("%s", stage)
