import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.core.errors import UserError
from stages.core.params.schema import LimitParams
from stages.kit.data.preparation import Sample, Source, write_prepared
from stages.kit.data.sources import Place

SCHEMA = pa.schema([("word", pa.string()), ("number", pa.int64())])


@dataclass(frozen=True)
class Word:
    word: str
    number: int = 0

    def subject(self) -> str:
        return self.word.lower()

    def content(self) -> list[Any]:
        return [self.word, self.number]


def samples(file: str, words: Iterable[str]) -> list[Sample[Word]]:
    """A word that starts with an exclamation mark is invalid."""
    return [
        (Place(file, line), ["it shouts", "it is loud"] if word.startswith("!") else Word(word))
        for line, word in enumerate(words, start=1)
    ]


def prepare(out_dir: Path, train: str, val: str | None = None, **options: Any) -> dict[str, Any]:
    splits = {"train": samples("train.txt", train.split())}
    if val is not None:
        splits["val"] = samples("val.txt", val.split())

    def summary(split: str, records: Sequence[Word]) -> dict[str, Any]:
        return {"longest": max(len(record.word) for record in records)}

    return write_prepared(
        Source(origin={"source": "folder:in", "revision": None}, splits=splits),
        out_dir,
        schema=SCHEMA,
        summary=summary,
        form="files of words",
        subject="word",
        **{"skip_invalid": False, "held_out": 0.25, **options},
    )


