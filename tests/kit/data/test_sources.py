from pathlib import Path

import pytest

from stages.kit.data.sources import split_files
from stages.kit.errors import UserError


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
