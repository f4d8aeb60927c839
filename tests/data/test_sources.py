"""Sources of models and datasets. The hub's client is replaced at the calls that go out."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.core.errors import UserError
from stages.core.params.schema import SplitParams
from stages.data.hub import fetch_snapshot
from stages.data.sources import (
    describe_folder,
    files_by_split,
    parquet_folder,
    table_rows,
)

FIRST, SECOND = "0123456" + "a" * 33, "0123456" + "b" * 33


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, object]]:
    """The downloads of a repository of two commits, with its files in tmp_path."""
    calls: list[dict[str, object]] = []

    def snapshot_download(repo_id: str, **options: object) -> str:
        calls.append({"repo_id": repo_id, **options})
        return str(tmp_path)

    commits = [SimpleNamespace(commit_id=FIRST), SimpleNamespace(commit_id=SECOND)]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_commits", lambda self, repo, repo_type: commits)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "repo_info", lambda self, repo, revision, repo_type: SimpleNamespace(sha=SECOND)
    )
    return calls


@pytest.mark.parametrize(("given", "commit"), [(FIRST, FIRST), (SECOND[:9], SECOND), ("main", SECOND)])
def test_a_revision_is_resolved_to_the_full_commit(
    hub: list[dict[str, object]], tmp_path: Path, given: str, commit: str
) -> None:
    assert parquet_folder(f"hub:owner/name@{given}") == (tmp_path, f"hub:owner/name@{commit}")
    options = {"repo_type": "dataset", "revision": commit, "allow_patterns": ["data/*.parquet"]}
    assert hub == [{"repo_id": "owner/name", **options}]


@pytest.mark.parametrize(("given", "count"), [("0123456", "2 commits"), ("fffffff", "0 commits")])
def test_a_short_commit_must_name_exactly_one(hub: list[dict[str, object]], given: str, count: str) -> None:
    with pytest.raises(UserError, match=f"{count} of owner/name on the hub start with {given}"):
        fetch_snapshot("dataset", "owner/name", given, patterns=["data/*"])
    assert not hub


@pytest.mark.parametrize("source", ["nonsense", "folder:", "hub:owner/name", "ftp:somewhere@1", "folder:nowhere"])
def test_an_unknown_source_or_missing_folder_is_refused(source: str) -> None:
    with pytest.raises(UserError, match=r"expected folder:PATH or hub:OWNER/NAME@REVISION|no dataset folder nowhere"):
        parquet_folder(source)


def write(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"name": list(names)}), path)


def test_rows_come_in_order_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "data" / "train-0.parquet"
    write(path, "a", "b")
    found = [(str(place), row["name"]) for place, row in table_rows(tmp_path, path, ["name"])]
    assert found == [("data/train-0.parquet row 0", "a"), ("data/train-0.parquet row 1", "b")]


FILES = ("train_1.txt", "train_2.txt", "dev.txt", "test.txt", "public_test_ground_truth.txt", "more/notes.txt")


def chosen(folder: Path, **splits: str) -> dict[str, str]:
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    files = sorted(folder.glob("*.txt"))
    found = files_by_split(folder, files, SplitParams(**splits), expected="files of words")
    return {split: " ".join(path.relative_to(folder).as_posix() for path in paths) for split, paths in found.items()}


def test_files_belong_to_the_split_that_names_them_or_else_to_that_of_their_names(tmp_path: Path) -> None:
    train = "train_1.txt train_2.txt"
    assert chosen(tmp_path) == {"train": train, "val": "dev.txt"}
    truth = "public_test_ground_truth.txt"
    assert chosen(tmp_path, test="public_test*") == {"train": train, "val": "dev.txt", "test": truth}
    assert chosen(tmp_path, val="train_2.txt") == {"train": "train_1.txt", "val": "train_2.txt"}
    assert chosen(tmp_path, test="dev.txt") == {"train": train, "test": "dev.txt"}, "and test.txt is not validated on"
    assert chosen(tmp_path, train="**/notes*", test=truth)["train"] == "more/notes.txt"


@pytest.mark.parametrize("train", ["trainset", "trainData", "training-1"])
@pytest.mark.parametrize("val", ["evaluation", "valset", "evaldata", "holdout_2", "testset", "testData"])
def test_the_word_that_begins_a_name_says_the_split(tmp_path: Path, train: str, val: str) -> None:
    files = [tmp_path / f"{name}.txt" for name in (train, val, "trainextra")]
    found = files_by_split(tmp_path, files, SplitParams(), expected="")
    assert found == {"train": files[:1], "val": files[1:2]}


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"test": "publik*"}, r"splits\.test: 'publik\*' matches no file of .*: it holds 6 \.txt files"),
        ({"val": "dev*", "test": "d*.txt"}, r"splits\.test: .*dev\.txt is matched by another pattern too"),
        ({"test": "/etc/*"}, r"splits\.test: '/etc/\*' is no pattern"),
        ({"test": "notes*"}, r"splits\.test: 'notes\*' matches no file"),  # `*` stays within a folder
        ({"test": "../*"}, r"leads out of"),
        ({"train": "more", "test": "more"}, r"splits\.train: 'more' matches no file"),
        ({"val": "train*"}, "no training files: it holds 6 .txt files.*Expected: files of words"),
    ],
)
def test_a_split_of_no_files_or_of_anothers_is_refused(tmp_path: Path, splits: dict[str, str], message: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").touch()
    with pytest.raises(UserError, match=message):
        chosen(tmp_path / "in", **splits)


def test_the_files_of_a_folder_are_described_by_kind_and_links_not_followed(tmp_path: Path) -> None:
    assert describe_folder(tmp_path) == "it is empty"
    (tmp_path / "photos").mkdir()
    for index in range(5):
        (tmp_path / f"photos/{index}.JPG").touch()
    (tmp_path / "out").symlink_to("/etc")
    assert describe_folder(tmp_path) == "it holds 5 .jpg files (photos/0.JPG, photos/1.JPG, photos/2.JPG and 2 more)"
    (tmp_path / "all.json").symlink_to("/dev/zero")
    (tmp_path / "LICENSE").touch()
    assert describe_folder(tmp_path).endswith("1 other file (LICENSE), 1 .json file (all.json)")
