"""The one exception family for what a user can mend."""

from __future__ import annotations

import click

OUT_OF_MEMORY = 79
"""The exit code of a stage that ran out of memory. sysexits.h ends at 78, an engine's own codes begin at 125."""


class UserError(click.ClickException):
    """A user's fault: click prints the message and exits with 1, without a traceback.

    The message says what was found, what was expected, and the command that mends it.
    """


class OutOfMemory(UserError):
    """The stage ends, and the launcher starts it anew with settings that take less."""

    exit_code = OUT_OF_MEMORY
