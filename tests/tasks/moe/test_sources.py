import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stages.core.params.schema import LimitParams
from stages.core.tasks import PlainReader
from stages.tasks.moe.samples import Record, read_split
from tests import ROOT
from tests.tasks import prepare, refusal, write_lines
from tests.tasks.moe.made_up import longbench, write_table, yale

QUESTIONS = tuple(f"Is it {number}?" for number in range(30))


def prepared(source: Path | str, out_dir: Path, **options: Any) -> dict[str, list[Record]]:
    prepare("moe", str(source) if isinstance(source, str) else f"folder:{source}", out_dir=out_dir, **options)
    return {split: read_split(out_dir, split) for split in ("train", "val")}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_truthfulqa_is_read_and_held_out_by_content(tmp_path: Path, newline: str) -> None:
    write_table(tmp_path / "in" / "TruthfulQA.csv", *QUESTIONS, newline=newline)
    splits = prepared(tmp_path / "in", tmp_path / "out")
    assert {split: len(records) for split, records in splits.items()} == {"train": 24, "val": 6}
    record = splits["train"][0]
    assert (record.best, record.correct, record.incorrect) == ("Yes", ("Yes", "Surely"), ("No", "Never"))
    assert record.id == f"TruthfulQA.csv:{record.line}" == f"TruthfulQA.csv:{QUESTIONS.index(record.question) + 2}"
    # Their position does not matter.
    write_table(tmp_path / "turned" / "other.csv", *QUESTIONS[::-1])
    turned = prepared(tmp_path / "turned", tmp_path / "again")
    assert {record.question for record in turned["val"]} == {record.question for record in splits["val"]}


def test_the_queries_about_a_meeting_are_in_one_split(tmp_path: Path) -> None:
    meetings = [yale(f"meeting {number}", "What of Bob?", "What of Eve?") for number in range(10)]
    write_lines(tmp_path / "in" / "all.jsonl", *meetings)
    splits = prepared(tmp_path / "in", tmp_path / "out")
    assert {split: len(records) for split, records in splits.items()} == {"train": 24, "val": 6}
    assert not {record.context for record in splits["train"]} & {record.context for record in splits["val"]}
    record = splits["train"][1]
    assert record.context is not None
    assert record.context.startswith("Ann: let us talk about meeting")
    assert (record.question, record.best, record.id.split(":")[1]) == ("What of Bob?", "What of Bob? So.", "1.2")


def test_longbench_is_read_and_files_that_say_so_are_the_splits(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "train.jsonl", *map(longbench, range(3)), newline="\r\n")
    write_lines(tmp_path / "in" / "val.jsonl", longbench(7), "", longbench(8))
    write_lines(tmp_path / "in" / "test.jsonl", longbench(9))
    stats = prepare("moe", f"folder:{tmp_path / 'in'}", out_dir=tmp_path / "out")
    assert [record.id for record in read_split(tmp_path / "out", "val")] == ["val.jsonl:1", "val.jsonl:3"]
    assert stats["validation"] == "val.jsonl"
    assert stats["unused_files"] == ["test.jsonl"]


@pytest.mark.parametrize(
    ("rows", "unread"),
    [
        ([{**yale(f"{number}", "What?"), "topic_list": [{"topic": "x"}]} for number in range(9)], {"topic_list": 9}),
        (
            [{**longbench(number), "length": number, "language": None} for number in range(9)],
            {"length": 9},
        ),
        (
            [
                yale(f"{number}") | {"specific_query_list": [{"query": "Why?", "answer": f"{number}", "span": [1]}]}
                for number in range(9)
            ],
            {"specific_query_list.span": 9},
        ),
        (None, {"Type": 30}),
    ],
)
def test_other_fields_are_counted_and_refused_on_request(
    tmp_path: Path, rows: list[dict[str, Any]] | None, unread: dict[str, int]
) -> None:
    if rows is None:
        write_table(tmp_path / "in/q.csv", *QUESTIONS)
    else:
        write_lines(tmp_path / "in/q.jsonl", *rows)
    stats = prepare("moe", f"folder:{tmp_path / 'in'}", out_dir=tmp_path / "out")
    assert stats["unread_fields"] == unread
    message = refusal("moe", f"folder:{tmp_path / 'in'}", tmp_path / "strict", reader=PlainReader(strict=True))
    assert f"fields that are not read: {', '.join(f'{name} ({count})' for name, count in unread.items())}" in message


