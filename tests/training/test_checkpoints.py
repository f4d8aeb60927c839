"""Checkpoints on disk: complete or absent, kept to their number, one process at a time."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.core import locks
from stages.core.locks import LOCK
from stages.training import checkpoints as on_disk
from stages.training.checkpoints import (
    FINISHED,
    MANIFEST,
    Checkpoints,
    damage,
    kept_checkpoints,
    remove_finished,
)
from stages.training.resume import save_state
from tests import ROOT
from tests.training.small import Killed

THIS, OTHER, THIRD = {"code": "1", "data": "2"}, {"code": "9", "data": "2"}, {"code": "7", "data": "2"}
FILES = {"weights": b"0123456789" * 9, "state": b"{}", "empty": b""}


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.partial(step).mkdir()
        for name, content in FILES.items():
            (checkpoints.partial(step) / name).write_bytes(content)
        checkpoints.complete(step, [*FILES])


def interrupted(recipe_dir: Path, identity: dict[str, str], *steps: int, keep: int = 2) -> Checkpoints:
    """A training that was killed after it had saved these."""
    with pytest.raises(Killed), kept_checkpoints(recipe_dir, identity, keep=keep) as checkpoints:
        save(checkpoints, *steps)
        raise Killed
    return checkpoints


def steps_of(checkpoints: Checkpoints) -> list[int]:
    folder = checkpoints.folder
    return [int(path.name.removeprefix("step-")) for path in sorted(folder.glob("step-*"))] if folder.exists() else []


def test_the_newest_is_found_by_the_same_training_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="stages")
    interrupted(tmp_path, THIS, 9, 10, 100_000_000)
    with kept_checkpoints(tmp_path, dict(reversed(THIS.items())), keep=2) as checkpoints:
        assert checkpoints.newest() == 100_000_000
        assert (checkpoints.at(10) / "weights").read_bytes() == FILES["weights"]
    assert not caplog.messages
    with kept_checkpoints(tmp_path, OTHER, keep=2) as other:
        assert other.newest() is None
    (message,) = caplog.messages
    assert "not resuming from step 100000000 " in message
    assert message.endswith("differs in: code")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interrupted(tmp_path_factory.mktemp("saved"), THIS, 1).at(1)


def damage_with(path: Path, content: bytes) -> str:
    """The fault of a checkpoint while one of its files holds this."""
    before = path.read_bytes()
    try:
        path.write_bytes(content)
        return damage(path.parent) or ""
    finally:
        path.write_bytes(before)


@given(name=st.sampled_from(["state", "weights"]), data=st.data())
def test_any_changed_byte_is_found_and_its_file_named(saved: Path, name: str, data: st.DataObject) -> None:
    content = bytearray(FILES[name])
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    assert damage_with(saved / name, bytes(content)).startswith(f"{saved / name} ")
    assert damage(saved) is None


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("weights", lambda path: path.write_bytes(FILES["weights"][:-7])),
        ("weights", lambda path: (path.unlink(), path.mkdir())),
        ("empty", lambda path: path.write_bytes(b"x")),
        (MANIFEST, Path.unlink),
        (MANIFEST, lambda path: path.write_text("{")),
        (MANIFEST, lambda path: path.write_text("[]")),
        (MANIFEST, lambda path: path.write_text('{"sha256": {}, "best": null}')),
    ],
)
def test_a_damaged_newest_is_skipped_and_goes_with_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, harm: Callable[[Path], object]
) -> None:
    checkpoints = interrupted(tmp_path, THIS, 10, 20)
    harm(checkpoints.at(20) / name)
    with kept_checkpoints(tmp_path, THIS, keep=2) as checkpoints:
        assert checkpoints.newest() == 10
        assert f"{checkpoints.at(20) / name} " in caplog.text
        save(checkpoints, 15)
        assert steps_of(checkpoints) == [10, 15]
        save(checkpoints, 20)
        assert checkpoints.newest() == 20


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_they_are_kept_to_their_number(tmp_path: Path, keep: int) -> None:
    with kept_checkpoints(tmp_path, THIS, keep=keep) as checkpoints:
        for step in range(1, 8):
            save(checkpoints, step)
            assert steps_of(checkpoints) == [*range(1, step + 1)][-keep:]
            (checkpoints.at(step) / MANIFEST).write_text("{")  # a damaged one does not stop the training


def test_idle_trainings_lose_theirs_once_this_one_has_all_of_its_own(tmp_path: Path) -> None:
    idle = interrupted(tmp_path, THIRD, 70)
    with kept_checkpoints(tmp_path, OTHER, keep=2) as busy:
        save(busy, 8, 9)
        assert not idle.folder.exists()
        with kept_checkpoints(tmp_path, THIS, keep=2) as checkpoints:
            save(checkpoints, 1, 2)
        assert (steps_of(busy), steps_of(checkpoints)) == ([8, 9], [1, 2])
        (busy.folder / FINISHED).touch()
        remove_finished(tmp_path)
        assert steps_of(busy) == [8, 9]
        assert not checkpoints.folder.exists()


@pytest.mark.parametrize("killed_at", range(1, 7))
def test_killed_at_any_moment_of_a_save_it_leaves_the_last_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """Synced are three files, the manifest, their folder, and, after the rename, the folder around it."""
    synced: list[str] = []
    rename, sync = Path.rename, on_disk._sync

    def record(path: Path) -> None:
        synced.append(path.name)
        if len(synced) == killed_at:
            raise Killed
        sync(path)

    def record_rename(path: Path, target: Path) -> Path:
        assert synced == [*sorted(FILES), MANIFEST, path.name]  # everything is on the disk by then
        return rename(path, target)

    interrupted(tmp_path, THIS, 1)
    with monkeypatch.context() as patch:
        patch.setattr(on_disk, "_sync", record)
        patch.setattr(Path, "rename", record_rename)
        checkpoints = interrupted(tmp_path, THIS, 2)
    with kept_checkpoints(tmp_path, THIS, keep=2):
        assert checkpoints.newest() == (2 if killed_at == 6 else 1)
        assert list(checkpoints.folder.glob(".*")) == []


def test_killed_while_one_is_removed_it_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, **_: object) -> None:
        if "removed" in path.name:
            (path / MANIFEST).unlink()
            raise Killed

    interrupted(tmp_path, THIS, 1, keep=1)
    with monkeypatch.context() as patch, pytest.raises(Killed), kept_checkpoints(tmp_path, THIS, keep=1) as checkpoints:
        patch.setattr("shutil.rmtree", killed)
        save(checkpoints, 2)
    assert steps_of(checkpoints) == [2]
    with kept_checkpoints(tmp_path, THIS, keep=1):
        assert checkpoints.newest() == 2
        assert list(checkpoints.folder.glob(".*")) == []


def test_only_finished_trainings_are_removed_and_no_link_is_followed(tmp_path: Path) -> None:
    """A stage in a container can leave links; the launcher, outside, must not touch what they lead to."""
    outside, recipe_dir = tmp_path / "outside", tmp_path / "r1"
    remove_finished(recipe_dir)  # never trained
    for folder in (outside, recipe_dir / "training"):
        folder.mkdir(parents=True)
        (folder / FINISHED).touch()
    (recipe_dir / "link").symlink_to(outside)
    (recipe_dir / "training" / LOCK).symlink_to(outside / "made")
    other = interrupted(recipe_dir, OTHER, 1)
    with kept_checkpoints(recipe_dir, THIS, keep=2) as checkpoints:
        save(checkpoints, 3)
    assert steps_of(checkpoints) == [3]  # its outputs may still be on their way
    remove_finished(recipe_dir)
    assert not checkpoints.folder.exists()
    assert steps_of(other) == [1]
    assert [path.name for path in outside.iterdir()] == [FINISHED]


HOLDER = """
import shutil, sys
from pathlib import Path
from stages.training.checkpoints import kept_checkpoints

