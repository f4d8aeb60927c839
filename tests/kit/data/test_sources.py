from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.core.errors import UserError
from stages.kit.data import sources
from stages.kit.data.sources import files_by_split, holds, parquet_folder, read_parquet_split, source_folder


def write(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"name": list(names)}), path)


def read(folder: Path, split: str, *required: str) -> list[tuple[str, str]]:
    rows = read_parquet_split(folder, split, required=required or ("name",), form="files with names")
    return [(str(place), row["name"]) for place, row in rows]


def test_the_rows_of_a_split_come_in_order_of_file_and_row(tmp_path: Path) -> None:
    for file, names in {"data/train-1": "c", "data/train-0": "ab", "data/val-0": "d", "train": "x"}.items():
        write(tmp_path / f"{file}.parquet", *names)
    assert read(tmp_path, "train") == [
        ("data/train-0.parquet row 0", "a"),
        ("data/train-0.parquet row 1", "b"),
        ("data/train-1.parquet row 0", "c"),
    ]
    assert read(tmp_path / "data", "val") == [("val-0.parquet row 0", "d")]
    (tmp_path / "data/val-0.parquet").rename(tmp_path / "data/test-0.parquet")
    assert read(tmp_path, "val") == [("data/test-0.parquet row 0", "d")]


def test_a_missing_column_is_refused_by_file(tmp_path: Path) -> None:
    for file in ("data/train-0", "data/train-1"):
        write(tmp_path / f"{file}.parquet", "a", "b")
    with pytest.raises(UserError, match=r"train-1.parquet lacks age, box\.width, for all 2 rows\nExpected: files with"):
        read(tmp_path, "train", "name", "age", "box.width")


@pytest.mark.parametrize("content", ["empty", "photos"])
def test_a_folder_of_another_form_is_refused_with_what_it_holds(tmp_path: Path, content: str) -> None:
    if content != "empty":
        (tmp_path / "1.jpg").touch()
    with pytest.raises(
        UserError, match=r"no files for the split val.*Expected: files with names.*docs/data\.md"
    ) as refused:
        read(tmp_path, "val")
    found = {"empty": "it is empty", "photos": "it holds 1 .jpg file"}
    assert {name for name, reason in found.items() if reason in refused.value.message} >= {content}


@pytest.mark.parametrize("source", ["nonsense", "folder:", "hub:owner/name", "ftp:somewhere@1"])
def test_an_unknown_source_is_refused_with_the_known_ones(source: str) -> None:
    with pytest.raises(UserError, match="expected folder:PATH or hub:OWNER/NAME@REVISION"):
        parquet_folder(source)
    with pytest.raises(UserError, match="expected this or that"):
        source_folder(source, known="this or that")


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no dataset folder .*nowhere; point the dataset's `source` in params.yaml"):
        parquet_folder(f"folder:{tmp_path}/nowhere")


def test_a_hub_source_is_resolved_to_the_full_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456" + "a" * 33
    monkeypatch.setattr(sources, "fetch_snapshot", lambda *repo, patterns: (tmp_path, commit))
    assert parquet_folder("hub:owner/name@0123456") == (tmp_path, f"hub:owner/name@{commit}", commit)


def test_files_are_of_a_split_by_their_names() -> None:
    files = [Path(name) for name in ("dev.txt", "notes.txt", "test.txt", "train_1.txt", "training.txt")]
    assert files_by_split(files) == {"train": files[3:], "val": files[:1]}
    assert files_by_split(files[1:2]) == {"train": []}


def test_the_files_of_a_folder_are_listed_by_kind_and_links_not_followed(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for index in range(5):
        (tmp_path / f"photos/{index}.JPG").touch()
    (tmp_path / "out").symlink_to("/etc")
    assert holds(tmp_path) == "it holds 5 .jpg files (photos/0.JPG, photos/1.JPG, photos/2.JPG, ...)"
    (tmp_path / "all.json").symlink_to("/dev/zero")
    (tmp_path / "LICENSE").touch()
    assert holds(tmp_path).endswith("1 other file (LICENSE), 1 .json file (all.json)")
