"""Files that grow line by line, and may be cut off in the middle of one."""

from __future__ import annotations

import os
from pathlib import Path


def complete_lines(path: Path) -> list[str]:
    """The lines that were written to their end; none where there is no file."""
    if not path.is_file():
        return []
    return path.read_bytes().rpartition(b"\n")[0].decode("utf-8", errors="replace").splitlines()


def append_line(text: str, path: Path) -> None:
    """Add a line, in place of an unfinished last one, and see it onto the disk."""
    assert "\n" not in text, text
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(f"{text}\n".encode())
        file.flush()
        os.fsync(file.fileno())
