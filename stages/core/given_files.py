"""Files of a folder that a person names and somebody else may have filled: a base model, a data set.

What is read of it lies in it. A link that leads elsewhere would put a file of the machine among what a stage makes, and
a pipe would keep the stage waiting for ever.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from stages.core.dvc_cache import cache_dir
from stages.core.errors import UserError

CACHE_VARIABLE = "BAKEOFF_DVC_CACHE"
"""The environment variable with the cache's folder in a container, which does not see DVC's configuration."""

_HUB_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")


def given_files(folder: Path, *patterns: str) -> list[Path]:
    """The files whose names match, in the order of the patterns and of names within each.

    Raises UserError where one of them may not be read, as `require_own` says.
    """
    found = [path for pattern in patterns for path in _matching(folder, pattern)]
    for path in found:
        require_own(path, folder)
    return found


def require_own(path: Path, folder: Path) -> None:
    """Raises UserError unless this is a plain file that lies in the folder, with a name that is text."""
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


def _matching(folder: Path, pattern: str) -> list[Path]:
    """In the order of names. `glob` leaves out a link that leads nowhere where the pattern is its whole name."""
    named = folder / pattern
    return sorted(folder.glob(pattern)) or ([named] if named.is_symlink() else [])


def stays_inside(path: Path, folder: Path, *, workspace_dir: Path = Path()) -> bool:
    """Whether a path, links followed, leads to something in the folder, or to where the hub's cache keeps the files of
    the folder's repository (REPOSITORY/snapshots/COMMIT links to REPOSITORY/blobs), or into the workspace's own DVC
    cache: anybody can call a folder files/md5.
    """
    try:
        real, real_folder = path.resolve(), folder.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return False
    blobs = [
        above.parent / "blobs"
        for above in real_folder.parents
        if above.name == "snapshots" and _HUB_REPOSITORY.fullmatch(above.parent.name)
    ]
    own_cache = Path(os.environ.get(CACHE_VARIABLE) or cache_dir(workspace_dir)).resolve()
    return any(real.is_relative_to(place) for place in (real_folder, own_cache, *blobs))
