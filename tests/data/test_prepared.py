import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.core.errors import UserError
from stages.core.params.schema import DataParams, LimitParams
from stages.data.near import Description, describe_text
from stages.data.prepared import SPLITS, RawDataset, Rules, Sample, write_prepared
from stages.data.sources import Place

SCHEMA = pa.schema([("word", pa.string()), ("number", pa.int64())])


@dataclass(frozen=True)
class Word:
    word: str
    number: int = 0

    @property
    def group(self) -> str:
        """The letters behind a plus sign."""
        return self.word.partition("+")[2]

    def subject(self) -> str:
        return self.word.lower()

    def content(self) -> list[Any]:
        return [self.word, self.number]


def described(word: Word) -> Description:
    return describe_text(word.word.replace("_", " "))


def samples(file: str, words: Iterable[str]) -> list[Sample[Word]]:
    """A word that starts with an exclamation mark is invalid."""
    return [
        (Place(file, line), ["it shouts", "it is loud"] if word.startswith("!") else Word(word))
        for line, word in enumerate(words, start=1)
    ]


def prepare(
    out_dir: Path,
    train: str,
    val: str | None = None,
    *,
    test: str | None = None,
    limit: LimitParams | None = None,
    separate_groups: bool = False,
    repeat: Mapping[str, int] = MappingProxyType({}),
    **data: Any,
) -> dict[str, Any]:
    """train: the words of train.txt, and after each ` | ` those of train_2.txt and further files."""

    def summary(_: str, records: Sequence[Word]) -> dict[str, Any]:
        return {"longest": max(len(record.word) for record in records)}

    first, *others = train.split(" | ")
    files = {"train.txt": first} | {f"train_{number}.txt": some for number, some in enumerate(others, start=2)}
    splits = {"train": [sample for file, some in files.items() for sample in samples(file, some.split())]}
    for split, words in {"val": val, "test": test}.items():
        if words is not None:
            splits[split] = samples(f"{split}.txt", words.split())
    rules = Rules(
        schema=SCHEMA,
        summary=summary,
        expected="files of words",
        subject="word",
        describe=described,
        held_out=0.25,
        separate_groups=separate_groups,
    )
    unused = ["c.txt", "b.txt"]
    dataset = RawDataset(rules=rules, source="folder:in", splits=splits, unused_files=lambda: unused, repeat=repeat)
    return write_prepared(dataset, out_dir, DataParams(**data), limit)


def test_groups_are_held_out_and_set_aside_as_wholes(tmp_path: Path) -> None:
    train = [f"{letter}{number}+{letter}" for letter in "abcdefghijkl" for number in range(3)]
    stats = prepare(tmp_path / "out", " ".join(train), selection=0.3)["splits"]
    groups = {split: {word[-1] for word in words(tmp_path / "out", split)} for split in stats}
    assert all(groups.values())
    assert sum(map(len, groups.values())) == 12 == sum(each["groups"] for each in stats.values())
    alone = prepare(tmp_path / "alone", "a b c", "d e")["splits"]
    assert not any("groups" in each for each in alone.values()), "each sample is its own"


def test_a_group_in_two_given_splits_is_counted_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stats = prepare(tmp_path / "out", "a+x b+x c+y d", "e+x f")["splits"]
    assert stats["train"]["in_groups_of"] == {"val": 2}
    assert words(tmp_path / "out", "train") == ["a+x", "b+x", "c+y", "d"]
    assert "2 samples of train may make scores too good: their groups are in val too" in caplog.text
    with pytest.raises(UserError, match="2 samples with the same word in another split"):
        prepare(tmp_path / "refused", "a+x b+x c+y d", "e+x f", separate_groups=True)


def refusal(out_dir: Path, train: str, val: str | None = None, **data: Any) -> str:
    with pytest.raises(UserError) as refused:
        prepare(out_dir, train, val, **data)
    assert not out_dir.exists()
    return refused.value.message


