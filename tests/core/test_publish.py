import os
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.core.records import publish_text, published


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for content in ("one", "two"):
        with published(out) as folder:
            (folder / content).write_text(content)
            assert not (out / content).exists()
        assert [path.name for path in out.iterdir()] == [content]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_after_an_error_the_old_folder_is_left_as_it_was(tmp_path: Path) -> None:
    with published(tmp_path / "out") as folder:
        (folder / "old").write_text("old")
    with pytest.raises(KeyboardInterrupt), published(tmp_path / "out") as folder:
        (folder / "new").write_text("new")
        raise KeyboardInterrupt
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_run_left_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/half").write_text("half")
    with published(tmp_path / "out") as folder:
        (folder / "whole").write_text("whole")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_who_may_read_what_is_published_is_as_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    cached = tmp_path / "cached"
    cached.write_text("read-only")
    cached.chmod(0o444)
    before = os.umask(umask)
    try:
        with published(tmp_path / "out") as folder:
            (folder / "adapter").mkdir()
            save_file({"w": np.zeros(1)}, folder / "adapter/weights.safetensors")
            assert stat.S_IMODE((folder / "adapter/weights.safetensors").stat().st_mode) == 0o600, "as safetensors does"
            os.link(cached, folder / "linked")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out/adapter/weights.safetensors").stat().st_mode) == mode
    assert stat.S_IMODE(cached.stat().st_mode) == 0o444, "of the hub's cache"


def test_other_processes_of_a_run_publish_nothing(tmp_path: Path) -> None:
    with published(tmp_path / "out", keep=False) as folder:
        (folder / "mine").write_text("mine")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_linked_from_the_cache_is_replaced_not_written_into(tmp_path: Path) -> None:
    cached = tmp_path / "cached"
    cached.write_text("old")
    os.link(cached, tmp_path / "metrics.json")
    publish_text("new", tmp_path / "metrics.json")
    assert cached.read_text() == "old"
    assert (tmp_path / "metrics.json").read_text() == "new"
