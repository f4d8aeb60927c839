import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from PIL import Image

from stages.tasks.chat.samples import Message, Record, order_problems, read_split
from stages.tasks.chat.sources import Reader
from stages.tasks.chat.sources.forms import parse_conversation
from tests.damage import VALUES, damaged_tree, quick
from tests.data.images import bomb, png
from tests.tasks import prepare, refusal, write_lines
from tests.tasks.chat.conversations import line, messages

BLUE, GREEN = png(), png((20, 220, 20))
IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "or"}
USER, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "You."}


def asked(*parts: dict[str, Any], answer: str = "Both.") -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": [{**TEXT, "text": answer}]}]


def write_table(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def as_lines(folder: Path, *rows: dict[str, Any], name: str = "train") -> None:
    """JSON Lines, and their images in a folder beside them."""
    (folder / "p").mkdir(parents=True, exist_ok=True)
    lines = []
    for number, row in enumerate(rows):
        paths = [f"p/{name}{number}-{place}.png" for place, _ in enumerate(row.get("images", ()))]
        for path, encoded in zip(paths, row.get("images", ()), strict=True):
            (folder / path).write_bytes(encoded)
        lines.append({**row, "images": paths} if paths else row)
    write_lines(folder / f"{name}.jsonl", *lines)


def as_table(folder: Path, *rows: dict[str, Any], name: str = "train") -> None:
    converted = [
        {**row, "images": [{"bytes": each, "path": None} for each in row["images"]]} if "images" in row else row
        for row in rows
    ]
    write_table(folder / f"{name}.parquet", *converted)


def prepared(folder: Path, *, selection: float = 0.0, **reader: Any) -> dict[str, list[Record]]:
    prepare("chat", f"folder:{folder}", out_dir=folder / "out", selection=selection, reader=Reader(**reader))
    return {split: read_split(folder / "out", split) for split in ("train", "val")}


def refused(folder: Path, **reader: Any) -> str:
    return refusal("chat", f"folder:{folder}", folder / "refused", reader=Reader(**reader))


BRIEF = messages("Who?", "You.", "Be brief.")
IN_PARTS = [
    {**each, "content": [{"type": "text", "text": part} for part in (each["content"][:2], each["content"][2:])]}
    for each in BRIEF
]


@pytest.mark.parametrize(
    "form",
    [
        {"messages": BRIEF},
        {"messages": IN_PARTS},
        {"prompt": BRIEF[:2], "completion": BRIEF[2:]},
        {"messages": None, "prompt": BRIEF[:2], "completion": "You.", "images": [], "tools": None},
    ],
)
@pytest.mark.parametrize("as_parquet", [False, True])
def test_every_form_of_a_conversation_is_read_alike(tmp_path: Path, form: dict[str, Any], as_parquet: bool) -> None:
    if as_parquet:
        write_table(tmp_path / "train-0.parquet", form, form)
        write_table(tmp_path / "validation-0.parquet", line(1))
    else:
        write_lines(tmp_path / "train.jsonl", "", form, form)
        write_lines(tmp_path / "val.jsonl", line(1))
    train = prepared(tmp_path)["train"]
    expected = (Message("system", "Be brief."), Message("user", "Who?"), Message("assistant", "You."))
    assert [each.messages for each in train] == [expected] * 2
    ids = ["train-0.parquet:0", "train-0.parquet:1"] if as_parquet else ["train.jsonl:2", "train.jsonl:3"]
    assert [each.id for each in train] == ids
    assert "images" not in pq.read_schema(tmp_path / "out/train.parquet").names


def positions(record: Record) -> list[tuple[int, int, bytes]]:
    return [(each.message, each.offset, each.image) for each in record.images]


@pytest.mark.parametrize("write", [as_lines, as_table])
def test_images_are_read_with_their_positions(tmp_path: Path, write: Any) -> None:
    between = {"messages": asked(TEXT, IMAGE, TEXT, IMAGE), "images": [BLUE, GREEN]}
    alone = {"messages": asked(IMAGE, answer="Blue."), "images": [BLUE]}
    system = {"role": "system", "content": [{**TEXT, "text": "Be brief."}]}
    unplaced = {"messages": [system, *asked(TEXT), *asked(TEXT)], "images": [BLUE, GREEN]}
    write(tmp_path, between, alone, unplaced)
    write(tmp_path, {"messages": asked(TEXT)}, name="val")
    splits = prepared(tmp_path)
    assert [each.messages[0].content for each in splits["train"]] == ["oror", "", "Be brief."]
    assert [positions(each) for each in splits["train"]] == [
        [(0, 2, BLUE), (0, 4, GREEN)],
        [(0, 0, BLUE)],
        [(1, 0, BLUE), (1, 0, GREEN)],  # before the first of the user's texts
    ]
    assert splits["val"][0].images == ()


def test_a_single_image_may_be_in_a_column_of_its_own(tmp_path: Path) -> None:
    row = {"prompt": "Who?", "completion": "You."}
    write_table(tmp_path / "table/train.parquet", {**row, "image": {"bytes": BLUE, "path": "a.png"}})
    write_table(tmp_path / "table/val.parquet", line(1))
    write_lines(tmp_path / "lines/train.jsonl", {**row, "image": "a.png"})
    write_lines(tmp_path / "lines/val.jsonl", line(1))
    (tmp_path / "lines/a.png").write_bytes(BLUE)
    found = [prepared(tmp_path / name)["train"][0].images for name in ("table", "lines")]
    assert found[0] == found[1]
    assert [(each.image_id, each.image) for each in found[0]] == [("a.png", BLUE)]


def test_the_pixels_of_images_belong_to_the_question(tmp_path: Path) -> None:
    as_lines(tmp_path, {"messages": asked(IMAGE, TEXT), "images": [BLUE]})
    as_lines(tmp_path, {"messages": asked(IMAGE, TEXT), "images": [GREEN]}, line(1), name="val")
    prepared(tmp_path)
    Image.open(tmp_path / "p/train0-0.png").save(tmp_path / "blue.webp", lossless=True)  # the same pixels
    blue = (tmp_path / "blue.webp").read_bytes()
    as_lines(tmp_path, line(1), {"messages": asked(IMAGE, TEXT), "images": [blue]}, name="val")
    assert "train.jsonl line 1 and val.jsonl line 2: 'or'" in refused(tmp_path)


def test_the_same_image_with_another_question_may_be_in_two_splits(tmp_path: Path) -> None:
    for name, question in (("train", {**TEXT, "text": "Which colour?"}), ("val", {**TEXT, "text": "What shape?"})):
        as_lines(tmp_path, {"messages": asked(IMAGE, question), "images": [BLUE]}, name=name)
    assert [len(records) for records in prepared(tmp_path).values()] == [1, 1]


def with_image(*images: Any) -> dict[str, Any]:
    return {"messages": asked(TEXT), "images": list(images)}


WRONG: list[tuple[Any, list[str]]] = [
    ("{", ["not JSON"]),
    ([1], ["a JSON object is expected, found [1]"]),
    ({"text": "Hi."}, ["found text"]),
    ({"messages": "Hi."}, ["messages is 'Hi.'"]),
    ({"messages": [USER, {"role": "bot", "content": "x"}]}, ["message 2 has the role 'bot'"]),
    ({"messages": [USER, {"role": "assistant", "content": " "}]}, ["message 2 is empty"]),
    ({"messages": [USER]}, ["no answer"]),
    ({"messages": [USER, USER, ANSWER]}, ["message 2 has the role 'user', expected assistant"]),
    (
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}, ANSWER]},
        ["message 1 has the part {'type': 'audio'}"],
    ),
    ({"messages": [USER, ANSWER], "tools": [{"name": "f"}]}, ["tools is set"]),
    ({"messages": [USER, {**ANSWER, "tool_calls": [1]}]}, ["message 2: tool_calls is set"]),
    ({"messages": [{"role": "user", "content": "<|eot_id|>"}, ANSWER]}, ["<|eot_id|>"]),
    ({"messages": [{"role": "user", "content": "\\ud800"}, ANSWER]}, ["surrogate"]),
    ({"messages": [USER, ANSWER], "who": None}, ["no value of 'who', the dataset's reader.group"]),
    ({"messages": [USER, ANSWER], "who": ""}, ["no value of 'who', the dataset's reader.group"]),
    ({"messages": [USER, ANSWER], "who": [1]}, ["who is [1], expected the text or number of a group"]),
    ({"messages": [USER, ANSWER]}, ["the answer is no JSON", "'You.'"]),
    ({"prompt": "Who?", "completion": '{"a": 1, "a": 2}'}, ["the answer is no JSON, or has a key twice"]),
    ({"messages": asked(IMAGE)}, ["1 place of an image, but 0 images"]),
    ({**with_image("a.png"), "image": "a.png"}, ["image and images are both set"]),
    ({**with_image("a.png"), "messages": [USER, {**ANSWER, "content": [IMAGE]}]}, ["message 2 shows an image"]),
    (with_image("../outside.png"), ["image 1: '../outside.png': there is none"]),
    (with_image("link.png"), ["image 1: ", "link.png leads out of"]),
    (with_image("pipe.png"), ["image 1: ", "pipe.png is no plain file"]),
    (with_image("\0", "", 7), ["image 1: '\\x00': there is none", "image 2: found ''", "image 3: found 7"]),
    (with_image({"bytes": "x"}), ["image 1: found {'bytes': 'x'}, expected the path of a file"]),
    (with_image("a.png", "bad.png"), ["image 2: unreadable image"]),
    (with_image("bomb.png"), ["image 1: unreadable image: 10000 x 10000 pixels, more than max_image_pixels"]),
    (with_image("long.png"), ["image 1: unreadable image: 900 x 2 pixels: one side is more"]),
]


