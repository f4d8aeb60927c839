"""Where DVC keeps the objects of a workspace."""

from __future__ import annotations

import configparser
from contextlib import suppress
from pathlib import Path


def cache_dir(workspace_dir: Path) -> Path:
    """Where DVC keeps objects: `cache.dir`, as the workspace's own configuration has it, or .dvc/cache.

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