def words(out_dir: Path, split: str) -> list[str]:
    return [row["word"] for row in pq.read_table(out_dir / f"{split}.parquet").to_pylist()]


def test_splits_and_their_figures_are_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stats = prepare(tmp_path / "out", "a bb ccc bb", "d")
    assert pq.read_schema(tmp_path / "out/val.parquet") == SCHEMA
    assert (words(tmp_path / "out", "train"), words(tmp_path / "out", "val")) == (["a", "bb", "ccc", "bb"], ["d"])
    assert json.loads((tmp_path / "out/stats.json").read_text()) == stats
    assert (stats["source"], stats["unused_files"]) == ("folder:in", ["b.txt", "c.txt"])
    repeated = "1 sample of train kept, though the same as another"
    assert caplog.messages == [repeated, "not read: b.txt, c.txt"]
    assert stats["splits"]["train"].pop("digest").startswith("sha256:")
    nothing = {"invalid_rows": 0, "invalid": [], "leaked_rows": 0, "leaked": []}
    assert stats["splits"]["train"] == {"records": 4, "groups": 3, "repeated_samples": 1, "longest": 3, **nothing}


def test_the_same_samples_give_the_same_bytes_and_others_another_digest(tmp_path: Path) -> None:
    digests = [
        prepare(tmp_path / name, train, "d")["splits"]["train"]["digest"]
        for name, train in (("a", "x y"), ("b", "x y"), ("c", "y x"))
    ]
    assert digests[0] == digests[1] != digests[2]
    for file in ("train.parquet", "val.parquet", "stats.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(
    ("train", "val", "data", "parts"),
    [
        (
            "a !b",
            "!c d",
            {},
            ("2 invalid samples", "train.txt line 2: it is loud", "val.txt line 1: it shouts", "data.skip_invalid"),
        ),
        ("a", "!b", {}, ("Nothing of val is valid", "Expected: files of words")),
        ("!b", None, {}, ("Nothing of train is valid",)),
        ("a " + "! " * 30, "d", {}, ("30 invalid samples", "line 2: it shouts (and 29 more")),
        (
            "a B b",
            "b c b",
            {},
            ("2 samples with the same word", "train and val: train.txt line 2 and val.txt line 1: B"),
        ),
        ("a !b", "a", {"skip_invalid": True}, ("in the split train; left out: 1 invalid, 1 in another split too",)),
        ("a", "!b", {"skip_invalid": True}, ("val.txt line 1: it shouts", "Nothing of val is valid")),
        ("a !b c", "d", {"selection": 0.5}, ("Correct them, or leave them out",)),
        ("a", "", {}, ("no valid sample in the split val",)),
        ("a b", "c", {"selection": 0.01}, ("no valid sample in the split selection",)),
        ("a A", None, {}, ("only 1 word to train on", "at least 2")),
    ],
)
def test_a_refused_dataset_leaves_nothing_behind(
    tmp_path: Path, train: str, val: str | None, data: dict[str, Any], parts: tuple[str, ...]
) -> None:
    message = refusal(tmp_path / "out", train, val, **data)
    assert [part for part in parts if part not in message] == []


def test_a_refused_dataset_leaves_the_earlier_one_in_place(tmp_path: Path) -> None:
    prepare(tmp_path / "out", "a", "b")
    with pytest.raises(UserError):
        prepare(tmp_path / "out", "a", "a")
    assert words(tmp_path / "out", "val") == ["b"]


def test_skipped_samples_are_counted_and_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stats = prepare(tmp_path / "out", "a !b C", "d c", skip_invalid=True)["splits"]
    assert words(tmp_path / "out", "train") == ["a"]
    assert stats["train"]["invalid_rows"] == 1
    assert stats["train"]["invalid"] == [
        {"file": "train.txt", "line": 2, "problem": problem} for problem in ("it shouts", "it is loud")
    ]
    assert (stats["train"]["leaked_rows"], stats["val"]["leaked_rows"]) == (1, 0)
    assert stats["train"]["leaked"] == [{"train": "train.txt line 3", "val": "val.txt line 2"}]
    assert "1 sample of train left out: in val too" in caplog.messages


