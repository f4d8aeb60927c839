import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.core.errors import UserError
from stages.tasks.chat.samples import read_split
from stages.tasks.chat.samples.records import Message, Record
from stages.tasks.chat.sources import Reader
from tests.tasks import prepare
from tests.tasks.chat.talks import said, talk, write_lines


def prepared(folder: Path, out_dir: Path, *, selection: float = 0.0, **reader: Any) -> dict[str, list[Record]]:
    prepare("chat", f"folder:{folder}", out_dir=out_dir, selection=selection, reader=Reader(**reader))
    return {split: read_split(out_dir, split) for split in ("train", "val")}


def refusal(folder: Path, **reader: Any) -> str:
    with pytest.raises(UserError) as error:
        prepare("chat", f"folder:{folder}", out_dir=folder / "out", reader=Reader(**reader))
    assert not (folder / "out").exists()
    return error.value.message


BRIEF = said("Who?", "You.", "Be brief.")
FORMS: list[dict[str, Any]] = [
    {"messages": BRIEF},
    {"messages": [{**each, "content": [{"type": "text", "text": each["content"][:2]},
                                       {"type": "text", "text": each["content"][2:]}]} for each in BRIEF]},
    {"prompt": BRIEF[:2], "completion": BRIEF[2:]},
    {"messages": None, "prompt": BRIEF[:2], "completion": "You.", "images": [], "tools": None},
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("as_parquet", [False, True])
def test_every_form_of_a_conversation_is_read_alike(tmp_path: Path, form: dict[str, Any], as_parquet: bool) -> None:
    if as_parquet:
        pq.write_table(pa.Table.from_pylist([form, form]), tmp_path / "train-0.parquet")
        pq.write_table(pa.Table.from_pylist([talk(1)]), tmp_path / "validation-0.parquet")
    else:
        write_lines(tmp_path / "train.jsonl", "", form, form)
        write_lines(tmp_path / "val.jsonl", talk(1))
    splits = prepared(tmp_path, tmp_path / "out")
    expected = (Message("system", "Be brief."), Message("user", "Who?"), Message("assistant", "You."))
    assert [each.messages for each in splits["train"]] == [expected] * 2
    assert [each.id for each in splits["train"]] == (
        ["train-0.parquet:0", "train-0.parquet:1"] if as_parquet else ["train.jsonl:2", "train.jsonl:3"]
    )


def test_a_prompt_and_a_completion_of_text_are_a_question_and_its_answer(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", {"prompt": "Who?", "completion": "You."}, talk(2))
    write_lines(tmp_path / "test.jsonl", talk(1))
    first = prepared(tmp_path, tmp_path / "out")["train"][0]
    assert first.messages == (Message("user", "Who?"), Message("assistant", "You."))


USER, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "You."}
WRONG: list[tuple[Any, str]] = [
    ("{", "not JSON"),
    ([1], "a JSON object is expected, found [1]"),
    ({"text": "Hi."}, "neither messages nor prompt and completion; found text"),
    ({"prompt": "Hi."}, "neither messages nor prompt and completion"),
    ({"messages": "Hi."}, "messages is 'Hi.', expected a list of messages"),
    ({"messages": [USER, "You."]}, "messages, message 2 is 'You.', expected a role and a content"),
    ({"messages": [USER, {"role": "gpt", "content": "x"}]}, "message 2 has the role 'gpt', expected one of system"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "message 2 has the content None, expected text"),
    ({"messages": [USER, {"role": "assistant", "content": " "}]}, "message 2 is empty"),
    ({"messages": [USER]}, "no answer: the last message is not the assistant's"),
    ({"messages": [ANSWER]}, "message 1 has the role 'assistant', expected user"),
    ({"messages": [USER, USER, ANSWER]}, "message 2 has the role 'user', expected assistant"),
    ({"messages": [USER, {"role": "system", "content": "x"}, ANSWER]}, "message 2 has the role 'system', expected"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]},
        "1 part of the type image, but 0 pictures",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}, ANSWER]}, "message 1 has the content [{'type'"),
    ({"messages": [USER, ANSWER], "images": ["a.png"]}, "picture 1 is 'a.png', which is no file of the dataset's"),
    ({"messages": [USER, ANSWER], "tools": [{"name": "f"}]}, "tools is set, but this task does not read tools"),
    ({"messages": [USER, {**ANSWER, "tool_calls": [1]}]}, "message 2 calls tools"),
    ({"messages": [{"role": "user", "content": "<|im_end|>"}, ANSWER]}, "holds chat markup, <|im_end|>"),
    ({"messages": [{"role": "user", "content": "<|eot_id|>"}, ANSWER]}, "holds chat markup, <|eot_id|>"),
    ({"messages": [{"role": "user", "content": "\\ud800"}, ANSWER]}, "half of a surrogate pair"),
    ({"messages": [USER, ANSWER], "who": None}, "who is None, expected the text or number of a group"),
    ({"messages": [USER, ANSWER], "who": ["a"]}, "who is ['a'], expected the text or number of a group"),
    ({"messages": [USER, ANSWER], "who": "b"}, "the answer is no JSON, by which the dataset's metrics score: 'You.'"),
]


