"""Files of a folder that a person names and somebody else may have filled: a base model, a data set.

Only plain files that lie in the folder are read: a link to elsewhere would copy a file of the machine into what a stage
makes, and a pipe would keep the stage waiting for ever.
"""

from __future__ import annotations

import configparser
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from stages.core.errors import UserError

CACHE_VARIABLE = "BAKEOFF_DVC_CACHE"
"""The environment variable with DVC's cache in a container, which does not see DVC's configuration."""

_HUB_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")


def given_files(folder: Path, *patterns: str) -> list[Path]:
    """The files whose names match, in the order of the patterns and by name within each.

    Raises UserError if one of them may not be read (`require_own`).
    """
    found = [path for pattern in patterns for path in _matching(folder, pattern)]
    for path in found:
        require_own(path, folder)
    return found


def require_own(path: Path, folder: Path) -> None:
    """Raises UserError unless `path` is a plain file in the folder, with a name in UTF-8."""
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
    """Matches by name. `glob` leaves out a broken link if the pattern is its whole name; here it is included."""
    named = folder / pattern
    return sorted(folder.glob(pattern)) or ([named] if named.is_symlink() else [])


def stays_inside(path: Path, folder: Path, *, workspace_dir: Path = Path()) -> bool:
    """Whether a path, links followed, leads into the folder, into the blobs of the folder's own repository in the hub's
    cache (REPOSITORY/snapshots/COMMIT links to REPOSITORY/blobs), or into the workspace's own DVC cache."""
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


def cache_dir(workspace_dir: Path) -> Path:
    """The folder of DVC's objects: `cache.dir` of the workspace's own configuration, or .dvc/cache.

    DVC reads a person's and a machine's configuration too (`--global`, `--system`); a stage sees neither.
    """
    found = workspace_dir / ".dvc/cache"
    for name in ("config", "config.local"):
        config = configparser.ConfigParser(interpolation=None, strict=False)
        with suppress(configparser.Error, OSError, UnicodeDecodeError):
            config.read(workspace_dir / ".dvc" / name, encoding="utf-8")
        if where := config.get("cache", "dir", fallback="").strip("\"'"):
            found = workspace_dir / ".dvc" / where
    return found / "files/md5"
