"""The one exception family for what a user can mend."""

from __future__ import annotations

import click


class UserError(click.ClickException):
    """A user's fault: click prints the message and exits with 1, without a traceback.

    The message says what was found, what was expected, and the command that mends it.
    """