def test_every_problem_is_named_at_once_or_its_line_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "p").mkdir(parents=True)
    for path in (tmp_path / "outside.png", folder / "a.png"):
        path.write_bytes(BLUE)
    (folder / "bad.png").write_text("<html>")
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "bomb.png").write_bytes(bomb(10_000))
    (folder / "long.png").write_bytes(png(size=(900, 2)))
    good = [{"messages": messages(f"{number}?", f"{number}"), "who": number} for number in range(20)]
    wrong = [json.dumps({"who": "b", **each} if isinstance(each, dict) else each) for each, _ in WRONG[1:]]
    write_lines(folder / "train.jsonl", *good, "{", *(each.replace("\\\\ud800", "\\ud800") for each in wrong))
    reader = Reader(group="who", metrics=("json",))
    stats = prepare("chat", f"folder:{folder}", out_dir=tmp_path / "out", reader=reader, skip_invalid=True)
    found: dict[int, str] = {}
    for fault in stats["splits"]["train"]["invalid"]:
        found[fault["line"]] = found.get(fault["line"], "") + fault["problem"] + "\n"
    assert list(found) == [*range(21, 21 + len(WRONG))]
    for number, (each, problems) in enumerate(WRONG, start=21):
        assert all(problem in found[number] for problem in problems), (each, found[number])
    message = refused(folder, group="who", metrics=("json",))
    assert f"has {len(WRONG)} invalid samples" in message
    assert "train.jsonl line 21: not JSON" in message


