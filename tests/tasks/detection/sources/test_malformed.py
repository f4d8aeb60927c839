"""Thousands of damaged folders: each gives records, or a refusal in words; no other error, and no hang."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.errors import UserError
from stages.kit.data.texts import UnreadableText
from stages.tasks.detection.samples import read_split
from stages.tasks.detection.sources import Reader
from stages.tasks.detection.sources.voc import parse
from tests.damage import TEXTS, VALUES, damaged_bytes, damaged_text, damaged_tree, quick
from tests.tasks import prepare
from tests.tasks.detection.sources.written import CLASSES, COLUMNS, PHOTOS, WRITERS

PIECES = {
    "voc": [
        "<object>",
        "</object>",
        "<name>",
        "<",
        "&",
        "&lt;",
        "&x;",
        "<!DOCTYPE a>",
        "<![CDATA[",
        "<bndbox>",
        "-1",
        "1e9",
    ],
    "yolo": [
        "0",
        " ",
        "\n",
        "-1",
        "1e400",
        "nan",
        "0.5",
        "99",
        ".",
        "\x00",
        "names:",
        "*a",
        "&a",
        "[",
        "{",
        "train: ../..",
        "-",
    ],
    "coco": ["[", "]", "{", "}", ",", '"id"', "1e999", "-", "null", "NaN", "9" * 5000],
}

READER = Reader(category=tuple(CLASSES), empty_images=True)


class Damaged:
    """A folder that is written whole before each accident."""

    def __init__(self, form: str, folder: Path) -> None:
        self.form, self.folder = form, folder
        WRITERS[form](folder / "whole", PHOTOS)
        self.whole = {path.relative_to(folder / "whole"): path.read_bytes() for path in self._files(folder / "whole")}

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        return sorted(path for path in folder.rglob("*") if path.is_file())

    def judge(self, change: Callable[[Path], None], *, skip_invalid: bool) -> None:
        damaged, out = self.folder / "damaged", self.folder / "out"
        shutil.rmtree(damaged, ignore_errors=True)
        for path, content in self.whole.items():
            (damaged / path).parent.mkdir(parents=True, exist_ok=True)
            (damaged / path).write_bytes(content)
        change(damaged)
        columns = COLUMNS if self.form == "parquet" else None
        try:
            stats = prepare(
                "detection",
                f"folder:{damaged}",
                out_dir=out,
                skip_invalid=skip_invalid,
                reader=replace(READER, format=self.form, columns=columns),  # type: ignore[arg-type]
            )
        except UserError as error:
            assert error.message.isprintable() or "\n" in error.message
            assert all(len(line) < 1000 for line in error.message.splitlines())
            return
        for split, found in stats["splits"].items():
            assert len(read_split(out, split)) == found["records"]
            assert found["invalid_rows"] == 0 or skip_invalid


@pytest.fixture(scope="module", params=WRITERS)
def damaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return Damaged(request.param, tmp_path_factory.mktemp("damaged"))


@given(data=st.data())
@quick(100)
def test_damaged_files_give_records_or_a_refusal(damaged: Damaged, data: st.DataObject) -> None:
    def change(folder: Path) -> None:
        for _ in range(data.draw(st.integers(1, 2))):
            path = folder / data.draw(st.sampled_from(sorted(damaged.whole)))
            if not path.is_file():
                continue
            match data.draw(st.sampled_from(["bytes", "bytes", "text", "gone", "folder", "renamed"])):
                case "bytes":
                    path.write_bytes(data.draw(damaged_bytes(path.read_bytes() or b"0")))
                case "text" if path.suffix in (".json", ".xml", ".txt", ".yaml"):
                    text = data.draw(damaged_text(path.read_text(errors="replace"), PIECES.get(damaged.form, ["x"])))
                    path.write_text(text, errors="ignore")
                case "folder":
                    path.unlink()
                    path.mkdir()
                case "renamed":
                    path.rename(path.with_name(f"train {path.name}"))
                case _:
                    path.unlink()

    damaged.judge(change, skip_invalid=data.draw(st.booleans()))


@given(data=st.data())
@quick(150)
def test_damaged_coco_trees_give_records_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    base = tmp_path_factory.getbasetemp() / "coco-trees"
    damaged = Damaged("coco", base)

    def change(folder: Path) -> None:
        path = folder / f"annotations/instances_{data.draw(st.sampled_from(['train', 'val']))}2017.json"
        path.write_text(json.dumps(data.draw(damaged_tree(json.loads(path.read_text())))))

    damaged.judge(change, skip_invalid=data.draw(st.booleans()))


@given(data=st.data())
@quick(100)
def test_damaged_rows_and_descriptions_of_parquet_give_records_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    base = tmp_path_factory.getbasetemp() / "parquet-trees"
    damaged = Damaged("parquet", base)

    def change(folder: Path) -> None:
        path = folder / f"data/{data.draw(st.sampled_from(['train', 'validation']))}-00000-of-00001.parquet"
        table = pq.read_table(path)
        rows, description = table.to_pylist(), json.loads(table.schema.metadata[b"huggingface"])
        if data.draw(st.booleans()):
            text = json.dumps(data.draw(damaged_tree(description) | VALUES))
            pq.write_table(table.replace_schema_metadata({"huggingface": text}), path)
            return
        try:
            table = pa.Table.from_pylist(data.draw(damaged_tree(rows)))
        except (pa.ArrowException, TypeError, ValueError, AttributeError, LookupError, OverflowError):
            return  # rows that no parquet file holds
        try:
            pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(description)}), path)
        except pa.ArrowException:
            path.write_bytes(b"")

    damaged.judge(change, skip_invalid=data.draw(st.booleans()))


@given(text=st.text() | st.lists(st.sampled_from(PIECES["voc"]) | TEXTS).map("".join))
@quick(300)
def test_any_text_is_an_annotation_or_unreadable(text: str) -> None:
    try:
        row = parse(f"<annotation>{text}</annotation>".encode("utf-8", "replace").decode())
    except UnreadableText as error:
        assert len(str(error)) < 200
    else:
        assert set(row) == {"objects", "named", "problems", "size"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("form", "name", "content"),
    [
        ("coco", "annotations/instances_train2017.json", '{"images": ' + "[" * 1_000_000),
        ("coco", "annotations/instances_train2017.json", '{"images": [' + "9" * 1_000_000),
        ("voc", "Annotations/a.xml", "<annotation>" + "<a>" * 300_000),
        ("voc", "Annotations/a.xml", "<annotation><object><name>" + "x" * 3_000_000 + "</name></object></annotation>"),
        ("yolo", "train/labels/a.txt", "0 0.5 0.5 0.1 0.1 " * 200_000),
        ("yolo", "train/labels/a.txt", "9" * 1_000_000 + " 1 1 1 1"),
        ("yolo", "data.yaml", "names: " + "[" * 100_000),
        ("yolo", "data.yaml", "a: &a [x, x]\nb: &b [*a, *a]\nnames: " + "*b"),
    ],
)
def test_a_file_without_end_is_refused_soon(tmp_path: Path, form: str, name: str, content: str) -> None:
    WRITERS[form](tmp_path / form, PHOTOS)
    (tmp_path / form / name).write_text(content)
    with pytest.raises(UserError) as refused:
        prepare(
            "detection",
            f"folder:{tmp_path / form}",
            out_dir=tmp_path / "out",
            reader=Reader(category=tuple(CLASSES), empty_images=True),
        )
    assert len(refused.value.message) < 3000


@pytest.mark.parametrize(
    "description", ["[", "{}", '{"info": {"features": []}}', '{"info": {"features": {"found": 3}}}']
)
def test_a_description_of_columns_that_says_nothing_of_them_is_refused(tmp_path: Path, description: str) -> None:
    WRITERS["parquet"](tmp_path, PHOTOS)
    path = tmp_path / "data/train-00000-of-00001.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata({"huggingface": description}), path)
    with pytest.raises(UserError, match=r"the description of its columns \(huggingface\) cannot be read"):
        prepare(
            "detection",
            f"folder:{tmp_path}",
            out_dir=tmp_path / "out",
            reader=Reader(columns=COLUMNS, category=tuple(CLASSES), empty_images=True),
        )
