"""Every key of a row, a message and a part is read, refused or listed, in the documented forms of known trainers."""

import json
import unicodedata
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.core.errors import UserError
from stages.data.texts import composed
from stages.tasks.chat.samples import read_split
from stages.tasks.chat.sources import Reader
from stages.tasks.chat.sources.forms import LEARNT, REFUSED, THINKING, WAY_OUT
from tests.data.images import png
from tests.tasks import prepare, refusal, write_lines
from tests.tasks.chat.conversations import line, messages

USER, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "You."}
WHO = [("user", "Who?"), ("assistant", "You.")]
Rows = list[dict[str, Any]]


def as_lines(path: Path, rows: Rows) -> None:
    write_lines(path.with_suffix(".jsonl"), *rows)


def as_array(path: Path, rows: Rows) -> None:
    path.with_suffix(".json").write_text(json.dumps(rows, ensure_ascii=False, indent=2))


def as_table(path: Path, rows: Rows) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema=_unified(rows)), path.with_suffix(".parquet"))


def _unified(rows: Rows) -> pa.Schema:
    """All columns of rows: from_pylist takes those of the first."""
    return pa.unify_schemas([pa.Table.from_pylist([row]).schema for row in rows], promote_options="permissive")


WRITERS: dict[str, Callable[[Path, Rows], None]] = {"line": as_lines, "entry": as_array, "row": as_table}


def prepared(folder: Path, unit: str, rows: Rows, **reader: Any) -> tuple[dict[str, Any], dict[int, str]]:
    """The training split of stats.json, and the problems of each row by its place, counted from 0."""
    folder.mkdir(exist_ok=True)
    WRITERS[unit](folder / "train", rows)
    settings = Reader(**reader)
    WRITERS[unit](folder / "val", [line(1000, **({settings.group: "z"} if settings.group else {}))])
    stats = prepare("chat", f"folder:{folder}", out_dir=folder / "out", reader=settings, skip_invalid=True)
    problems: dict[int, str] = {}
    for each in stats["splits"]["train"]["invalid"]:
        number = each[unit] - (unit != "row")
        problems[number] = problems.get(number, "") + each["problem"] + "\n"
    return stats, problems


VALUES: dict[str, Any] = {"label": False, "kto_tag": True, "weight": 0, "enable_thinking": False}


@pytest.mark.parametrize("unit", WRITERS)
def test_a_key_that_changes_what_is_learnt_is_refused_by_name_and_empty_it_is_not_there(
    tmp_path: Path, unit: str
) -> None:
    keys = sorted(REFUSED)
    rows = [{**line(number), key: VALUES.get(key, "x")} for number, key in enumerate(keys)]
    empty: Rows = [{**line(100), **dict.fromkeys(keys)}] + (
        [] if unit == "row" else [dict.fromkeys(keys, "") | line(101)]
    )
    _, problems = prepared(tmp_path, unit, [*rows, *empty])
    assert list(problems) == list(range(len(keys)))
    for number, key in enumerate(keys):
        assert problems[number] == f"{key} is set, which this task does not read: {REFUSED[key]}; {WAY_OUT}\n"


@pytest.mark.parametrize("unit", WRITERS)
def test_every_other_key_of_a_message_and_of_a_part_is_refused(tmp_path: Path, unit: str) -> None:
    keys = [*sorted(REFUSED.keys() - {*LEARNT, *THINKING}), "name", "prefix", "emotion"]
    rows: Rows = [{"messages": [USER, {**ANSWER, key: "x"}]} for key in keys]
    part: dict[str, Any] = {"type": "text", "text": "Who?"}
    parts = [
        {**part, "cache_control": "x"},
        {"type": "image", "text": "a.png"},
        {"type": "file", "file": "x"},
    ]
    answer = {**ANSWER, "content": [part]}
    rows += [{"messages": [{"role": "user", "content": [each]}, answer]} for each in parts]
    _, problems = prepared(tmp_path, "line" if unit == "row" else unit, [*rows, line(1)])
    for number, key in enumerate(keys):
        assert problems[number].startswith(f"messages, message 2: {key} is set, which this task does not read"), key
    for number, problem in enumerate(("cache_control is set", "text is set", "has the part"), start=len(keys)):
        assert problem in problems[number]


def turn(role: str, value: str, **more: Any) -> dict[str, Any]:
    return {"from": role, "value": value, **more}


