import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.core.given_files import given_files, read_plain


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one plain file, beside a secret."""
    (tmp_path / "given/data").mkdir(parents=True)
    (tmp_path / "given/plain.txt").write_text("x")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/secret.txt").write_text("secret")
    return tmp_path / "given"


def link(path: Path, target: str | Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def test_files_come_by_pattern_and_by_name(folder: Path) -> None:
    for name in ("b.json", "a.json", "c.bin"):
        (folder / name).touch()
    assert [path.name for path in given_files(folder, "*.txt", "*.json")] == ["plain.txt", "a.json", "b.json"]
    link(folder / "again.txt", "plain.txt")
    link(folder.with_name("elsewhere"), folder)
    assert [path.name for path in given_files(folder.with_name("elsewhere"), "*.txt")] == ["again.txt", "plain.txt"]


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (lambda folder: link(folder / "vocab.txt", "/etc/passwd"), "vocab.txt leads out of"),
        (lambda folder: link(folder / "vocab.txt", "../secret.txt"), "vocab.txt leads out of"),
        (lambda folder: link(folder / "vocab.txt", "vocab.txt"), "vocab.txt cannot be read"),
        (lambda folder: link(folder / "vocab.txt", "nowhere"), "vocab.txt cannot be read"),
        (lambda folder: os.mkfifo(folder / "vocab.txt"), "vocab.txt is no plain file"),
        (lambda folder: (folder / "vocab.txt").mkdir(), "vocab.txt is no plain file"),
        (lambda folder: (folder / os.fsdecode(b"\xff.txt")).touch(), "is not UTF-8"),
    ],
)
def test_what_is_no_file_of_the_folder_is_refused(folder: Path, put: Callable[[Path], None], said: str) -> None:
    put(folder)
    with pytest.raises(UserError, match=said):
        given_files(folder, "*.txt")


@pytest.mark.parametrize("below", [".", "data"])
def test_a_snapshot_of_the_hub_leads_to_the_blobs_of_its_repository(tmp_path: Path, below: str) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen2/snapshots/0123"
    blob = snapshot.parents[1] / "blobs/abcd"
    blob.parent.mkdir(parents=True)
    blob.write_text("x")
    link(snapshot / "data/vocab.txt", "../../../blobs/abcd")
    assert given_files(snapshot / below, "**/*.txt")


def test_links_of_dvc_into_its_cache_are_files_of_the_folder(folder: Path, tmp_path: Path) -> None:
    cached = tmp_path / "cache/files/md5/ab" / ("c" * 30)
    cached.parent.mkdir(parents=True)
    cached.write_text("x")
    link(folder / "train.txt", cached)
    assert given_files(folder, "train*.txt") == [folder / "train.txt"]


def test_names_in_capitals_are_those_of_datasets_alone(tmp_path: Path) -> None:
    (tmp_path / "TRAIN.TXT").touch()
    assert given_files(tmp_path, "train*.txt", any_case=True) == [tmp_path / "TRAIN.TXT"]
    assert given_files(tmp_path, "train*.txt") == []


def test_only_a_plain_file_of_limited_size_is_read(tmp_path: Path) -> None:
    """A pipe and a device may never end, and the writer keeps whoever opens the pipe from waiting."""
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    os.write(writer, b"{}")
    try:
        for path in (pipe, Path("/dev/zero"), tmp_path):
            with pytest.raises(UserError, match="is no plain file"):
                read_plain(path)
    finally:
        os.close(writer)
    with large.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match=r"1\.00 TiB, more than 64\.0 MiB"):
        read_plain(large)
