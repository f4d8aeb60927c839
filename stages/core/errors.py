"""The one exception family for what a user can fix."""

from __future__ import annotations

import errno
import math
import os
import sys
import unicodedata
from collections.abc import Sequence
from types import TracebackType

import click

MAX_SHOWN = 50
"""Problems that a message lists before it only counts the rest."""
OUT_OF_MEMORY = 79
"""The exit code of a stage that ran out of memory. sysexits.h ends at 78, an engine's own codes begin at 125."""

_UNPRINTABLE = ("Cc", "Cf", "Cs")
"""Control codes, format codes and halves of surrogate pairs (Unicode's general categories)."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class UserError(click.ClickException):
    """A user's fault: click prints the message and exits with 1, without a traceback.

    The message says what was found, what was expected, and the command that fixes it. What it quotes of files and of
    their names may hold anything, and is made printable.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class OutOfMemory(UserError):
    """The stage ends, and the launcher starts it anew with settings that take less."""

    exit_code = OUT_OF_MEMORY


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: codes that move the cursor, turn the direction of writing or are no
    character at all appear as Python writes them. Lines stay lines.
    """
    return "".join(
        repr(char)[1:-1] if unicodedata.category(char) in _UNPRINTABLE and char not in "\n\u200c\u200d" else char
        for char in text
    )


def counted(count: int, what: str) -> str:
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
    """Problems, one a line; after `most` of them, how many more there are."""
    shown = [f"  {line}" for line in lines[:most]]
    if len(lines) > most:
        shown.append(f"  and {len(lines) - most:,} more")
    return "\n".join(shown)


def some(names: Sequence[str], most: int = 5) -> str:
    """`a, b and 7 more`: the first `most` of them, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def end_plainly() -> None:
    """From now on this process ends with a message instead of a traceback on a full disk, and on Ctrl-C.

    A hook, not a handler around each write: any may fail so, those of libraries too. Ctrl-C may come during imports.
    """
    sys.excepthook = _last_words


def _last_words(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    elif means_full_disk(error):
        reason = str(error).strip().partition("\n")[0]
        print(f"Error: the disk is full: {reason}; make room, and type the same command again", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


def means_full_disk(error: BaseException) -> bool:
    """Whether an error, or one that it came of, says that a disk or a quota is used up.

    safetensors and Arrow say it in words only.
    """
    chain: BaseException | None = error
    while chain is not None:
        if getattr(chain, "errno", None) in _FULL or any(os.strerror(code) in str(chain) for code in _FULL):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
