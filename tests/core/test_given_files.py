import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.core.given_files import CACHE_VARIABLE, given_files

DVC_OBJECT = "cache/files/md5/ab/" + "c" * 30


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
        (lambda folder: link(folder / "vocab.txt", "vocab.txt"), "vocab.txt leads out of"),
        (lambda folder: link(folder / "vocab.txt", "nowhere"), "vocab.txt cannot be read"),
        (lambda folder: os.mkfifo(folder / "vocab.txt"), "vocab.txt is no plain file"),
        (lambda folder: (folder / "vocab.txt").mkdir(), "vocab.txt is no plain file"),
        (lambda folder: (folder / os.fsdecode(b"\xff.txt")).touch(), "is not UTF-8"),
    ],
)
def test_what_is_no_file_of_the_folder_is_refused(folder: Path, put: Callable[[Path], None], said: str) -> None:
    put(folder)
    with pytest.raises(UserError, match=said) as refused:
        given_files(folder, "*.txt")
    assert refused.value.message.isprintable()


@pytest.mark.parametrize("below", [".", "data"])
def test_a_snapshot_of_the_hub_leads_to_the_blobs_of_its_repository(tmp_path: Path, below: str) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen2/snapshots/0123"
    blob = snapshot.parents[1] / "blobs/abcd"
    blob.parent.mkdir(parents=True)
    blob.write_text("x")
    link(snapshot / "data/vocab.txt", "../../../blobs/abcd")
    assert given_files(snapshot / below, "**/*.txt")


def test_what_only_looks_like_the_hubs_cache_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/abcd").write_text("secret")
    snapshot = tmp_path / "models--Qwen--Qwen2/snapshots/0123"
    link(tmp_path / "models--Qwen--Qwen2/blobs", "../secrets")
    link(snapshot / "vocab.txt", "../../blobs/abcd")
    with pytest.raises(UserError, match="leads out of"):
        given_files(snapshot, "*.txt")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/abcd").write_text("secret")
    link(tmp_path / "snapshots/0123/vocab.txt", "../../blobs/abcd")
    with pytest.raises(UserError, match="leads out of"):
        given_files(tmp_path / "snapshots/0123", "*.txt")


@pytest.mark.parametrize("where", ["workspace", "configuration", "variable"])
def test_links_of_dvc_into_the_workspaces_cache_are_files_of_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    cached = tmp_path / ("elsewhere" if where != "workspace" else ".dvc") / DVC_OBJECT
    cached.parent.mkdir(parents=True)
    cached.write_text("x")
    link(folder / "train.txt", cached)
    if where == "variable":
        monkeypatch.setenv(CACHE_VARIABLE, str(cached.parents[1]))
    if where == "configuration":
        (tmp_path / ".dvc").mkdir()
        (tmp_path / ".dvc/config").write_text("[cache]\n    dir = ../elsewhere/cache\n")
    assert [path.name for path in given_files(folder, "train*.txt")] == ["train.txt"]
