"""Code and folders of stages that other accounts may write to.

Whoever may write into the checkout, its .venv or its .bakeoff decides what runs there: Python imports from the first
two, and .bakeoff/triton holds compiled kernels. A checkpoint in .bakeoff holds no code (stages/kit/training/states.py),
but a changed one gives other weights. docker/run makes nothing that everybody may write to, whatever the umask.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path


def writable_by_everybody(paths: Iterable[Path]) -> list[Path]:
    """Those of the files and folders that exist and that any account of the machine may change or add files to."""
    return [path for path in paths if path.exists() and path.stat().st_mode & stat.S_IWOTH]
