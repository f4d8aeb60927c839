"""Files of every task that are damaged: they are refused by name, or prepared with every faulty sample counted."""

import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.errors import UserError
from stages.core.tasks import load_task
from stages.tasks.chat.sources import Reader
from stages.tasks.detection.sources.rows import Reader as BoxReader
from tests.damage import VALUES, damaged_bytes, damaged_text, damaged_tree, quick
from tests.data.images import png
from tests.tasks import TASKS, asked_of_a_model, prepare, write_lines
from tests.tasks.amr.test_sources import BAD, block
from tests.tasks.chat.conversations import line, messages
from tests.tasks.chat.test_sources import IMAGE, TEXT, asked, write_table
from tests.tasks.detection.written import CLASSES, COLUMNS, PHOTOS, WRITERS
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


def write_talks(folder: Path) -> None:
    for split in ("train", "val"):
        talks = [{**each, "who": f"{split}{number}"} for number, each in enumerate(TALKS)]
        write_lines(folder / f"{split}.jsonl", *talks)
    for name, encoded in IMAGES.items():
        (folder / name).write_bytes(encoded)


def write_talks_as_table(folder: Path) -> None:
    rows = [{**each, "who": str(each["who"])} for each in TALKS[:2]] * 4
    rows += [{**rows[0], "images": [{"bytes": encoded, "path": name} for name, encoded in IMAGES.items()]}]
    write_table(folder / "train.parquet", *rows)


def write_sentences(folder: Path) -> None:
    (folder / "train.txt").write_text(block(1) + "# ::id x.2\n" + block(2) + block(3) + BAD + block(4))


def write_questions(folder: Path) -> None:
    rows = (f'Adversarial,"Is it {n}?",Yes,Yes; Surely;,No; Never; \n' for n in range(4))
    (folder / "all.csv").write_text(TABLE + "".join(rows))


def write_meetings(folder: Path) -> None:
    write_lines(folder / "train.jsonl", yale("rain", "What of Bob?"), longbench(1), longbench(2), yale("snow"))


@dataclass(kw_only=True)
class Corpus:
    task: str
    write: Callable[[Path], object]
    """Writes its files into a folder."""
    pieces: Sequence[str]
    """Texts that take the place of parts."""
    reader: Any = None


JSON_PIECES = (
    *(
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
        '"id"',
    ),
    *("null", "NaN", "1e999", "9" * 5000, "\\ud800", "<|im_end|>", "\n", "-"),
)
XML_PIECES = ("<object>", "</object>", "<name>", "<", "&", "&lt;", "&x;", "<!DOCTYPE a>", "<![CDATA[", "-1", "1e9")
YOLO_PIECES = ("0", " ", "\n", "-1", "1e400", "nan", "99", ".", "\x00", "names:", "*a", "&a", "[", "{", "train: ../..")


def of_images(form: Any) -> Corpus:
    def write(folder: Path) -> None:
        WRITERS[form](folder, PHOTOS)

    columns = COLUMNS if form == "parquet" else None
    reader = BoxReader(category=tuple(CLASSES), empty_images=True, format=form, columns=columns)
    pieces = {"voc": XML_PIECES, "yolo": YOLO_PIECES}.get(form, JSON_PIECES)
    return Corpus(task="detection", write=write, pieces=pieces, reader=reader)


READER = Reader(group="who", metrics=("json", "chrf"))
CORPORA = {
    "amr": Corpus(task="amr", write=write_sentences, pieces=["#::snt ", "# ::id x\n", "\r", "(", ")", '"']),
    "truthfulqa": Corpus(task="moe", write=write_questions, pieces=[",", '"', "\n", ";", "\r"]),
    "qmsum": Corpus(task="moe", write=write_meetings, pieces=JSON_PIECES),
    "chat": Corpus(task="chat", write=write_talks, pieces=JSON_PIECES, reader=READER),
    "chat table": Corpus(task="chat", write=write_talks_as_table, pieces=(), reader=READER),
    **{form: of_images(form) for form in WRITERS},
}


def test_every_task_has_files_to_damage() -> None:
    assert {corpus.task for corpus in CORPORA.values()} == set(TASKS)


