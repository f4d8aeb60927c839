"""Is DVC at work in a workspace? What a stage has just made would pass for damage until DVC has taken it down."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from stages.core.errors import UserError


def require_dvc_at_rest(workspace_dir: Path) -> None:
    """Raises UserError, which names the process, while DVC is at work; whatever a killed one left does not count."""
    if pid := next(_at_work(workspace_dir / ".dvc/tmp"), None):
        raise UserError(
            f"dvc is at work in {workspace_dir} (pid {pid}), and what it has not yet taken down would look damaged; "
            f"ask again when it has ended"
        )


def _at_work(tmp_dir: Path) -> Iterator[str]:
    """As DVC 3.67 finds others of its kind (dvc/lock.py, dvc/rwlock.py)."""
    if (lock_path := tmp_dir / "lock").is_file():  # locked, except while a stage runs
        with lock_path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield lock.read().strip() or "unknown"
    if (rwlock_path := tmp_dir / "rwlock").is_file():  # who uses which path, also then; JSON, and maybe half written
        yield from filter(_is_dvc, re.findall(r'"pid": (\d+)', rwlock_path.read_text(encoding="utf-8")))


def _is_dvc(pid: str) -> bool:
    """A killed one leaves its number, and in a new container another process soon has that."""
    try:
        return any("dvc" in argument for argument in psutil.Process(int(pid)).cmdline())
    except psutil.Error:
        return False