THOUGHT = "<think>\nA name?\n</think>\n\nYou."

FORMS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "DeepSeek's thinking": (
        {"messages": [USER, {**ANSWER, "reasoning_content": "A name?\n"}]},
        [WHO[0], ("assistant", THOUGHT)],
    ),
    "thinking by two names": (
        {"messages": [USER, {**ANSWER, "reasoning": "A name?", "thinking": "A name?"}]},
        [WHO[0], ("assistant", THOUGHT)],
    ),
    "an empty system prompt": (
        {"messages": [{"role": "system", "content": ""}, USER, ANSWER]},
        [("system", ""), *WHO],
    ),
    "ShareGPT": ({"conversations": [turn("human", "Who?"), turn("gpt", "You.")], "system": "", "tools": ""}, WHO),
    "ShareGPT with a system prompt": (
        {"conversations": [turn("human", "Who?"), turn("gpt", "You.")], "system": "Be brief."},
        [("system", "Be brief."), *WHO],
    ),
    "ShareGPT with the system's turn": (
        {"id": "7", "conversations": [turn("system", "Be brief."), turn("human", "Who?"), turn("gpt", "You.")]},
        [("system", "Be brief."), *WHO],
    ),
    "LLaMA-Factory's empty list of tools": ({"messages": [USER, ANSWER], "tools": "[]"}, WHO),
    "OpenAI's in a list of ShareGPT's name": ({"conversations": [USER, ANSWER]}, WHO),
    "LMSYS": ({"conversation": [USER, ANSWER], "model": "x", "turn": 1}, WHO),
    "Alpaca": ({"instruction": "Who?", "input": "", "output": "You."}, WHO),
    "Alpaca without an input": ({"instruction": "Who?", "input": None, "output": "You."}, WHO),
    "LLaMA-Factory's Alpaca": (
        {
            "instruction": "Translate.",
            "input": "Moi?",
            "output": "Me?",
            "system": "Be brief.",
            "history": [["Who?", "You."]],
        },
        [("system", "Be brief."), *WHO, ("user", "Translate.\nMoi?"), ("assistant", "Me?")],
    ),
    "Dolly": (
        {"instruction": "Who?", "context": "There is nobody else.", "response": "You.", "category": "open_qa"},
        [("user", "Who?\nThere is nobody else."), ("assistant", "You.")],
    ),
    "Dolly without a context": ({"instruction": "Who?", "context": "", "response": "You."}, WHO),
    "ms-swift": (
        {"query": "And?", "response": "Me.", "system": "Be brief.", "history": [["Who?", "You."]]},
        [("system", "Be brief."), *WHO, ("user", "And?"), ("assistant", "Me.")],
    ),
    "UltraChat": ({"prompt": "Who?", "prompt_id": "1", "messages": [USER, ANSWER]}, WHO),
    "Magpie": (
        {"instruction": "Who?", "response": "You.", "conversations": [turn("human", "Who?"), turn("gpt", "You.")]},
        WHO,
    ),
    "fields of the training split": (
        {
            "messages": [USER, ANSWER],
            "split": "train",
            "subset": "main",
            "fold": 1,
            "is_test": False,
            "deleted": 0,
            "title": "A .png file",
        },
        WHO,
    ),
    "TRL with a system prompt": (
        {"prompt": [USER], "completion": "You.", "system": "Be brief."},
        [("system", "Be brief."), *WHO],
    ),
}


@pytest.mark.parametrize("unit", WRITERS)
@pytest.mark.parametrize("form", FORMS)
def test_documented_forms_are_read_alike(tmp_path: Path, form: str, unit: str) -> None:
    row, expected = FORMS[form]
    _, problems = prepared(tmp_path, unit, [row])
    assert problems == {}
    (record,) = read_split(tmp_path / "out", "train")
    assert [tuple(message) for message in record.messages] == expected