def damage(path: Path, pieces: Sequence[str], data: st.DataObject) -> None:
    content, kinds = path.read_bytes(), ["bytes", "bytes", "gone", "folder", "renamed"]
    kinds += ["tree"] * 4 if path.suffix in (".json", ".jsonl", ".parquet") else []
    kinds += ["text"] * 3 if path.suffix in (".json", ".jsonl", ".xml", ".txt", ".yaml", ".csv") else []
    match data.draw(st.sampled_from(kinds)):
        case "bytes":
            path.write_bytes(data.draw(damaged_bytes(content or b"0")))
        case "text":
            path.write_text(data.draw(damaged_text(content.decode(), list(pieces))), errors="ignore")
        case "tree" if path.suffix == ".parquet":
            path.write_bytes(damaged_table(content, data))
        case "tree" if path.suffix == ".json":
            path.write_text(json.dumps(data.draw(damaged_tree(json.loads(content)))))
        case "tree":
            lines = data.draw(damaged_tree([json.loads(each) for each in content.splitlines()]))
            path.write_text("".join(f"{json.dumps(each)}\n" for each in lines) if isinstance(lines, list) else "")
        case "renamed":
            path.rename(path.with_name(f"train {path.name}"))
        case kind:
            path.unlink()
            if kind == "folder":
                path.mkdir()


def damaged_table(content: bytes, data: st.DataObject) -> bytes:
    """A parquet file with its rows damaged, or the description of its columns; empty for what no such file holds."""
    table, written = pq.read_table(io.BytesIO(content)), io.BytesIO()
    metadata = table.schema.metadata or {}
    try:
        if b"huggingface" in metadata and data.draw(st.booleans()):
            description = data.draw(damaged_tree(json.loads(metadata[b"huggingface"])) | VALUES)
            metadata = {"huggingface": json.dumps(description)}
        else:
            table = pa.Table.from_pylist(data.draw(damaged_tree(table.to_pylist())))
        pq.write_table(table.replace_schema_metadata(metadata), written)
    except (pa.ArrowException, TypeError, ValueError, AttributeError, LookupError, OverflowError):
        return b""
    return written.getvalue()


def judge(corpus: Corpus, folder: Path) -> list[str]:
    """The refusals of the folder, which are in short lines that name a file of it or the folder."""
    refused = []
    answer_format, samples = "ptr" if corpus.task == "amr" else None, load_task(corpus.task, "samples")
    for skip_invalid in (False, True):
        out = folder.parent / "out"
        try:
            stats = prepare(
                corpus.task, f"folder:{folder}", out_dir=out, reader=corpus.reader, skip_invalid=skip_invalid
            )
        except UserError as error:
            assert all(len(each) < 1000 for each in error.message.splitlines())
            names = (path.name for path in folder.rglob("*"))
            assert any(name in error.message for name in (str(folder), *names, "no image")), error.message
            refused.append(error.message)
            continue
        for split, found in stats["splits"].items():
            records = samples.read_split(out, split)
            assert len(records) == found["records"]
            assert found["invalid_rows"] == 0 or skip_invalid
            for record in records:
                conversation = asked_of_a_model(corpus.task).conversation(
                    record, answered=True, answer_format=answer_format
                )
                assert conversation.answered()
                parts = [part for message in conversation.messages for part in message["content"]]
                assert sum(part["type"] == "image" for part in parts) == len(conversation.images)
    return refused


@pytest.mark.parametrize("name", CORPORA)
@given(data=st.data())
@quick(30)
def test_damaged_files_are_prepared_or_refused(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / name / "in"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    CORPORA[name].write(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    damage(data.draw(st.sampled_from(paths)), CORPORA[name].pieces, data)
    judge(CORPORA[name], folder)


DEEP = '{"images": ' + "[" * 1_000_000
LONG_NAME = "<annotation><object><name>" + "x" * 3_000_000 + "</name></object></annotation>"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        *((name, "train.jsonl", content) for name in ("qmsum", "chat") for content in (DEEP, "9" * 10**6)),
        ("coco", "annotations/instances_train2017.json", DEEP),
        ("voc", "Annotations/a.xml", "<annotation>" + "<a>" * 300_000 + "</a>" * 300_000),
        ("voc", "Annotations/a.xml", LONG_NAME),
        ("yolo", "train/labels/a.txt", "0 0.5 0.5 0.1 0.1 " * 200_000),
        ("yolo", "data.yaml", "names: " + "[" * 100_000),
        ("yolo", "data.yaml", "a: &a [x, x]\nb: &b [*a, *a]\nnames: " + "*b"),
        ("yolo", "data.yaml", "names: [cup]\ntrain: elsewhere\nval: val\n"),
    ],
)
def test_a_file_without_end_is_refused_soon(tmp_path: Path, name: str, file: str, content: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    CORPORA[name].write(folder)
    text = (folder / file).read_text() if file.endswith(".jsonl") else ""
    (folder / file).write_text(text + content)
    assert judge(CORPORA[name], folder)
