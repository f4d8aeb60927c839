from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tools.verify import hashing
from tools.verify.hashing import FileDigests, hash_files


def test_each_file_has_the_digests_that_were_asked_for_and_is_read_once(tmp_path: Path) -> None:
    one, link, empty = tmp_path / "one", tmp_path / "link", tmp_path / "thử"
    one.write_bytes(b"x" * 3_000_000)
    os.link(one, link)
    empty.touch()
    totals: list[int] = []
    read: list[int] = []
    found = hash_files(
        {one: {"md5"}, link: {"sha256"}, empty: {"md5"}, tmp_path / "absent": {"md5"}, tmp_path: {"md5"}},
        begin=totals.append,
        advance=read.append,
    )
    assert found[one] is found[link]
    assert found[one] == FileDigests(
        md5=hashlib.md5(one.read_bytes(), usedforsecurity=False).hexdigest(),
        sha256=hashlib.sha256(one.read_bytes()).hexdigest(),
        size_bytes=3_000_000,
    )
    assert found[empty].md5 == hashlib.md5(b"", usedforsecurity=False).hexdigest()
    assert found[tmp_path / "absent"] == FileDigests(error="No such file or directory")
    assert found[tmp_path] == FileDigests(error="Is a directory")
    assert sum(read) == 3_000_000
    assert totals == [3_000_000 + tmp_path.stat().st_size]


def test_nothing_to_hash_is_no_fault() -> None:
    assert hash_files({}, begin=lambda _: None, advance=lambda _: None) == {}


def test_an_interrupt_does_not_wait_for_the_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "CHUNK_BYTES", 1)
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_bytes(b"x" * 10_000)
    read: list[int] = []
    main_thread = threading.get_ident()

    def interrupted(count: int) -> None:
        read.append(count)
        if len(read) == 10:
            signal.pthread_kill(main_thread, signal.SIGINT)  # as Ctrl-C does
        time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        hash_files({path: {"md5"} for path in paths}, begin=lambda _: None, advance=interrupted)
    assert sum(read) < 5_000