TALK = {"messages": [USER, ANSWER]}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "LLaMA-Factory's videos": (
        {"messages": [turn("human", "<video>Who?"), turn("gpt", "You.")], "videos": ["a.mp4"]},
        "videos is set",
    ),
    "LLaMA-Factory's recordings": (
        {"messages": [{**USER, "content": "<audio>Who?"}, ANSWER], "audios": ["a.wav"]},
        "audios is set",
    ),
    "LLaMA-Factory's KTO": ({**TALK, "label": True}, "label is set"),
    "LLaMA-Factory's preferences": (
        {"conversations": [turn("human", "Who?")], "chosen": turn("gpt", "You."), "rejected": turn("gpt", "Me.")},
        "chosen, rejected are set",
    ),
    "LLaMA-Factory's calls of tools": (
        {
            "conversations": [
                turn("human", "Who?"),
                turn("function_call", "{}"),
                turn("observation", "{}"),
                turn("gpt", "You."),
            ],
            "tools": "[{}]",
        },
        "tools is set",
    ),
    "OpenAI's calls of tools": (
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"id": "x"}]},
                {"role": "tool", "content": "x", "tool_call_id": "x"},
                ANSWER,
            ]
        },
        "message 2: tool_calls is set",
    ),
    "TRL's unpaired preferences": ({"prompt": "Who?", "completion": "Me.", "label": False}, "label is set"),
    "TRL's preferences": ({"prompt": "Who?", "chosen": "You.", "rejected": "Me."}, "chosen, rejected are set"),
    "OpenAI's preferences": (
        {"input": TALK, "preferred_output": [ANSWER], "non_preferred_output": [ANSWER]},
        "preferred_output, non_preferred_output are set",
    ),
    "ms-swift's preferences": ({**TALK, "rejected_response": "Me."}, "rejected_response is set"),
    "ms-swift's boxes": ({**TALK, "objects": {"bbox": [[1, 2, 3, 4]]}}, "objects is set"),
    "a second conversation": (
        {**TALK, "prompt": "One?", "completion": "1"},
        "prompt, completion beside messages: a row has one conversation; remove it, or add it to reader.ignore",
    ),
    "messages as a text": ({"messages": json.dumps([USER])}, "\"}]', expected a list of messages"),
    "two system prompts": (
        {"messages": messages("Who?", "You.", "Be brief."), "system": "Be long."},
        "message 2 has the role 'system'",
    ),
    "Bedrock's system prompt": ({**TALK, "system": [{"text": "Be brief."}]}, "system, message 1 has the role None"),
    "text alone": ({"text": "Who?"}, "expected messages, or conversations, or "),
    "half of a turn in the history": ({"query": "Who?", "response": "You.", "history": [["One?"]]}, "history, turn 1"),
    "a history that is no list": ({"query": "Who?", "response": "You.", "history": 0}, "history, turn 1 is 0"),
    "an input that is no text": ({"instruction": "Sum.", "input": [1, 2], "output": "3"}, "input, message 1 is 1"),
    "a context in parts": ({"instruction": "Who?", "context": {"a": 1}, "response": "You."}, "context is {'a': 1}"),
    "an input beside turns": (
        {"instruction": [USER], "input": "Now.", "output": "You."},
        "message 2 has the role 'user'",
    ),
    "thinking twice": (
        {"messages": [USER, {**ANSWER, "content": "<think>\nA\n</think>\n\nYou.", "thinking": "B"}]},
        "message 2: thinking is set",
    ),
    "another case": ({**TALK, "Label": False}, "Label is set, which this task does not read: KTO's verdict"),
    "another spelling": ({**TALK, "toolCalls": [{}]}, "toolCalls is set, which this task does not read: calls of"),
    "a system prompt in another case": ({**TALK, "System": "Be brief."}, "another spelling of system, which is read"),
    "Qwen-VL": ({"query": "<img>a.png</img>Who?", "response": "You."}, "a text holds '<img>a.png</img>'; as an image"),
    "nulls": (dict.fromkeys(("messages", "prompt", "images", "label")), "no conversation: found nothing, expected"),
    "parts of another type": ({"messages": [{**USER, "content": [{"type": "input_text"}]}, ANSWER]}, "has the part"),
    **{
        f"an image as {key}": (
            {**TALK, key: value},
            f"{key} is set, which this task does not read: an image under another",
        )
        for key, value in {
            "file_name": "a b.jpg",
            "screenshot": "https://example.org/A.PNG",
            "frames": ["a.webp"],
        }.items()
    },
    **{
        f"by {key}": (
            {**TALK, key: value},
            f"{key} is {value!r} in a row of train; put such rows into a file of their own",
        )
        for key, value in {
            "split": "test",
            "subset": "validation",
            "Set": "testset",
            "is_test": True,
            "holdout": "true",
            "skip": 1,
        }.items()
    },
    "half of the turn": ({**TALK, "prompt": "Who"}, "prompt beside messages: a row has one conversation"),
    "XTuner": ({"conversation": [{"system": "x", "input": "Who?", "output": "You."}]}, "message 1: input is set"),
}


