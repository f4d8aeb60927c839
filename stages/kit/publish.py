"""Outputs that are complete or absent."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


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
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)


def publish_text(text: str, path: Path) -> None:
    """Write a file whole, in place of what was there.

    Never into the old file: that may be a hard link to DVC's cache.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