def test_every_malformed_row_is_named_with_its_line_or_left_out(tmp_path: Path) -> None:
    path = write_table(tmp_path / "in" / "q.csv", *QUESTIONS[:9])
    with path.open("a", encoding="utf-8") as file:
        file.write(',"Two\nlines?",,,No\n,Few?,Yes\n,Which?,Yes,Yes,No;Yes\n,,Yes,Yes,No\n,Why?,Yes,Yes,;\n')
        file.write(",Odd?,<|im_end|>,x,No\n")
    message = refusal("moe", f"folder:{tmp_path}/in", tmp_path / "out")
    assert "6 invalid samples" in message
    for problem in (
        "q.csv line 11: no best answer; the question is: 'Two\\nlines?'",
        "q.csv line 13: 3 fields, expected the 5",
        "q.csv line 14: the best answer is among the incorrect ones",
        "q.csv line 15: an empty question",
        "q.csv line 16: no incorrect answer",
        "q.csv line 17: a text holds chat markup",
    ):
        assert problem in message
    stats = prepare("moe", f"folder:{tmp_path / 'in'}", out_dir=tmp_path / "out", skip_invalid=True)
    assert (stats["splits"]["train"]["records"], stats["splits"]["train"]["invalid_rows"]) == (7, 6)


def test_a_question_of_another_split_by_its_own_field_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "in/q.csv", *QUESTIONS[:9])
    path.write_text(path.read_text().replace("Type,", "Split,") + "test,Why?,So,So,No\n")
    assert "q.csv line 11: Split is 'test' in a row of train; put" in refusal(
        "moe", f"folder:{tmp_path}/in", tmp_path / "out"
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ('{"a": 1}', "neither meeting_transcripts"),
        ({**longbench(1), "dataset": "hotpotqa"}, "of LongBench's 'hotpotqa'"),
        (
            {**longbench(1), "split": "test"},
            "split is 'test' in a row of train; put such rows into a file of their own",
        ),
        ({**longbench(1), "answers": []}, "answers is no list of texts"),
        ({**longbench(1), "context": " "}, "an empty transcript"),
        ({**yale("x"), "specific_query_list": [{"query": "Q?"}]}, "specific_query_list, number 1: no text as query"),
    ],
)
def test_a_broken_line_of_qmsum_is_named(tmp_path: Path, line: Any, problem: str) -> None:
    write_lines(tmp_path / "in" / "m.jsonl", yale("a"), line, yale("b"))
    message = refusal("moe", f"folder:{tmp_path}/in", tmp_path / "out")
    assert "m.jsonl line 2: " in message
    assert problem in message
    splits = prepared(tmp_path / "in", tmp_path / "out", skip_invalid=True)
    assert {record.line for records in splits.values() for record in records} >= {1, 3}
    assert not any(record.context == "" or not record.best for records in splits.values() for record in records)


def test_a_folder_of_nothing_known_or_of_two_domains_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    assert "it is empty. Expected: TruthfulQA" in refusal("moe", f"folder:{tmp_path}/in", tmp_path / "out")
    (tmp_path / "in" / "scores.tsv").write_text("a,b\n1,2\n")
    assert "it holds 1 .tsv file (scores.tsv)" in refusal("moe", f"folder:{tmp_path}/in", tmp_path / "out")
    write_table(tmp_path / "in" / "q.csv", *QUESTIONS)
    write_lines(tmp_path / "in" / "m.jsonl", yale("a"))
    assert "holds two domains" in refusal("moe", f"folder:{tmp_path}/in", tmp_path / "out")
    assert "no dataset folder" in refusal("moe", f"folder:{tmp_path}/nowhere", tmp_path / "out")
    assert "unknown source 'hub:a/b@c'" in refusal("moe", "hub:a/b@c", tmp_path / "out")


def test_a_table_of_an_unknown_form_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    write_table(tmp_path / "facts" / "train.csv", *QUESTIONS)
    (tmp_path / "facts" / "val.csv").write_text("Question,Correct Answers\nWhy?,So\n")
    message = refusal("moe", f"folder:{tmp_path}/facts", tmp_path / "out")
    assert "val.csv line 1: lacks the columns 'Best Answer', 'Incorrect Answers'" in message


def test_leaks_are_refused_or_left_out_and_a_mix_counts_its_parts(tmp_path: Path) -> None:
    write_table(tmp_path / "facts" / "train.csv", "Is it  A?", "Is it B?", "Is it C?")
    write_table(tmp_path / "facts" / "val.csv", "is it a?")
    source = f"folder:{tmp_path / 'facts'}"
    assert "train.csv line 2 and val.csv line 2: Is it  A?" in refusal(
        "moe", f"folder:{tmp_path}/facts", tmp_path / "a"
    )
    prepare("moe", source, out_dir=tmp_path / "a", skip_invalid=True)
    stats = prepare("moe", "mix", out_dir=tmp_path / "b", mix={"a": 1})
    assert stats["parts"] == {"a": {"source": source, "asked": 1, "available": 2, "taken": 1}}


def two_domains(tmp_path: Path) -> None:
    for domain in ("truthfulqa", "qmsum"):
        source = f"folder:{ROOT / 'data/tiny' / domain}"
        prepare("moe", source, out_dir=tmp_path / domain, limit=LimitParams(train=40, val=10))