@pytest.mark.parametrize("unit", ["line", "entry"])
def test_documented_forms_that_hold_more_are_refused_in_words(tmp_path: Path, unit: str) -> None:
    _, problems = prepared(tmp_path, unit, [*(row for row, _ in WRONG.values()), line(1)])
    for number, (name, (_, expected)) in enumerate(WRONG.items()):
        assert expected in problems[number], name
        assert problems[number].count("\n") == 1 or "message" in expected, "one fault, one message"
    assert len(problems) == len(WRONG)


TWICE = [USER, ANSWER, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Me."}]


def flagged(number: int, **flags: Any) -> dict[str, Any]:
    return {"messages": [{**each, **flags} if place == number else each for place, each in enumerate(TWICE)]}


@pytest.mark.parametrize("unit", WRITERS)
@pytest.mark.parametrize("key", LEARNT)
def test_a_turn_that_is_not_to_be_learnt_is_read_so_in_every_spelling(tmp_path: Path, key: str, unit: str) -> None:
    for value in (0, 0.0, False):
        folder = tmp_path / str(value)
        prepared(
            folder, unit, [flagged(1, **{key: value}), flagged(3, **{key: bool(1)} if value is False else {key: 1})]
        )
        records = read_split(folder / "out", "train")
        assert [each.unlearnt for each in records] == [(1,), ()]
        assert records[0].messages == records[1].messages
        assert "unlearnt" not in pq.read_schema(folder / "out/val.parquet").names or read_split(folder / "out", "val")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (flagged(1, weight=0.5), "message 2 has {'weight': 0.5}, expected 1 or true"),
        (flagged(1, weight="0"), "message 2 has {'weight': '0'}"),
        (flagged(1, weight=1, train=False), "message 2 has {'weight': 1, 'train': False}"),
        (flagged(0, train=True), "message 1 has {'train': True}, but only the assistant's turns are learnt"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "no turn is to be learnt"),
        (flagged(3, weight=0), "the last turn is scored, but not to be learnt; leave it out, with its question"),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_refused(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    _, problems = prepared(tmp_path, "line", [row, line(1)])
    assert problem in problems[0]


def test_data_without_unlearnt_turns_has_no_column_for_them(tmp_path: Path) -> None:
    prepared(tmp_path, "line", [{"messages": [{**each, "weight": None} for each in TWICE]}, flagged(1, weight=1)])
    assert "unlearnt" not in pq.read_schema(tmp_path / "out/train.parquet").names


SOURCES = [{**line(1), "source": "a", "score": 0}, {**line(2), "source": "b", "tags": []}, {**line(3), "score": 2}]


@pytest.mark.parametrize("unit", WRITERS)
def test_other_columns_are_listed_with_their_counts_refused_or_ignored_on_request(tmp_path: Path, unit: str) -> None:
    stats, problems = prepared(tmp_path / "a", unit, SOURCES)
    assert (stats["unread_fields"], problems) == ({"source": 2, "score": 2}, {})
    stats, problems = prepared(tmp_path / "b", unit, SOURCES, group="source", ignore=("score",), strict=True)
    assert "unread_fields" not in stats
    assert list(problems) == [2], "the group of a row is missing"
    with pytest.raises(UserError, match=r"fields that are not read: score \(2\), source \(2\)"):
        prepared(tmp_path / "c", unit, SOURCES, strict=True)
    _, problems = prepared(tmp_path / "d", unit, [{**line(1), "label": "spam"}], ignore=("label",), strict=True)
    assert problems == {}


def test_a_table_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    twice = pa.table([["One?"], ["Two?"], ["x"]], names=["prompt", "prompt", "completion"])
    pq.write_table(twice, tmp_path / "train.parquet")
    message = refusal("chat", f"folder:{tmp_path}", tmp_path / "out")
    assert "train.parquet has the column 'prompt' twice" in message
    inner = pa.StructArray.from_arrays([["user"], ["user"], ["x"]], names=["role", "role", "content"])
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 1], inner)}), tmp_path / "train.parquet")
    message = refusal("chat", f"folder:{tmp_path}", tmp_path / "out")
    assert "train.parquet has the column 'messages.role' twice" in message


