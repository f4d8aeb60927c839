"""Outputs that are complete or absent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


@contextmanager
def published(folder: Path, *, keep: bool = True) -> Iterator[Path]:
    """A folder to write into, which takes its name only when the block ends without an error.

    What `folder` held before is replaced as a whole; after an error it is left as it was. keep: False throws away
    what is written, as for all but one process of a distributed run.
    """
    if not keep:
        with TemporaryDirectory() as scratch:
            yield Path(scratch)
        return
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _share(aside)
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)


def _share(folder: Path) -> None:
    """Let others read a new folder's files as the umask says; safetensors makes its own for the owner alone.

    A file with a second link lies in a cache too, which is not ours to change.
    """
    mode = folder.stat().st_mode & 0o666  # of a folder that mkdir has just made: what the umask leaves
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1:
            path.chmod(mode)


def publish_text(text: str, path: Path) -> None:
    """Write a file whole, in place of what was there.

    Never into the old file: that may be a hard link to DVC's cache.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def publish_json(record: Any, path: Path) -> None:
    """Write a dataclass as JSON, as documents.read_json reads it back."""
    publish_text(json.dumps(asdict(record), indent=2) + "\n", path)
