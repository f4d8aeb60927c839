"""Logging, configured once, by the entry point."""

from __future__ import annotations

import logging
import sys
import warnings

from stages.core.errors import printable


def configure_logging(stage: str, *, facts: bool = True) -> None:
    """Facts to stderr, one a line; libraries only when something is wrong.

    facts: False leaves only warnings, for all but one process of a distributed run.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, force=True)
    logging.getLogger().handlers[0].setFormatter(_Printable("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    # Libraries warn of each other's old names; nothing that whoever runs a stage could fix.
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("stages").setLevel(logging.INFO if facts else logging.WARNING)
    logging.getLogger("stages").info("%s", stage)


class _Printable(logging.Formatter):
    """Lines quote names and texts of files, which may hold anything."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