CAT, DOG = png(), png((20, 220, 20))


def shown_by(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{**USER, "content": [*parts, {"type": "text", "text": "What?"}]}, ANSWER]}


IN_PART = {"type": "image", "image": "p/cat.png"}
PLACED: dict[str, tuple[dict[str, Any], list[tuple[str, int, int]]]] = {
    "LLaMA-Factory": (
        {
            "messages": [{**USER, "content": "<image>What?"}, ANSWER, {**USER, "content": "And <image>this?"}, ANSWER],
            "images": ["p/cat.png", "p/dog.png"],
        },
        [("p/cat.png", 0, 0), ("p/dog.png", 2, 4)],
    ),
    "LLaVA": (
        {"id": "1", "image": "p/cat.png", "conversations": [turn("human", "What?\n<image>"), turn("gpt", "A cat.")]},
        [("p/cat.png", 0, 6)],
    ),
    "ms-swift": (
        {"query": "<image><image>Compare.", "response": "Two.", "images": ["p/dog.png", "p/cat.png"]},
        [("p/dog.png", 0, 0), ("p/cat.png", 0, 0)],
    ),
    "Windows": (
        {"query": "<image>", "response": "A cat.", "images": ["p\\cat.png"]},
        [("p\\cat.png", 0, 0)],
    ),
    **{
        f"in a part of {of}": (shown_by(part), [(name, 0, 0)])
        for of, name, part in (
            ("Qwen", "file:///home/someone/p/cat.png", {**IN_PART, "image": "file:///home/someone/p/cat.png"}),
            ("transformers", "p/cat.png", {"type": "image", "path": "p/cat.png"}),
            (
                "OpenAI",
                "https://example.org/p/dog.png",
                {"type": "image_url", "image_url": {"url": "https://example.org/p/dog.png"}},
            ),
        )
    },
    "at an address": (
        shown_by({"type": "image_url", "image_url": {"url": "https://example.org/1/owl.png"}}),
        [("https://example.org/1/owl.png", 0, 0)],
    ),
    "in the row itself": (
        shown_by({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(CAT).decode()}"}}),
        [("image 1", 0, 0)],
    ),
    "by TRL's index": (
        {
            "messages": [
                {**USER, "content": [{"type": "image", "index": 0}, {"type": "text", "text": "What?", "index": None}]},
                ANSWER,
                {**USER, "content": [{"type": "image", "index": 1}, {"type": "text", "text": "And?"}]},
                ANSWER,
            ],
            "images": ["p/cat.png", "p/dog.png"],
        },
        [("p/cat.png", 0, 0), ("p/dog.png", 2, 0)],
    ),
    "after a system prompt": (
        {"instruction": "<image>", "output": "A cat.", "system": "Be brief.", "images": ["p/cat.png"]},
        [("p/cat.png", 1, 0)],
    ),
}
MISPLACED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"found for another name, {name}": (
            shown_by({**IN_PART, "image": name}),
            f"only p/{name[-7:]}, which was found for",
        )
        for name in ("q/cat.png", "https://example.org/2/owl.png")
    },
    "two for one": (
        {"messages": [{**USER, "content": "<image><image>"}, ANSWER], "images": ["p/cat.png"]},
        "2 places of an image, but 1 image",
    ),
    "none": ({"messages": [{**USER, "content": "<image>What?"}, ANSWER]}, "<image> in a text, but no image"),
    **{
        f"beside {place}": (
            {"prompt": f"<image>{place}?", "completion": "A cat.", "image": "p/cat.png"},
            f"holds '{place}'",
        )
        for place in ("<video>", "<bbox>", "<IMAGE>", "<image_1>", "<image 1>", "<image_placeholder>")
    },
    "no base64": (
        {"prompt": "What?", "completion": "A cat.", "image": "data:image/png;base64,iVBO/p/cat.png"},
        "image 1: found 'data:image/png;base64,iVBO/p/cat.png', expected base64",
    ),
    "in a part and in the row": (
        {**shown_by(IN_PART), "images": ["p/cat.png"]},
        "parts of messages hold images beside the row",
    ),
    "in a part and in the text": (
        {"messages": [*shown_by(IN_PART)["messages"], {**USER, "content": "<image>"}, ANSWER]},
        "parts of messages hold images beside <image>",
    ),
    "in one part of two": (
        shown_by(IN_PART, {"type": "image"}),
        "2 places of an image, but 1 image",
    ),
    "by an index of another order": (
        {
            **shown_by({"type": "image", "index": 1}, {"type": "image", "index": 0}),
            "images": ["p/cat.png", "p/dog.png"],
        },
        "a part in which index is set",
    ),
    "with more in its part": (
        shown_by({**IN_PART, "max_pixels": 50176}),
        "a part in which max_pixels is set",
    ),
    "in detail": (
        shown_by({"type": "image_url", "image_url": {"url": "p/cat.png", "detail": "low"}}),
        "expected the path of a file",
    ),
    "of the assistant": (
        {"prompt": "What?", "completion": "<image>", "image": "p/cat.png"},
        "message 2 shows an image",
    ),
    "of the system": (
        {"messages": [{"role": "system", "content": "<image>"}, USER, ANSWER], "images": ["p/cat.png"]},
        "message 1 shows an image",
    ),
}