def refusal(out_dir: Path, train: str, val: str | None = None, **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        prepare(out_dir, train, val, **options)
    assert not list(out_dir.parent.iterdir()), "nothing is left of a refused run"
    return refused.value.message


def words(out_dir: Path, split: str) -> list[str]:
    return [row["word"] for row in pq.read_table(out_dir / f"{split}.parquet").to_pylist()]


def test_splits_and_their_figures_are_written(tmp_path: Path) -> None:
    stats = prepare(tmp_path / "out", "a bb ccc bb", "d")
    assert pq.read_schema(tmp_path / "out/val.parquet") == SCHEMA
    assert (words(tmp_path / "out", "train"), words(tmp_path / "out", "val")) == (["a", "bb", "ccc", "bb"], ["d"])
    assert json.loads((tmp_path / "out/stats.json").read_text()) == stats
    assert (stats["source"], stats["revision"]) == ("folder:in", None)
    digest = stats["splits"]["train"].pop("digest")
    assert digest.startswith("sha256:")
    assert stats["splits"]["train"] == {
        "records": 4,
        "longest": 3,
        "invalid_rows": 0,
        "invalid": [],
        "leaked_rows": 0,
        "leaked": [],
    }


def test_the_same_samples_give_the_same_bytes_and_others_another_digest(tmp_path: Path) -> None:
    digests = [
        prepare(tmp_path / name, train, "d")["splits"]["train"]["digest"]
        for name, train in (("a", "x y"), ("b", "x y"), ("c", "y x"))
    ]
    assert digests[0] == digests[1] != digests[2]
    for file in ("train.parquet", "val.parquet", "stats.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_invalid_samples_are_refused_with_place_and_reason(tmp_path: Path) -> None:
    message = refusal(tmp_path / "out", "a !b", "!c d")
    assert "folder:in has 2 invalid samples" in message
    for problem in ("train.txt line 2: it shouts", "train.txt line 2: it is loud", "val.txt line 1: it shouts"):
        assert problem in message
    assert message.endswith("Correct them, or leave them out with data.skip_invalid: true in params.yaml")
    of_val = refusal(tmp_path / "out", "a", "!b")
    assert "Nothing of val is valid, so data.skip_invalid is no help. Expected: files of words; docs/data.md" in of_val
    assert "Nothing of train is valid" in refusal(tmp_path / "out", "!b")


def test_a_long_list_of_problems_is_cut_and_counted(tmp_path: Path) -> None:
    message = refusal(tmp_path / "out", "a " + "! " * 30, "d")
    assert "30 invalid samples" in message
    assert message.count("\n  train.txt") == 50
    assert "and 10 more" in message


def test_skipping_counts_lists_and_logs_what_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stats = prepare(tmp_path / "out", "a !b C", "d c", skip_invalid=True)["splits"]
    assert words(tmp_path / "out", "train") == ["a"]
    assert stats["train"]["invalid_rows"] == 1
    assert stats["train"]["invalid"] == [
        {"file": "train.txt", "line": 2, "problem": problem} for problem in ("it shouts", "it is loud")
    ]
    assert (stats["train"]["leaked_rows"], stats["val"]["leaked_rows"]) == (1, 0)
    assert stats["train"]["leaked"] == [{"train": "train.txt line 3", "val": "val.txt line 2"}]
    assert caplog.messages == ["1 training sample left out: in the validation split too"]


def test_a_subject_in_both_splits_is_refused_by_both_places(tmp_path: Path) -> None:
    message = refusal(tmp_path / "out", "a B b", "b c b")
    assert "2 training samples whose word is in the validation split too, which makes scores worthless" in message
    assert "train.txt line 2 and val.txt line 1: B\n  train.txt line 3 and val.txt line 1: b\n" in message
    assert "data.skip_invalid: true" in message


def test_leaks_are_refused_in_any_case_where_a_task_says_so(tmp_path: Path) -> None:
    message = refusal(tmp_path / "out", "a b", "b", skip_invalid=True, skip_leaks=False)
    assert "1 training sample whose word" in message
    assert "skip_invalid" not in message
    assert "leaked" not in prepare(tmp_path / "out", "a b", "c", skip_leaks=False)["splits"]["train"]


def test_nothing_left_of_a_split_is_refused(tmp_path: Path) -> None:
    leaking = refusal(tmp_path / "out", "a !b", "a", skip_invalid=True)
    assert "no valid sample in the split train; 2 samples left out; expected at least one" in leaking
    assert "no valid sample in the split val; 1 sample left out" in refusal(
        tmp_path / "out", "a", "!b", skip_invalid=True
    )
    assert "no valid sample in the split val; expected" in refusal(tmp_path / "out", "a", "")


def test_a_share_of_the_subjects_is_held_out_whatever_their_order(tmp_path: Path) -> None:
    train = [*"abcdefgh", "B", "c"]
    stats = prepare(tmp_path / "one", " ".join(train))["splits"]
    prepare(tmp_path / "two", " ".join(train[::-1]))
    held, kept = (words(tmp_path / "one", split) for split in ("val", "train"))
    assert held == words(tmp_path / "two", "val")[::-1]
    assert len({word.lower() for word in held}) == 2
    assert not {word.lower() for word in held} & {word.lower() for word in kept}
    assert sorted(held + kept) == sorted(train)
    assert stats["train"]["records"] + stats["val"]["records"] == 10


def test_a_share_of_the_training_subjects_is_set_aside_whatever_their_order(tmp_path: Path) -> None:
    train = [f"{letter}{number}" for letter in "abCdefGhij" for number in range(20)] + ["A1", "B2"]
    stats = prepare(tmp_path / "one", " ".join(train), "val a0", selection=0.2, skip_invalid=True)["splits"]
    prepare(tmp_path / "two", " ".join(train[::-1]), "val a0", selection=0.2, skip_invalid=True)
    aside, kept = (words(tmp_path / "one", split) for split in ("selection", "train"))
    assert aside == words(tmp_path / "two", "selection")[::-1]
    assert 20 < len(aside) < 60
    assert not {word.lower() for word in aside} & {word.lower() for word in kept}
    assert sorted([*aside, *kept, "a0"]) == sorted(train), "what is validated on is in neither"
    assert (stats["selection"]["records"], stats["selection"]["leaked_rows"]) == (len(aside), 0)
    assert words(tmp_path / "one", "val") == ["val", "a0"]
    assert "no valid sample in the split selection" in refusal(tmp_path / "few" / "out", "a b", "c", selection=0.01)


def test_one_subject_cannot_be_split(tmp_path: Path) -> None:
    assert "has only 1 word to train on, and no validation files" in refusal(tmp_path / "out", "a A")


def test_a_limit_takes_the_same_records_of_what_is_left_whatever_their_order(tmp_path: Path) -> None:
    train = [*"abcdefgh", "!", "x"]
    limit = LimitParams(train=3)
    stats = prepare(tmp_path / "one", " ".join(train), "x y", skip_invalid=True, limit=limit)["splits"]
    prepare(tmp_path / "two", " ".join(train[::-1]), "x y", skip_invalid=True, limit=limit)
    kept = words(tmp_path / "one", "train")
    assert kept == sorted(kept) == words(tmp_path / "two", "train")[::-1]
    assert set(kept) < set("abcdefgh")
    assert (stats["train"]["records"], stats["train"]["beyond_limit"], stats["val"]["records"]) == (3, 5, 2)


def test_a_refused_run_leaves_the_earlier_one_in_place(tmp_path: Path) -> None:
    prepare(tmp_path / "out", "a", "b")
    with pytest.raises(UserError):
        prepare(tmp_path / "out", "a", "a")
    assert words(tmp_path / "out", "val") == ["b"]
