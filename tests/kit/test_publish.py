import os
from pathlib import Path

import pytest

from stages.kit.publish import publish_text, published


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