@pytest.mark.parametrize("unit", ["line", "entry"])
def test_placeholders_are_the_places_of_images_and_their_number_is_checked(tmp_path: Path, unit: str) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p/cat.png").write_bytes(CAT)
    (tmp_path / "p/dog.png").write_bytes(DOG)
    (tmp_path / "p/owl.png").write_bytes(DOG)
    rows = [row for row, _ in (*PLACED.values(), *MISPLACED.values())]
    _, problems = prepared(tmp_path, unit, rows)
    for record, (name, (_, expected)) in zip(read_split(tmp_path / "out", "train"), PLACED.items(), strict=True):
        assert [(each.image_id, each.message, each.offset) for each in record.images] == expected, name
        assert not any("<image>" in message.content for message in record.messages)
    for (name, (_, problem)), found in zip(MISPLACED.items(), problems.values(), strict=True):
        assert problem in found, name


def test_names_of_groups_are_compared_in_composed_form(tmp_path: Path) -> None:
    names = [unicodedata.normalize(form, "José") for form in ("NFC", "NFD")]
    prepared(tmp_path, "line", [line(number, client=name) for number, name in enumerate(names)], group="client")
    first, second = read_split(tmp_path / "out", "train")
    assert first.group == second.group


def test_a_placeholder_is_text_in_a_dataset_without_images(tmp_path: Path) -> None:
    _, problems = prepared(tmp_path, "line", [{"prompt": "What is <image> in RSS?", "completion": "An image's tag."}])
    assert problems == {}
    assert read_split(tmp_path / "out", "train")[0].question == "What is <image> in RSS?"


@pytest.mark.parametrize("root", ["/home/someone/", "../elsewhere/", "C:\\data\\"])
def test_an_image_is_found_whatever_root_its_row_names(tmp_path: Path, root: str) -> None:
    for name, image in {"p/cat.png": CAT, "p/same.png": CAT, "q/same.png": DOG}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(image)
    names = (f"{root}cat.png", f"{root}q/same.png", f"{root}same.png")
    _, problems = prepared(tmp_path, "line", [{**line(number), "image": name} for number, name in enumerate(names)])
    assert [each.images[0].image for each in read_split(tmp_path / "out", "train")] == [CAT, DOG]
    assert "2 images have this name: p/same.png, q/same.png" in problems[2]


@pytest.mark.parametrize("on_disk", ["a\u0309nh", "\u1ea3nh"])
@pytest.mark.parametrize("in_row", ["a\u0309nh", "\u1ea3nh"])
def test_names_of_images_are_compared_as_they_are_read(tmp_path: Path, on_disk: str, in_row: str) -> None:
    (tmp_path / on_disk).mkdir()
    (tmp_path / on_disk / f"{on_disk}.png").write_bytes(CAT)
    rows = [{**line(1), "image": f"{in_row}/{in_row}.png"}, {**line(2), "image": f"{in_row}/{in_row}.PNG"}]
    _, problems = prepared(tmp_path, "line", rows)
    assert read_split(tmp_path / "out", "train")[0].images[0].image == CAT
    assert f"there is none, only {composed(on_disk)}/{composed(on_disk)}.png" in problems[1]
