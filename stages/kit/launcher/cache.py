"""DVC's cache beside the workspace: inputs of a stage that lie in both become one file.

DVC links what it adds to its cache (.dvc/config). What the cache had already stays a second copy in the workspace
(dvc_data 3.18, checkout.py, `_needs_relink`: with `copy` among the types any plain file will do): after a stage that
made the same bytes again, or of two recipes that came out alike.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from stages.core.dvc_cache import cache_dir

MIN_BYTES = 2**16
"""Smaller files stay as they are."""


def share_with_cache(workspace_dir: Path, paths: Iterable[str], *, aside: Path) -> int:
    """Replace files by hard links to DVC's objects that hold the same bytes; returns how many.

    paths: outputs that DVC has kept, or files in them, relative to the workspace. aside: a name for a link while it
    is made, on the same file system and outside of every output.
    Each file is compared byte by byte and replaced at once or not at all: what is damaged, here or in the cache, stays
    as it is. Where the file system knows no hard links, nothing happens.
    """
    objects, shared = cache_dir(workspace_dir), 0
    with suppress(OSError):
        lock = (workspace_dir / "dvc.lock").read_text(encoding="utf-8")
        for path in paths:
            for name, md5 in _recorded(lock, path, objects).items():
                file, cached = workspace_dir / path / name, objects / md5[:2] / md5[2:]
                if _lies_twice(file, cached):
                    aside.unlink(missing_ok=True)
                    os.link(cached, aside)
                    aside.replace(file)
                    shared += 1
    return shared


def _recorded(lock: str, path: str, objects: Path) -> dict[str, str]:
    """MD5 by name of the files at a path, as DVC has them; the name of a file itself is "". Empty where it has none.

    Read by a pattern: YAML takes a second for a whole dvc.lock, and whatever is read here is compared with the files.
    """
    found = re.findall(rf"- path: {re.escape(path)}\n +hash: md5\n +md5: ([0-9a-f]{{32}}(?:\.dir)?)\n", lock)
    if not found or not found[-1].endswith(".dir"):
        return {"": found[-1]} if found else {}
    with suppress(OSError, ValueError, TypeError, KeyError):
        listing = json.loads((objects / found[-1][:2] / found[-1][2:]).read_bytes())
        return {entry["relpath"]: entry["md5"] for entry in listing}
    return {}


def _lies_twice(file: Path, cached: Path) -> bool:
    try:
        here, there = file.lstat(), cached.lstat()
        return (
            stat.S_ISREG(here.st_mode)
            and stat.S_ISREG(there.st_mode)
            and here.st_nlink == 1
            and here.st_dev == there.st_dev
            and here.st_size == there.st_size >= MIN_BYTES
            and not there.st_mode & 0o222  # an object that DVC has finished
            and filecmp.cmp(file, cached, shallow=False)
        )
    except OSError:
        return False
