"""Thousands of damaged files: each gives conversations, or a refusal in words; no other error, and no hang."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.errors import UserError
from stages.tasks.chat.samples import conversation, read_split
from stages.tasks.chat.samples.records import order_problems, picture_problems
from stages.tasks.chat.sources import Reader
from stages.tasks.chat.sources.messages import Talk, talk_of
from tests.damage import VALUES, damaged_bytes, damaged_text, damaged_tree, quick
from tests.kit.data.pictures import picture
from tests.tasks import prepare
from tests.tasks.chat.talks import said, talk, write_lines

LINES: list[dict[str, Any]] = [
    {**talk(1), "who": "a"},
    {"messages": said("Who?", "You.", "Be brief.") + said("And who?", "Me."), "who": "b"},
    {"prompt": "Who?", "completion": "Nobody.", "who": 3},
    {"prompt": said("Who are they?", "")[:1], "completion": said("", "All.")[1:], "who": "d"},
    {
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]},
            {"role": "assistant", "content": "Both."},
        ],
        "images": ["a.png", "b.png"],
        "who": "e",
    },
    {**talk(5), "image": "a.png", "who": "f"},
]
PICTURES = {"a.png": picture(), "b.png": picture((1, 2, 3))}
PIECES = [
    '"messages"',
    '"role"',
    '"images"',
    '{"type": "image"}',
    '"../a.png"',
    '"b.png"',
    "[",
    "]",
    "{",
    "}",
    ",",
    "null",
    "NaN",
    "1e999",
    "9" * 5000,
    "\\ud800",
    "<|im_end|>",
    "\n",
]


@given(line=damaged_tree(LINES[1]) | damaged_tree(LINES[3]) | damaged_tree(LINES[4]) | VALUES)
@quick(600)
def test_any_object_is_a_conversation_or_has_its_problems_named(line: Any) -> None:
    found = talk_of(line if isinstance(line, dict) else {"messages": line})
    if isinstance(found, Talk):
        assert not order_problems(found.messages)
        assert not picture_problems(found.messages, found.spots)
        pictured = {number for number, _ in found.spots}
        assert all(each.content.strip() or number in pictured for number, each in enumerate(found.messages))
    else:
        assert found
        assert all(0 < len(problem) < 300 and "\n" not in problem for problem in found)


READER = Reader(group="who", metrics=("json", "chrf"))


def judge(folder: Path, *, skip_invalid: bool) -> None:
    out = folder.parent / "out"
    try:
        stats = prepare(
            "chat",
            f"folder:{folder}",
            out_dir=out,
            reader=READER,
            skip_invalid=skip_invalid,
        )
    except UserError as error:
        assert all(len(line) < 1000 for line in error.message.splitlines())
        return
    for split, found in stats["splits"].items():
        records = read_split(out, split)
        assert len(records) == found["records"]
        for asked in (conversation(record, answered=True) for record in records):
            assert asked.answered()
            parts = [part for message in asked.messages for part in message["content"]]
            assert sum(part["type"] == "image" for part in parts) == len(asked.images)
        assert found["invalid_rows"] == 0 or skip_invalid


@given(data=st.data())
@quick(150)
def test_damaged_lines_give_conversations_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "lines" / "in"
    for name in ("train.jsonl", "val.jsonl"):
        write_lines(folder / name, *({**line, "who": f"{name}{number}"} for number, line in enumerate(LINES)))
    for name, encoded in PICTURES.items():
        (folder / name).write_bytes(encoded)
    path = folder / data.draw(st.sampled_from(["train.jsonl", "val.jsonl", "a.png"]))
    if path.suffix == ".png":
        path.write_bytes(data.draw(damaged_bytes(PICTURES["a.png"])))
    elif data.draw(st.booleans()):
        path.write_bytes(data.draw(damaged_bytes(path.read_bytes())))
    else:
        path.write_text(data.draw(damaged_text(path.read_text(), PIECES)), errors="ignore")
    judge(folder, skip_invalid=data.draw(st.booleans()))


@given(data=st.data())
@quick(100)
def test_damaged_tables_give_conversations_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "tables" / "in"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.parquet"
    rows = [{**line, "who": str(line["who"])} for line in LINES[:2]] * 4
    rows += [{**rows[0], "images": [{"bytes": encoded, "path": name} for name, encoded in PICTURES.items()]}]
    try:
        pq.write_table(pa.Table.from_pylist(data.draw(damaged_tree(rows))), path)
    except (pa.ArrowException, TypeError, ValueError, AttributeError, LookupError, OverflowError):
        return  # rows that no parquet file holds
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(damaged_bytes(path.read_bytes())))
    judge(folder, skip_invalid=data.draw(st.booleans()))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "content", ['{"messages": ' + "[" * 1_000_000, "9" * 1_000_000, "\n" * 3_000_000, "{" * 1_000_000]
)
def test_a_file_without_end_is_refused_soon(tmp_path: Path, content: str) -> None:
    write_lines(tmp_path / "train.jsonl", *map(json.dumps, LINES), content)
    write_lines(tmp_path / "val.jsonl", talk(7, who="z"))
    judge(tmp_path, skip_invalid=False)