def test_every_malformed_line_is_named_at_once_or_left_out(tmp_path: Path) -> None:
    good = [{"messages": said(f"{number}?", f"{number}"), "who": number} for number in range(20)]
    lines = [json.dumps(line).replace("\\\\ud800", "\\ud800") for line, _ in WRONG[1:]]
    write_lines(tmp_path / "train.jsonl", *good, WRONG[0][0], *lines)
    stats = prepare(
        "chat",
        f"folder:{tmp_path}",
        out_dir=tmp_path / "out",
        reader=Reader(group="who", metrics=("json",)),
        skip_invalid=True,
    )["splits"]["train"]
    assert stats["invalid_rows"] == len(WRONG)
    said_of = {fault["line"]: "" for fault in stats["invalid"]}
    for fault in stats["invalid"]:
        said_of[fault["line"]] += f"{fault['problem']}\n"
    for number, (line, problem) in enumerate(WRONG, start=21):
        assert problem in said_of[number], line
    (tmp_path / "out").rename(tmp_path / "before")
    message = refusal(tmp_path, group="who", metrics=("json",))
    assert f"has {len(WRONG)} invalid samples" in message
    assert "train.jsonl line 21: not JSON" in message


def test_what_asks_the_same_is_in_one_split_whatever_its_group(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", talk(1, who="a"), talk(2, who="b"), talk(3, who="c"))
    write_lines(tmp_path / "val.jsonl", talk(9, who="z"), {"messages": said("what  is 2?", "No."), "who": "y"})
    message = refusal(tmp_path, group="who")
    assert "1 training sample whose question or who is in the validation split too" in message
    assert "train.jsonl line 2 and val.jsonl line 2: 'What is 2?'" in message
    assert "1 training sample whose question is" in refusal(tmp_path)


def test_a_long_question_in_two_splits_is_named_in_short(tmp_path: Path) -> None:
    for name in ("train.jsonl", "val.jsonl"):
        write_lines(tmp_path / name, {"prompt": "Why?\n" * 1000, "completion": name})
    assert all(len(line) < 200 for line in refusal(tmp_path).splitlines())


def test_a_group_is_held_out_whole_with_all_that_asks_the_same(tmp_path: Path) -> None:
    # Each question is asked by two neighbours, so that all of twenty, and all of twenty more, belong together.
    lines = [
        talk(number // 2 + 100 * part, who=f"{part} {(number + 1) // 2}") for part in (1, 2) for number in range(40)
    ]
    write_lines(tmp_path / "train.jsonl", *lines)
    splits = prepared(tmp_path, tmp_path / "out", group="who")
    assert sorted(map(len, splits.values())) == [40, 40]
    write_lines(tmp_path / "in" / "train.jsonl", *lines[:40])
    assert "has only 1 question or who to train on, and no validation files" in refusal(tmp_path / "in", group="who")


def test_metrics_are_with_what_is_validated_alone(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", *map(talk, range(40)))
    splits = prepared(tmp_path, tmp_path / "out", metrics=("chrf",), selection=0.3)
    assert {each.metrics for each in splits["train"]} == {()}
    assert {each.metrics for each in (*splits["val"], *read_split(tmp_path / "out", "selection"))} == {("chrf",)}


def test_folders_of_both_kinds_or_of_neither_are_refused(tmp_path: Path) -> None:
    assert "has no training files: it is empty. Expected: train*.jsonl or train*.parquet" in refusal(tmp_path)
    write_lines(tmp_path / "val.jsonl", talk(1))
    assert "has no training files: it holds 1 .jsonl file (val.jsonl)" in refusal(tmp_path)
    pq.write_table(pa.Table.from_pylist([talk(1)]), tmp_path / "train.parquet")
    assert "holds JSON Lines and parquet" in refusal(tmp_path)


def test_the_hub_is_read_at_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for name, number in (("train-00000-of-00001", 1), ("test-00000-of-00001", 2)):
        pq.write_table(pa.Table.from_pylist([talk(number)]), tmp_path / "hub" / "data" / f"{name}.parquet")
    monkeypatch.setattr("stages.kit.data.sources.fetch_snapshot", lambda *_, **__: (tmp_path / "hub", "f" * 40))
    stats = prepare("chat", "hub:someone/talks@main", out_dir=tmp_path / "out")
    assert (stats["source"], stats["revision"]) == (f"hub:someone/talks@{'f' * 40}", "f" * 40)
    assert stats["validation"] == "test-00000-of-00001.parquet"
    assert read_split(tmp_path / "out", "val")[0].id == "data/test-00000-of-00001.parquet:0"
