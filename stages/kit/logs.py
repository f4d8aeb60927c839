"""Logging, configured once, by the entry point."""

from __future__ import annotations

import logging
import sys


def configure_logging(stage: str) -> None:
    """Facts to stderr, one a line; libraries only when something is wrong."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr, force=True
    )
    logging.getLogger("stages").setLevel(logging.INFO)
    logging.getLogger("stages").info("%s", stage)
