"""Files and folders that are written whole or not at all."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.core.atomic import atomic_folder, atomic_write


def test_a_folder_appears_whole_in_place_of_the_old_one_or_of_a_killed_runs(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/half").write_text("half")
    for content in ("one", "two"):
        with atomic_folder(tmp_path / "out") as folder:
            (folder / content).write_text(content)
            assert not (tmp_path / "out" / content).exists()
        assert [path.name for path in (tmp_path / "out").iterdir()] == [content]
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "out") as folder:
        (folder / "new").write_text("new")
        raise KeyboardInterrupt
    with atomic_folder(tmp_path / "out", keep=False) as folder:
        (folder / "of another process").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "two"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_a_folder_have_the_umasks_mode(tmp_path: Path, umask: int, mode: int) -> None:
    cached = tmp_path / "cached"
    cached.write_text("read-only")
    cached.chmod(0o444)
    before = os.umask(umask)
    try:
        with atomic_folder(tmp_path / "out") as folder:
            (folder / "adapter").mkdir()
            save_file({"w": np.zeros(1)}, folder / "adapter/weights.safetensors")
            assert stat.S_IMODE((folder / "adapter/weights.safetensors").stat().st_mode) == 0o600, "as safetensors does"
            os.link(cached, folder / "linked")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out/adapter/weights.safetensors").stat().st_mode) == mode
    assert stat.S_IMODE(cached.stat().st_mode) == 0o444, "of the hub's cache"


def test_a_file_that_is_linked_from_the_cache_is_replaced_not_written_into(tmp_path: Path) -> None:
    cached = tmp_path / "cached"
    cached.write_text("old")
    os.link(cached, tmp_path / "metrics.json")
    atomic_write("new", tmp_path / "metrics.json")
    assert (cached.read_text(), (tmp_path / "metrics.json").read_text()) == ("old", "new")
