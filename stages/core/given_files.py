"""Files of a folder that somebody else may have filled: a base model, a dataset, a published model.

Only plain files of the folder are read. A link to elsewhere would copy a file of this machine into what a stage makes,
and a pipe or a device may never end.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from stages.core.errors import UserError, bytes_text

MAX_BYTES = 64 * 2**20
"""Limit of `read_plain`. The largest tokenizer.json of the families has 33 MB."""

_DVC_OBJECT = re.compile(r"/files/md5/[0-9a-f]{2}/[0-9a-f]{30}(\.dir)?$")


def given_files(folder: Path, *patterns: str, any_case: bool = False) -> list[Path]:
    """The files with matching names, in the order of the patterns and by name within each.

    any_case: whether capitals match too, as in datasets; a model's files have one name.
    Raises UserError if one of them may not be read (`require_own`).
    """
    files = [path for pattern in patterns for path in _matching(folder, pattern, any_case=any_case)]
    for path in files:
        require_own(path, folder)
    return files


def require_own(path: Path, folder: Path) -> None:
    """Raises UserError unless `path` is a plain file of the folder, with a name in UTF-8."""
    try:
        path.name.encode()
    except UnicodeEncodeError:
        raise UserError(f"the name of {path} is not UTF-8; rename the file") from None
    if not stays_inside(path, folder):
        raise UserError(f"{path} leads out of {folder} by a link, which is never followed; put the file itself there")
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path} is no plain file; remove or rename it")


def _matching(folder: Path, pattern: str, *, any_case: bool) -> list[Path]:
    """Matches by name. `glob` leaves out a broken link if the pattern is its whole name; here it is included."""
    if any_case:
        pattern = re.sub("[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", pattern)
    named = folder / pattern
    return sorted(folder.glob(pattern)) or ([named] if named.is_symlink() else [])


def stays_inside(path: Path, folder: Path) -> bool:
    """Whether a path, links followed, leads into the folder, or to where DVC and the hub's cache link from it.

    DVC links to the objects of a cache, .../files/md5/ab/...; the hub's REPOSITORY/snapshots/COMMIT links to
    REPOSITORY/blobs.
    """
    real, real_folder = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    repository = next((above.parent for above in real_folder.parents if above.name == "snapshots"), real_folder)
    inside = real.is_relative_to(real_folder) or real.is_relative_to(repository / "blobs")
    return inside or _DVC_OBJECT.search(str(real)) is not None


def read_plain(path: Path) -> bytes:
    """The content of a plain file. Raises UserError for anything else, and for one of more than MAX_BYTES; OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is no plain file; remove it")
    if status.st_size > MAX_BYTES:
        raise UserError(f"{path} has {bytes_text(status.st_size)}, more than {bytes_text(MAX_BYTES)}")
    return path.read_bytes()