def test_a_word_is_left_in_the_split_that_is_scored_last(tmp_path: Path) -> None:
    stats = prepare(tmp_path / "out", "a B c d", "b e", test="C e f", skip_invalid=True)["splits"]
    found = {split: words(tmp_path / "out", split) for split in stats}
    assert found == {"train": ["a", "d"], "val": ["b"], "test": ["C", "e", "f"]}
    assert stats["val"]["leaked"] == [{"val": "val.txt line 2", "test": "test.txt line 2"}]
    assert {each["train"]: each.get("test", each.get("val")) for each in stats["train"]["leaked"]} == {
        "train.txt line 2": "val.txt line 1",
        "train.txt line 3": "test.txt line 1",
    }
    with pytest.raises(UserError, match=r"3 samples .*\n.*train and val: .*\n.*train and test: .*\n.*val and test: "):
        prepare(tmp_path / "refused", "a B c d", "b e", test="C e f")


def test_a_sample_that_resembles_one_of_another_split_is_counted_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "_".join(f"word{number}" for number in range(60))
    edited, other = text.replace("word30", "changed"), text.replace("word", "another")
    short = "the_same_short_sentence_about_a_cup"
    train = f"{edited} {other} {short}_again"
    stats = prepare(tmp_path / "out", train, f"{text} {short}")
    assert stats["near_duplicates"] == ["train train.txt line 1 resembles val val.txt line 1"]
    assert "1 sample may make scores too good" in caplog.text
    assert words(tmp_path / "out", "train") == [edited, other, f"{short}_again"], "it is only counted"
    message = refusal(tmp_path / "refused", train, f"{text} {short}", near_duplicates="refuse")
    assert "1 near-duplicate in two splits" in message
    assert "data.near_duplicates: count" in message
    assert "near_duplicates" not in prepare(tmp_path / "apart", f"{edited} {text}", short), "within a split all is well"