with kept_checkpoints(Path(sys.argv[1]), {"code": "1", "data": "2"}, keep=2) as checkpoints:
    print("held", flush=True)
    sys.stdin.readline()
    checkpoints.partial(7).mkdir()
    (checkpoints.partial(7) / "weights").touch()
    checkpoints.complete(7, ["weights"])
    if sys.argv[2] == "finishes":
        shutil.rmtree(checkpoints.folder)
"""


@pytest.mark.parametrize(("end", "newest"), [("is killed", 7), ("finishes", None)])
def test_a_second_process_waits_and_resumes_from_the_work_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, newest: int | None
) -> None:
    """A dvc that was killed can leave a training that saves its work, or that finishes and removes the folder."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path), end]
    first = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    to_first, from_first = first.stdin, first.stdout
    assert to_first is not None
    assert from_first is not None
    assert from_first.readline() == "held\n"
    messages: list[str] = []

    def let_it_end(message: str, *args: object) -> None:
        messages.append(message % args)
        to_first.write("\n")
        to_first.flush()

    monkeypatch.setattr(locks.log, "info", let_it_end)
    with kept_checkpoints(tmp_path, THIS, keep=2) as checkpoints:
        assert checkpoints.newest() == newest
        assert (checkpoints.folder / LOCK).exists()
    assert messages[0].startswith("waiting for another process")
    assert first.wait() == 0


def test_only_a_failing_disk_is_an_os_error() -> None:
    state = {"weights": torch.zeros(100_000)}
    with pytest.raises(OSError, match="No space left"):
        save_state(state, Path("/dev/full"))
    with pytest.raises(AttributeError, match="pickle"):
        save_state({"weights": lambda: None}, Path("/dev/null"))