def test_a_group_that_no_row_has_is_named_with_what_there_is(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", line(1, who="a"))
    assert "no value of 'whom', the dataset's reader.group; found messages, who" in refused(tmp_path, group="whom")


def test_a_table_without_an_images_bytes_is_refused_by_row(tmp_path: Path) -> None:
    images = [{"bytes": BLUE, "path": "/home/a.png"}, {"bytes": None, "path": "/home/b.png"}]
    write_table(tmp_path / "train.parquet", {**line(1), "images": images})
    write_table(tmp_path / "val.parquet", line(2))
    assert "train.parquet row 0: image 2: found {'bytes': None" in refused(tmp_path)


def test_the_same_question_is_in_one_split_whatever_its_group(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", line(1, who="a"), line(2, who="b"), line(3, who="c"))
    write_lines(tmp_path / "val.jsonl", line(9, who="z"), {"messages": messages("what  is 2?", "No."), "who": "y"})
    message = refused(tmp_path, group="who")
    assert "1 sample with the same question or who in another split" in message
    assert "train.jsonl line 2 and val.jsonl line 2: 'What is 2?'" in message
    assert "1 sample with the same question in" in refused(tmp_path)


def test_a_group_is_held_out_whole_with_all_that_ask_the_same(tmp_path: Path) -> None:
    # Each question is asked by two neighbours, so that all of twenty, and all of twenty more, belong together.
    lines = [
        line(number // 2 + 100 * part, who=f"{part} {(number + 1) // 2}") for part in (1, 2) for number in range(40)
    ]
    write_lines(tmp_path / "train.jsonl", *lines)
    assert sorted(map(len, prepared(tmp_path, group="who").values())) == [40, 40]
    write_lines(tmp_path / "in" / "train.jsonl", *lines[:40])
    assert "has only 1 question or who" in refused(tmp_path / "in", group="who")


def talk(number: int, turns: int) -> dict[str, Any]:
    return {"messages": [each for turn in range(turns) for each in messages(f"{number}, {turn}?", f"{number}.")]}


def test_a_conversation_within_another_is_in_its_split(tmp_path: Path) -> None:
    turns = [talk(number, count) for number in range(20) for count in (1, 2, 3)]
    write_lines(tmp_path / "in/train.jsonl", *turns)
    splits = prepared(tmp_path / "in")
    begun = {split: {record.messages[0].content for record in records} for split, records in splits.items()}
    assert (len(begun["val"]), begun["val"] & begun["train"]) == (2, set())
    write_lines(tmp_path / "train.jsonl", *(talk(number, 2) for number in range(3)))
    write_lines(tmp_path / "val.jsonl", talk(1, 1), {"messages": messages("2, 0?", "Another answer.")})
    assert "1 sample with the same question in another split" in (message := refused(tmp_path))
    assert "train.jsonl line 2 and val.jsonl line 1" in message


def test_only_scored_splits_name_metrics(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", *map(line, range(40)))
    splits = prepared(tmp_path, metrics=("chrf",), selection=0.3)
    assert {each.metrics for each in splits["train"]} == {()}
    assert {each.metrics for each in (*splits["val"], *read_split(tmp_path / "out", "selection"))} == {("chrf",)}


def test_folders_of_both_forms_or_of_neither_are_refused(tmp_path: Path) -> None:
    assert "has no training files: it is empty. Expected: train*.jsonl, train*.json or train*.parquet" in refused(
        tmp_path
    )
    write_lines(tmp_path / "val.jsonl", line(1))
    assert "has no training files: it holds 1 .jsonl file (val.jsonl)" in refused(tmp_path)
    write_table(tmp_path / "train.parquet", line(1))
    assert "holds JSON and parquet" in refused(tmp_path)


def test_files_beside_those_that_are_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train.jsonl", "eval.jsonl", "dev.jsonl"):
        write_lines(tmp_path / f"in/{name}", line(len(name)))
    for name in ("train.jsonl.gz", "more/notes.csv", "you.png", "README.md"):
        (tmp_path / "in/more").mkdir(exist_ok=True)
        (tmp_path / "in" / name).touch()
    stats = prepare("chat", f"folder:{tmp_path / 'in'}", out_dir=tmp_path / "out")
    assert stats["validation"] == "eval.jsonl"
    assert stats["unused_files"] == ["dev.jsonl", "more/notes.csv", "train.jsonl.gz"]
    assert "not read: dev.jsonl, more/notes.csv, train.jsonl.gz" in caplog.text


def test_the_hub_is_read_at_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("train-00000-of-00001", 1), ("test-00000-of-00001", 2)):
        write_table(tmp_path / f"hub/data/{name}.parquet", line(number))
    monkeypatch.setattr("stages.data.sources.fetch_snapshot", lambda *_, **__: (tmp_path / "hub", "f" * 40))
    stats = prepare("chat", "hub:someone/talks@main", out_dir=tmp_path / "out")
    assert stats["source"] == f"hub:someone/talks@{'f' * 40}"
    assert stats["validation"] == "data/test-00000-of-00001.parquet"
    assert read_split(tmp_path / "out", "val")[0].id == "data/test-00000-of-00001.parquet:0"


TURNS = {"messages": messages("Who?", "You.", "Be brief.") + messages("And who?", "Me.")}
SIDES = {"prompt": messages("Who are they?", "")[:1], "completion": messages("", "All.")[1:]}
SHOWN = {"messages": asked(IMAGE, TEXT, IMAGE), "images": ["a.png", "b.png"]}


@given(content=damaged_tree(TURNS) | damaged_tree(SIDES) | damaged_tree(SHOWN) | VALUES)
@quick(250)
def test_any_object_is_a_conversation_or_has_its_problems_named(content: Any) -> None:
    found = parse_conversation(content if isinstance(content, dict) else {"messages": content})
    if not found.problems:
        assert not order_problems(found.messages)
        assert all(found.messages[number].role == "user" for number, _ in found.image_positions)
        with_images = {number for number, _ in found.image_positions}
        assert all(each.content.strip() or number in with_images for number, each in enumerate(found.messages))
    else:
        assert all(0 < len(problem) < 300 and "\n" not in problem for problem in found.problems)
