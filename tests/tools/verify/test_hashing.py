from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from rich.progress import Progress

from tools.verify import hashing
from tools.verify.hashing import FileDigests, hash_files


def test_each_file_has_its_digests_and_is_read_once(tmp_path: Path) -> None:
    one, link, empty = tmp_path / "one", tmp_path / "link", tmp_path / "thử"
    one.write_bytes(b"x" * 3_000_000)
    os.link(one, link)
    empty.touch()
    found, size_bytes = hash_files([one, link, empty, tmp_path / "absent", tmp_path])
    assert found[one] is found[link]
    assert found[one] == FileDigests(
        md5=hashlib.md5(one.read_bytes(), usedforsecurity=False).hexdigest(),
        sha256=hashlib.sha256(one.read_bytes()).hexdigest(),
    )
    assert found[empty].md5 == hashlib.md5(b"", usedforsecurity=False).hexdigest()
    assert found[tmp_path / "absent"] == FileDigests(error="No such file or directory")
    assert found[tmp_path] == FileDigests(error="Is a directory")
    assert size_bytes == 3_000_000 + tmp_path.stat().st_size
    assert hash_files([]) == ({}, 0)


def test_an_interrupt_does_not_wait_for_the_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "CHUNK_BYTES", 1)
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_bytes(b"x" * 10_000)
    read: list[float] = []
    main_thread = threading.get_ident()

    def interrupted(_bar: Progress, _task: int, count: float) -> None:
        read.append(count)
        if len(read) == 10:
            signal.pthread_kill(main_thread, signal.SIGINT)  # as Ctrl-C does
        time.sleep(0.001)

    monkeypatch.setattr(Progress, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hash_files(paths)
    assert sum(read) < 5_000
