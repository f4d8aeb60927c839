"""Digests of many files, in parallel; a file with several names is read once."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from stages.kit.launcher.machine import usable_cores

Algorithm = Literal["md5", "sha256"]

CHUNK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class FileDigests:
    md5: str = ""
    """Empty where it was not asked for; likewise `sha256`."""
    sha256: str = ""
    error: str = ""
    """Why the file could not be read; it then has no digests."""


def hash_files(wanted: Mapping[Path, Iterable[Algorithm]]) -> tuple[dict[Path, FileDigests], int]:
    """(the requested digests of each file, bytes read), with a progress bar on a terminal. Links are followed."""
    digests: dict[Path, FileDigests] = {}
    names: dict[tuple[int, int], list[Path]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for path in wanted:
        try:
            status = path.stat()
        except OSError as error:
            digests[path] = FileDigests(error=_reason(error))
        else:
            names.setdefault((status.st_dev, status.st_ino), []).append(path)
            sizes[status.st_dev, status.st_ino] = status.st_size
    interrupted = threading.Event()
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
        ThreadPoolExecutor(usable_cores()) as threads,
    ):
        task = bar.add_task("reading", total=sum(sizes.values()))

        def hash_one(paths: list[Path]) -> FileDigests:
            algorithms = {algorithm for path in paths for algorithm in wanted[path]}
            return _hash_file(paths[0], algorithms, lambda count: bar.advance(task, count), interrupted)

        # Large files first: started last, one of them would keep the other threads waiting.
        groups = [names[inode] for inode in sorted(names, key=lambda inode: -sizes[inode])]
        try:
            for paths, found in zip(groups, threads.map(hash_one, groups), strict=True):
                digests.update(dict.fromkeys(paths, found))
        finally:
            interrupted.set()  # the threads stop in the middle of their files
    return digests, sum(sizes.values())


def _hash_file(
    path: Path, algorithms: Iterable[Algorithm], advance: Callable[[int], None], interrupted: threading.Event
) -> FileDigests:
    # hashlib lets other threads run while it works on more than 2 KiB.
    hashers = {algorithm: hashlib.new(algorithm, usedforsecurity=False) for algorithm in algorithms}
    chunk = memoryview(bytearray(CHUNK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while (count := file.readinto(chunk) or 0) and not interrupted.is_set():
                for hasher in hashers.values():
                    hasher.update(chunk[:count])
                advance(count)
    except OSError as error:  # an unreadable sector, a folder without permission
        return FileDigests(error=_reason(error))
    return FileDigests(**{str(algorithm): hasher.hexdigest() for algorithm, hasher in hashers.items()})


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
