"""The one exception family for what a user can mend."""

from __future__ import annotations

from collections.abc import Sequence

import click

MAX_SHOWN = 50
"""Problems that a message lists before it only counts the rest."""
OUT_OF_MEMORY = 79
"""The exit code of a stage that ran out of memory. sysexits.h ends at 78, an engine's own codes begin at 125."""


class UserError(click.ClickException):
    """A user's fault: click prints the message and exits with 1, without a traceback.

    The message says what was found, what was expected, and the command that mends it.
    """


class OutOfMemory(UserError):
    """The stage ends, and the launcher starts it anew with settings that take less."""

    exit_code = OUT_OF_MEMORY


def counted(count: int, what: str) -> str:
    """`1 image`, `2 images`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def listed(lines: Sequence[str]) -> str:
    """Problems, one a line; after MAX_SHOWN of them, how many more there are."""
    shown = [f"  {line}" for line in lines[:MAX_SHOWN]]
    if len(lines) > MAX_SHOWN:
        shown.append(f"  and {len(lines) - MAX_SHOWN:,} more")
    return "\n".join(shown)
