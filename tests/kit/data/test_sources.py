import json
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.kit.data.sources import about_invalid, holds, split_files


def test_split_files_prefers_the_data_folder_and_sorts(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("data/train-1.parquet", "data/train-0.parquet", "data/val-0.parquet", "train.parquet"):
        (tmp_path / name).touch()
    assert [p.name for p in split_files(tmp_path, "train", form="rows")] == ["train-0.parquet", "train-1.parquet"]
    assert [p.name for p in split_files(tmp_path / "data", "val", form="rows")] == ["val-0.parquet"]


def test_missing_folder_and_missing_split_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no dataset folder .*nowhere"):
        split_files(tmp_path / "nowhere", "train", form="rows")
    with pytest.raises(UserError, match="no files for the split val"):
        split_files(tmp_path, "val", form="rows")


def test_what_a_folder_holds_is_said_by_kind(tmp_path: Path) -> None:
    assert holds(tmp_path) == "it is empty"
    (tmp_path / "photos").mkdir()
    for index in range(5):
        (tmp_path / f"photos/{index}.JPG").touch()
    assert holds(tmp_path) == "it holds 5 .jpg files (photos/0.JPG, photos/1.JPG, photos/2.JPG, ...)"
    coco: dict[str, object] = {"info": {}, "images": [], "annotations": [], "categories": []}
    (tmp_path / "all.json").write_text(json.dumps(coco))
    assert holds(tmp_path).endswith("1 .json file (all.json: annotations of COCO, by their keys)")
    (tmp_path / "all.json").write_text(json.dumps({"name": "x"}))
    (tmp_path / "LICENSE").touch()
    assert "COCO" not in holds(tmp_path)
    assert "1 other file (LICENSE)" in holds(tmp_path)


def test_what_a_link_leads_to_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/etc")
    (tmp_path / "all.json").symlink_to("/dev/zero")
    assert holds(tmp_path) == "it holds 1 .json file (all.json)"


def test_leaving_out_is_advised_only_where_something_is_left() -> None:
    assert "data.skip_invalid: true" in about_invalid({"train": 3, "val": 1}, "rows")
    assert "Nothing of val is valid" in about_invalid({"train": 3, "val": 0}, "rows")
    assert "data.skip_invalid: true" not in about_invalid({"train": 3, "val": 0}, "rows")