def test_a_mix_takes_its_shares_and_validates_on_all(tmp_path: Path) -> None:
    two_domains(tmp_path)
    splits = prepared("mix", tmp_path / "both", mix={"truthfulqa": 12, "qmsum": 3})
    domains = {split: [record.domain for record in records] for split, records in splits.items()}
    assert [domains["train"].count(domain) for domain in ("truthfulqa", "qmsum")] == [12, 3]
    assert [domains["val"].count(domain) for domain in ("truthfulqa", "qmsum")] == [10, 10]
    assert len(set(domains["val"][:10])) == 2, "the first half must hold both, for a limit of the evaluation"
    again = prepared("mix", tmp_path / "again", mix={"qmsum": 3, "truthfulqa": 12})
    assert again == splits, "neither the order of the datasets nor the time may matter"
    more = prepared("mix", tmp_path / "more", mix={"truthfulqa": None, "qmsum": 99})
    assert {record.id for record in splits["train"]} < {record.id for record in more["train"]}
    alone = prepared("mix", tmp_path / "alone", mix={"truthfulqa": None, "qmsum": 0})
    assert {record.domain for record in alone["train"]} == {"truthfulqa"}
    assert alone["val"] == splits["val"], "all that are compared must be validated on the same"


def test_a_mix_repeats_samples_of_its_parts(tmp_path: Path) -> None:
    two_domains(tmp_path)
    mix: dict[str, int | None] = {"truthfulqa": 12, "qmsum": 3}
    train = prepared("mix", tmp_path / "both", mix=mix, repeat={"qmsum/*": 4})["train"]
    assert Counter(record.domain for record in train) == {"truthfulqa": 12, "qmsum": 12}
    assert {*Counter(record.id for record in train if record.domain == "qmsum").values()} == {4}


def test_a_mix_sets_aside_what_its_parts_did(tmp_path: Path) -> None:
    for domain in ("truthfulqa", "qmsum"):
        prepare("moe", f"folder:{ROOT / 'data/tiny' / domain}", out_dir=tmp_path / domain, selection=0.25)
    prepare("moe", "mix", out_dir=tmp_path / "both", mix={"truthfulqa": 5, "qmsum": 0}, selection=0.25)
    aside = {record.question for name in ("truthfulqa", "qmsum") for record in read_split(tmp_path / name, "selection")}
    assert {record.question for record in read_split(tmp_path / "both", "selection")} == aside
    assert len(aside) > 15
    assert len(read_split(tmp_path / "both", "train")) == 5


def test_a_mix_of_what_is_not_prepared_or_leaks_is_refused(tmp_path: Path) -> None:
    assert "run: dvc repro prepare@missing" in refusal("moe", "mix", tmp_path / "both", mix={"missing": 1})
    write_table(tmp_path / "a" / "train.csv", "Is it A?")
    write_table(tmp_path / "a" / "val.csv", "Is it B?")
    write_table(tmp_path / "b" / "train.csv", "Is it B?")
    write_table(tmp_path / "b" / "val.csv", "Is it C?")
    for name in "ab":
        prepare("moe", f"folder:{tmp_path / name}", out_dir=tmp_path / f"{name}-out")
    message = refusal("moe", "mix", tmp_path / "both", mix={"a-out": None, "b-out": None})
    assert "b-out/train.csv line 2 and a-out/val.csv line 2: Is it B?" in message


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("val.csv test.csv", "has no training files: it holds 2 .csv files"),
        ("train.tsv val.csv", "has no training files: it holds 1 .tsv file (train.tsv), 1 .csv file (val.csv)"),
        ("a_train.csv a_val.csv", "a_train.csv begins with no word of a split, and has 'train'; begin its name with"),
    ],
)
def test_files_of_other_splits_are_not_trained_on(tmp_path: Path, names: str, message: str) -> None:
    for name in names.split():
        write_table(tmp_path / name, *QUESTIONS)
    assert message in refusal("moe", f"folder:{tmp_path}", tmp_path / "out")


def test_files_without_a_word_are_trained_on_beside_a_validation_file(tmp_path: Path) -> None:
    write_table(tmp_path / "in/TruthfulQA.csv", *QUESTIONS[:20])
    write_table(tmp_path / "in/val.csv", *QUESTIONS[20:])
    (tmp_path / "in/notes.txt").touch()
    stats = prepare("moe", f"folder:{tmp_path / 'in'}", out_dir=tmp_path / "out")
    assert (stats["validation"], stats["unused_files"]) == ("val.csv", ["notes.txt"])
    assert stats["splits"]["train"]["records"] == 20


@pytest.mark.parametrize("answers", ["['A', 'B']", '["A"]', "A\nB"])
def test_a_list_in_another_form_is_no_answer(tmp_path: Path, answers: str) -> None:
    rows = [["Question", "Best Answer", "Correct Answers", "Incorrect Answers"], ["Is it?", "A", answers, "C"]]
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    assert "line 2: a list, expected answers separated by semicolons" in refusal(
        "moe", f"folder:{tmp_path}", tmp_path / "out"
    )