@pytest.mark.parametrize(("count", "changed", "near"), [(21, 0, 0), (22, 0, 1), (60, 2, 1), (60, 6, 0)])
def test_texts_of_22_words_are_near_duplicates_by_four_in_five_trigrams(
    tmp_path: Path, count: int, changed: int, near: int
) -> None:
    words = [f"word{number}" for number in range(count)]
    other = [f"Word{number}" if number % 9 or number // 9 >= changed else "changed" for number in range(count)]
    stats = prepare(tmp_path / "out", "_".join([*other, ""]), "_".join(words))
    assert len(stats.get("near_duplicates", ())) == near


def test_validation_is_held_out_beside_a_test_split(tmp_path: Path) -> None:
    stats = prepare(tmp_path / "out", "a b c d e f g h i", test="x a", skip_invalid=True)
    assert stats["validation"] == "25% of what the training files hold, by a digest of each word"
    found = {split: set(words(tmp_path / "out", split)) for split in stats["splits"]}
    assert found["test"] == {"x", "a"}
    assert found["train"] | found["val"] == set("bcdefghi")
    assert found["val"]


def test_a_share_is_held_out_and_one_set_aside_whatever_the_order(tmp_path: Path) -> None:
    train = [f"{letter}{number}" for letter in "abCdefGhij" for number in range(20)] + ["A1", "B2"]
    stats = prepare(tmp_path / "one", " ".join(train), selection=0.2)["splits"]
    prepare(tmp_path / "two", " ".join(train[::-1]), selection=0.2)
    found = {split: words(tmp_path / "one", split) for split in ("train", "val", "selection")}
    assert all(words(tmp_path / "two", split) == held[::-1] for split, held in found.items())
    assert sorted(word for held in found.values() for word in held) == sorted(train)
    subjects = {split: {word.lower() for word in held} for split, held in found.items()}
    assert not subjects["train"] & subjects["val"] | subjects["selection"] & (subjects["train"] | subjects["val"])
    assert len(subjects["val"]) == 50
    assert 15 < len(subjects["selection"]) < 50
    assert [stats[split]["records"] for split in found] == [len(held) for held in found.values()]


def test_a_limit_takes_the_same_records_of_what_is_left_whatever_their_order(tmp_path: Path) -> None:
    train, limit = [*"abcdefgh", "!", "x"], LimitParams(train=3)
    stats = prepare(tmp_path / "one", " ".join(train), "x y", skip_invalid=True, limit=limit)["splits"]
    prepare(tmp_path / "two", " ".join(train[::-1]), "x y", skip_invalid=True, limit=limit)
    kept = words(tmp_path / "one", "train")
    assert kept == sorted(kept) == words(tmp_path / "two", "train")[::-1]
    assert set(kept) < set("abcdefgh")
    assert (stats["train"]["records"], stats["val"]["records"]) == (3, 2)


def test_every_split_has_a_limit(tmp_path: Path) -> None:
    train = " ".join(f"word-{number}" for number in range(200))
    limit = LimitParams(train=7, val=3, selection=5)
    stats = prepare(tmp_path / "out", train, "a b c d", selection=0.3, limit=limit)["splits"]
    assert {split: each["records"] for split, each in stats.items()} == {"train": 7, "val": 3, "selection": 5}
    assert {each.name for each in fields(LimitParams)} == set(SPLITS)


def test_samples_are_repeated_by_file_after_splits_and_limits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "stages")
    train, repeat = "a b | c d | e f", {"train_3*": 10, "train_*": 3}
    stats = prepare(tmp_path / "out", train, "v w", repeat=repeat)
    counts = Counter(words(tmp_path / "out", "train"))
    assert counts == {"a": 1, "b": 1, "c": 3, "d": 3, "e": 10, "f": 10}, "the first pattern that matches counts"
    assert stats["splits"]["train"]["records"] == counts.total() == 28
    assert stats["repeat"] == repeat
    assert "repeated_samples" not in stats["splits"]["train"], "copies that were asked for are none"
    assert "2 samples of train_3*, 10 times each" in caplog.text
    assert words(tmp_path / "out", "val") == ["v", "w"]
    many = " | ".join(" ".join(f"{letter}{number}" for number in range(20)) for letter in "ab")
    for folder, times in (("once", {}), ("twice", {"*": 2})):
        prepare(tmp_path / folder, many, repeat=times, limit=LimitParams(train=8), selection=0.2)
    assert words(tmp_path / "twice", "train") == [each for each in words(tmp_path / "once", "train") for _ in "12"]
    for split in ("val", "selection"):
        assert words(tmp_path / "twice", split) == words(tmp_path / "once", split)
    assert (
        refusal(tmp_path / "none", train, "v", repeat={"val*": 2})
        == "repeat: 'val*' matches no file of a training sample"
    )


@pytest.mark.parametrize("strict", [False, True])
def test_fields_that_are_not_read_are_counted_or_refused(
    tmp_path: Path, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "stages")
    rules: Rules[Word] = Rules(
        schema=SCHEMA, summary=lambda *_: {}, expected="", subject="word", describe=described, held_out=0.25
    )
    splits = {"train": samples("train.txt", "ab"), "val": samples("val.txt", "c")}
    fields = Counter({"source": 2, "score": 1})
    dataset = RawDataset(rules=rules, source="folder:in", splits=splits, unread_fields=fields, strict=strict)
    if strict:
        with pytest.raises(UserError, match=r"not read: score \(1\), source \(2\).* strict: false"):
            write_prepared(dataset, tmp_path / "out", DataParams())
    else:
        stats = write_prepared(dataset, tmp_path / "out", DataParams())
        assert stats["unread_fields"] == {"score": 1, "source": 2}
        assert "not read, and how often they are there: score (1), source (2)" in caplog.text
