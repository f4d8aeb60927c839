"""Digests of many files, in parallel; a file with several names is read once."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from stages.core.threads import usable_cores

CHUNK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class FileDigests:
    md5: str = ""
    sha256: str = ""
    error: str = ""
    """Why the file could not be read; it then has no digests."""


def hash_files(paths: Iterable[Path]) -> tuple[dict[Path, FileDigests], int]:
    """(the digests of each file, bytes read), with a progress bar on a terminal. Links are followed."""
    digests: dict[Path, FileDigests] = {}
    inodes: dict[tuple[int, int, int], list[Path]] = {}
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            digests[path] = FileDigests(error=str(error.strerror))
        else:
            inodes.setdefault((status.st_size, status.st_dev, status.st_ino), []).append(path)
    total_bytes = sum(size for size, *_ in inodes)
    interrupted = threading.Event()
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
        ThreadPoolExecutor(usable_cores()) as threads,
    ):
        task = bar.add_task("reading", total=total_bytes)

        def hash_one(names: list[Path]) -> FileDigests:
            return _hash_file(names[0], lambda count: bar.advance(task, count), interrupted)

        # Large files first: started last, one of them would keep the other threads waiting.
        groups = [inodes[inode] for inode in sorted(inodes, reverse=True)]
        try:
            for names, found in zip(groups, threads.map(hash_one, groups), strict=True):
                digests.update(dict.fromkeys(names, found))
        finally:
            interrupted.set()  # the threads stop in the middle of their files
    return digests, total_bytes


def _hash_file(path: Path, advance: Callable[[int], None], interrupted: threading.Event) -> FileDigests:
    # hashlib lets other threads run while it works on more than 2 KiB.
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    chunk = memoryview(bytearray(CHUNK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while (count := file.readinto(chunk) or 0) and not interrupted.is_set():
                md5.update(chunk[:count])
                sha256.update(chunk[:count])
                advance(count)
    except OSError as error:  # an unreadable sector, a folder without permission
        return FileDigests(error=str(error.strerror))
    return FileDigests(md5=md5.hexdigest(), sha256=sha256.hexdigest())
