"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def atomic_folder(folder: Path, *, keep: bool = True) -> Iterator[Path]:
    """A folder to write into, which gets its name only when the block ends without an error.

    Replaces an older `folder` as a whole; after an error that is left as it was. keep: False discards what is written,
    for all but one process of a distributed run.
    """
    if not keep:
        with TemporaryDirectory() as scratch:
            yield Path(scratch)
        return
    remove_unfinished(folder)
    aside = _aside(folder)
    aside.mkdir(parents=True)
    try:
        yield aside
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _apply_umask(aside)
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left of `atomic_folder`."""
    shutil.rmtree(_aside(folder), ignore_errors=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _apply_umask(folder: Path) -> None:
    """Give a new folder's files the mode that the umask says; safetensors makes its own readable by the owner alone.

    A file with a second hard link lies in a cache too, and is left as it is.
    """
    mode = folder.stat().st_mode & 0o666  # of a folder that mkdir has just made: what the umask leaves
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1:
            path.chmod(mode)


def atomic_write(text: str, path: Path) -> None:
    """Write a file whole, in place of an older one; never into that: it may be a hard link to DVC's cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
