"""Files of text tasks that are damaged: they are refused by name, or prepared with every faulty sample counted."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.errors import UserError
from stages.core.tasks import load_task
from stages.tasks.chat.sources import Reader
from tests.damage import damaged_bytes, damaged_text, damaged_tree, quick
from tests.kit.data.images import png
from tests.tasks import prepare
from tests.tasks.amr.test_sources import BAD, block
from tests.tasks.chat.conversations import line, messages
from tests.tasks.chat.test_sources import IMAGE, TEXT, asked, write_table
from tests.tasks.moe.made_up import TABLE, longbench, yale

TALKS: list[dict[str, Any]] = [
    {**line(1), "who": "a"},
    {"messages": messages("Who?", "You.", "Be brief.") + messages("And who?", "Me."), "who": "b"},
    {"prompt": "Who?", "completion": "Nobody.", "who": 3},
    {"prompt": messages("Who are they?", "")[:1], "completion": messages("", "All.")[1:], "who": "d"},
    {"messages": asked(IMAGE, TEXT, IMAGE), "images": ["a.png", "b.png"], "who": "e"},
    {**line(5), "image": "a.png", "who": "f"},
]
IMAGES = {"a.png": png(), "b.png": png((20, 220, 20))}
MEETINGS = [yale("rain", "What of Bob?"), longbench(1), longbench(2), yale("snow")]
QUESTIONS = TABLE + "".join(f'Adversarial,"Is it {n}?",Yes,Yes; Surely;,No; Never; \n' for n in range(4))
JSON_PIECES = [
    *('"messages"', '"role"', '"images"', '{"type": "image"}', '"../a.png"', '"b.png"', "[", "]", "{", "}", ","),
    *("null", "NaN", "1e999", "9" * 5000, "\\ud800", "<|im_end|>", "\n"),
]


def lines_of(contents: Any) -> str:
    return "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in contents)


@dataclass
class Corpus:
    task: str
    files: dict[str, str | bytes]
    """Contents by name; the first file or an image is damaged."""
    pieces: list[str]
    """Texts that take the place of parts."""
    contents: Any = None
    """Objects in the lines of the first file, if it is JSON Lines."""

    def damaged(self, draw: Any) -> dict[str, bytes]:
        files = {name: found if isinstance(found, bytes) else found.encode() for name, found in self.files.items()}
        name = draw(st.sampled_from([name for name in files if name.endswith(".png")] + [next(iter(files))] * 6))
        kinds = [damaged_bytes(files[name])]
        if not name.endswith(".png"):
            text = files[name].decode()
            kinds.append(damaged_text(text, self.pieces).map(lambda text: text.encode(errors="ignore")))
            if self.contents:
                trees = damaged_tree(self.contents).filter(lambda tree: isinstance(tree, list | dict))
                kinds.append(trees.map(lambda tree: lines_of(tree).encode(errors="ignore")))
        return files | {name: draw(st.one_of(kinds))}


def parts_of(name: str) -> list[dict[str, Any]]:
    return [{**each, "who": f"{name}{number}"} for number, each in enumerate(TALKS)]


CORPORA = {
    "amr": Corpus(
        "amr",
        {"train.txt": block(1) + "# ::id x.2\n" + block(2) + block(3) + BAD + block(4)},
        ["#::snt ", "# ::id x\n", "\r", "(", ")", '"'],
    ),
    "truthfulqa": Corpus("moe", {"all.csv": QUESTIONS}, [",", '"', "\n", ";", "\r"]),
    "qmsum": Corpus("moe", {"train.jsonl": lines_of(MEETINGS)}, JSON_PIECES, MEETINGS),
    "chat": Corpus(
        "chat",
        {"train.jsonl": lines_of(parts_of("train")), "val.jsonl": lines_of(parts_of("val")), **IMAGES},
        JSON_PIECES,
        parts_of("train"),
    ),
}


def judge(task: str, folder: Path) -> None:
    """The folder is prepared, or refused in short lines that name a file of it or the folder."""
    reader = Reader(group="who", metrics=("json", "chrf")) if task == "chat" else None
    answer_format = "ptr" if task == "amr" else None
    samples = load_task(task, "samples")
    for skip_invalid in (False, True):
        out = folder.parent / "out"
        try:
            stats = prepare(task, f"folder:{folder}", out_dir=out, reader=reader, skip_invalid=skip_invalid)
        except UserError as error:
            assert all(len(each) < 1000 for each in error.message.splitlines())
            assert str(folder) in error.message or any(path.name in error.message for path in folder.iterdir())
            continue
        for split, found in stats["splits"].items():
            records = samples.read_split(out, split)
            assert len(records) == found["records"]
            assert found["invalid_rows"] == 0 or skip_invalid
            for record in records:
                conversation = samples.conversation(record, answered=True, answer_format=answer_format)
                assert conversation.answered()
                parts = [part for message in conversation.messages for part in message["content"]]
                assert sum(part["type"] == "image" for part in parts) == len(conversation.images)


@pytest.mark.parametrize("name", CORPORA)
@given(data=st.data())
@quick(20)
def test_damaged_files_are_prepared_or_refused(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / name / "in"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file, content in CORPORA[name].damaged(data.draw).items():
        (folder / file).write_bytes(content)
    judge(CORPORA[name].task, folder)


@given(data=st.data())
@quick(20)
def test_damaged_tables_are_prepared_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "tables/in/train.parquet"
    rows = [{**each, "who": str(each["who"])} for each in TALKS[:2]] * 4
    rows += [{**rows[0], "images": [{"bytes": encoded, "path": name} for name, encoded in IMAGES.items()]}]
    try:
        write_table(path, *data.draw(damaged_tree(rows)))
    except (pa.ArrowException, TypeError, ValueError, AttributeError, LookupError, OverflowError):
        return  # rows that no parquet file holds
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(damaged_bytes(path.read_bytes())))
    judge("chat", path.parent)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", ["[" * 1_000_000, '{"messages": ' + "[" * 1_000_000, "9" * 1_000_000, "\n" * 10**6])
@pytest.mark.parametrize("name", ["qmsum", "chat"])
def test_an_endless_line_is_refused_soon(tmp_path: Path, name: str, content: str) -> None:
    corpus = CORPORA[name]
    for file, found in corpus.files.items():
        (tmp_path / file).write_bytes(found if isinstance(found, bytes) else (found + content).encode())
    judge(corpus.task, tmp_path)
