"""Digests of many files: side by side, and each file read once, however many names and digests it has."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stages.kit.launcher.machine import usable_cores

Algorithm = Literal["md5", "sha256"]

CHUNK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class FileDigests:
    """What a file holds; either digest may not have been asked for."""

    md5: str = ""
    sha256: str = ""
    size_bytes: int = 0
    error: str = ""
    """Why it could not be read; then it has no digests."""


def hash_files(
    wanted: Mapping[Path, Iterable[Algorithm]], *, begin: Callable[[int], None], advance: Callable[[int], None]
) -> dict[Path, FileDigests]:
    """The digests asked for of each file; links are followed.

    begin, advance: are told how many bytes there are, and that so many more were read.
    """
    found: dict[Path, FileDigests] = {}
    names: dict[tuple[int, int], list[Path]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for path in wanted:
        try:
            status = path.stat()
        except OSError as error:
            found[path] = FileDigests(error=_why(error))
        else:
            names.setdefault((status.st_dev, status.st_ino), []).append(path)
            sizes[status.st_dev, status.st_ino] = status.st_size
    begin(sum(sizes.values()))
    ended = threading.Event()

    def digests(paths: list[Path]) -> FileDigests:
        algorithms = {algorithm for path in paths for algorithm in wanted[path]}
        return _hash_file(paths[0], algorithms, advance=advance, ended=ended)

    # The large ones first: one of them alone, at the end, would have the others wait.
    groups = [names[inode] for inode in sorted(names, key=lambda inode: -sizes[inode])]
    with ThreadPoolExecutor(usable_cores()) as threads:
        try:
            for paths, one in zip(groups, threads.map(digests, groups), strict=True):
                found.update(dict.fromkeys(paths, one))
        finally:
            ended.set()  # after an interrupt the others stop in the middle of their files
    return found


def _hash_file(
    path: Path, algorithms: Iterable[Algorithm], *, advance: Callable[[int], None], ended: threading.Event
) -> FileDigests:
    # hashlib lets other threads run while it works on more than 2 KiB.
    hashers = {algorithm: hashlib.new(algorithm, usedforsecurity=False) for algorithm in algorithms}
    size_bytes, chunk = 0, memoryview(bytearray(CHUNK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while (count := file.readinto(chunk) or 0) and not ended.is_set():
                for hasher in hashers.values():
                    hasher.update(chunk[:count])
                size_bytes += count
                advance(count)
    except OSError as error:  # an unreadable sector, a folder without permission
        return FileDigests(error=_why(error))
    digests = {str(algorithm): hasher.hexdigest() for algorithm, hasher in hashers.items()}
    return FileDigests(size_bytes=size_bytes, **digests)


def _why(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
