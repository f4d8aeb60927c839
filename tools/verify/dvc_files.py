"""Files that DVC writes: dvc.lock, the listings of folders in its cache, the entries of its run cache, its locks.

DVC believes a read-only file of its cache, and a file whose time and size it knows, without reading it. To find a
flipped bit, `make verify` reads them itself. The layouts are those of DVC 3: an object `files/md5/ab/cdef…` is named by
the MD5 of its content, one that ends in `.dir` lists a folder, and an entry `runs/ab/KEY/VALUE` of the run cache is
named by the SHA-256 of its content.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from voluptuous import Invalid

from stages.core.errors import UserError

OBJECT_NAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{30}(\.dir)?")


@dataclass(frozen=True, kw_only=True)
class LockedPath:
    """A file or folder as dvc.lock records it."""

    stage: str
    """The stage that writes it, or, for an input, reads it."""
    path: str
    """Relative to the workspace."""
    md5: str
    """As DVC writes it: a folder's is the MD5 of its listing, with `.dir` at the end."""

    @property
    def is_folder(self) -> bool:
        return self.md5.endswith(".dir")

    def matches(self, files: Mapping[str, str]) -> bool:
        """Whether these are the files that were recorded. files: MD5 by name; the name of a file itself is ""."""
        return self.md5 == (folder_listing(files)[0] if self.is_folder else files.get(""))


def read_lock(path: Path) -> dict[str, Any]:
    """dvc.lock's entry of each stage, in the shape that DVC requires; empty where the file is missing."""
    if not path.exists():
        return {}
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA

    try:
        stages: dict[str, Any] = COMPILED_LOCKFILE_SCHEMA(YAML(typ="safe").load(path))["stages"]
    except (OSError, YAMLError, ValueError, Invalid, KeyError) as error:
        # DVC 3.67 writes into the file itself, for a second where there are many stages.
        raise UserError(
            f"{path} is damaged, as DVC leaves it where it is killed while it writes: {error}\n"
            f"  fix it with: git checkout HEAD -- dvc.lock || rm dvc.lock  # dvc repro then takes from its run cache "
            f"what was made"
        ) from None
    return stages


def read_listing(path: Path) -> dict[str, str]:
    """MD5 by path of the files of a folder, from the object that lists them."""
    return {entry["relpath"]: entry["md5"] for entry in json.loads(path.read_bytes())}


def folder_listing(files: Mapping[str, str]) -> tuple[str, bytes]:
    """(digest, content) of the object that lists a folder, as DVC makes it. files: MD5 by path."""
    from dvc_data.hashfile.tree import Tree

    tree = Tree.from_list([{"relpath": name, "md5": md5} for name, md5 in files.items()], hash_name="md5")
    tree.digest()
    return tree.oid, tree.as_bytes()


def run_cache_problem(folder: Path) -> str | None:
    """The first problem of a folder of the run cache: DVC would restore other outputs from it, or fail."""
    from dvc.utils import dict_sha256

    entries = sorted(folder.iterdir())
    if not entries:  # dvc 3.67.1, StageCache._load; DVC makes the folder first, and then its entry
        return "is empty, where DVC was killed; it then ends with: join() argument must be str ... not 'NoneType'"
    for path in entries:
        try:
            entry = YAML(typ="safe").load(path)
            without_outs = {**entry, "outs": [out["path"] for out in entry["outs"]]}
            value, key = (dict_sha256(part, exclude=["size", "nfiles"]) for part in (entry, without_outs))
        except (OSError, YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            return f"{path.name} cannot be read: {error!r}"
        if (value, key) != (path.name, folder.name):
            return f"{path.name} does not match its name"
    return None


def require_dvc_idle(workspace_dir: Path) -> None:
    """Raises UserError while DVC runs here: a new result looks like damage until DVC has recorded it.

    Likewise where DVC was killed while it noted what it was using: it refuses to run from then on.
    """
    if pid := next(_running_dvc(workspace_dir / ".dvc/tmp"), None):
        raise UserError(
            f"dvc is running in {workspace_dir} (pid {pid}), and what it has not yet recorded would look damaged; "
            f"try again when it has ended"
        )
    rwlock_path = workspace_dir / ".dvc/tmp/rwlock"
    try:
        json.loads(rwlock_path.read_text(encoding="utf-8") if rwlock_path.exists() else "{}")
    except ValueError:  # dvc 3.67 writes into the file itself
        raise UserError(
            f"{rwlock_path} is damaged, as DVC leaves it where it is killed while it writes\n"
            f"  fix it with: rm .dvc/tmp/rwlock  # no DVC runs here"
        ) from None


def _running_dvc(tmp_dir: Path) -> Iterator[str]:
    """Process ids of DVC, found as DVC 3.67 finds them (dvc/lock.py, dvc/rwlock.py)."""
    if (lock_path := tmp_dir / "lock").is_file():  # locked, except while a stage runs
        with lock_path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield lock.read().strip() or "unknown"
    if (rwlock_path := tmp_dir / "rwlock").is_file():  # written while a stage runs; JSON that may be incomplete
        for pid in re.findall(r'"pid": (\d+)', rwlock_path.read_text(encoding="utf-8")):
            try:
                # A killed DVC leaves its number behind, which another process may have by now.
                if any("dvc" in argument for argument in psutil.Process(int(pid)).cmdline()):
                    yield pid
            except psutil.Error:
                continue
