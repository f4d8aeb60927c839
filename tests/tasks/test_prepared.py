"""Prepared files with repeated samples, or damaged afterwards, as the stages of every task read them."""

import io
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.errors import UserError
from stages.core.params.schema import LimitParams
from stages.core.tasks import load_task
from stages.data.parquet import write_rows
from stages.data.splits import to_rows
from stages.tasks.amr.samples import parse_record
from tests import ROOT
from tests.damage import damaged_bytes, quick
from tests.stage_runs import few_photographs
from tests.tasks import TASKS, asked_of_a_model, prepare
from tests.tasks.chat.conversations import record as conversation_record
from tests.tasks.detection.rows import record
from tests.tasks.moe.made_up import fact, meeting

GRAPH = "(đ / đi :agent (t / tôi))"
RECORDS: dict[str, list[Any]] = {
    "detection": [record([(0.1, 0.1, 0.5, 0.5)], name) for name in "abc"],
    "amr": [parse_record(name, "Tôi đi .", GRAPH, file="x.txt", line=1) for name in "abc"],
    "moe": [fact(1), meeting(2), fact(3)],
    "chat": [conversation_record(name, "You.", "exact") for name in ("Who?", "What?", "Where?")],
}

DATA = {"detection": "nutrition-tables", "amr": "visempar", "moe": "truthfulqa", "chat": "conversations"}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_on_samples_as_often_as_their_file_says(task: str, tmp_path: Path) -> None:
    data_dir, found = few_photographs().name if task == "detection" else ROOT / "data/tiny" / DATA[task], []
    for folder, repeat in (("once", {}), ("thrice", {"*train*": 3})):
        limit = LimitParams(train=4, val=2)
        prepare(task, f"folder:{data_dir}", out_dir=tmp_path / folder, limit=limit, repeat=repeat)
        samples = load_task(task, "samples")
        found.append({split: samples.read_split(tmp_path / folder, split) for split in ("train", "val")})
    once, thrice = found
    assert thrice["train"] == [record for record in once["train"] for _ in range(3)]
    assert thrice["val"] == once["val"]


@pytest.mark.parametrize("task", [task for task in TASKS if task != "detection"])
def test_files_in_capitals_are_read(task: str, tmp_path: Path) -> None:
    tiny, limit = ROOT / "data/tiny" / DATA[task], LimitParams(train=4, val=2)
    for file in (path for path in tiny.iterdir() if path.suffix != ".md"):
        shutil.copy(file, tmp_path / file.name.upper())
    files = {
        folder: prepare(task, f"folder:{source}", out_dir=tmp_path / folder, limit=limit, skip_invalid=True)["splits"]
        for folder, source in (("once", tiny), ("capitals", tmp_path))
    }
    in_capitals = {split: [name.upper() for name in read["files"]] for split, read in files["once"].items()}
    assert {split: read["files"] for split, read in files["capitals"].items()} == in_capitals


@pytest.mark.parametrize("task", [task for task in TASKS if task != "detection"])
def test_files_of_one_name_in_two_folders_are_two(task: str, tmp_path: Path) -> None:
    files = sorted(path for path in (ROOT / "data/tiny" / DATA[task]).iterdir() if path.suffix != ".md")
    assert len(files) == 2
    for folder, file in zip(("a", "b"), files, strict=True):
        (tmp_path / folder).mkdir()
        shutil.copy(file, tmp_path / folder / f"x{file.suffix}")
    named = {"train": f"*/x{files[0].suffix}"}
    stats = prepare(task, f"folder:{tmp_path}", out_dir=tmp_path / "out", splits=named, skip_invalid=True)
    assert stats["splits"]["train"]["files"] == [f"{folder}/x{files[0].suffix}" for folder in "ab"]
    ids = [
        each.id for split in ("train", "val") for each in load_task(task, "samples").read_split(tmp_path / "out", split)
    ]
    assert len(set(ids)) == len(ids)
    (tmp_path / f"b/x{files[0].suffix}").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"\n  b/x\S*: not UTF-8: byte 0xff in line 1; save it as UTF-8"):
        prepare(task, f"folder:{tmp_path}", out_dir=tmp_path / "out", splits=named)


@dataclass
class Prepared:
    """A split of three rows."""

    task: str
    folder: Path

    def __post_init__(self) -> None:
        samples = load_task(self.task, "samples")
        self.schema = samples.SCHEMA
        self.rows = [*to_rows(RECORDS[self.task], self.schema)]

    def content(self, rows: list[dict[str, Any]]) -> bytes:
        path = self.folder / "val.parquet"
        write_rows(rows, path, self.schema)
        return path.read_bytes()

    def use(self, content: bytes) -> int:
        """The number of records; each becomes a question and its answer."""
        (self.folder / "val.parquet").write_bytes(content)
        found = load_task(self.task, "samples").read_split(self.folder, "val")
        asked, answer_format = asked_of_a_model(self.task), "full" if self.task == "amr" else None
        for each in found:
            for shown in asked.conversation(each, answered=True, answer_format=answer_format).images:
                shown.open_image()
        return len(found)

    def refusal(self, content: bytes) -> str:
        with pytest.raises(UserError) as error:
            self.use(content)
        assert f"{self.folder / 'val.parquet'}" in error.value.message
        assert error.value.message.endswith(f"rebuild it with: dvc repro -f -s prepare@{self.folder.name}")
        return error.value.message


@pytest.fixture(scope="module", params=TASKS)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(request.param, tmp_path_factory.mktemp("prepared"))


def test_what_was_written_is_read_as_it_was(prepared: Prepared) -> None:
    content = prepared.content(prepared.rows)
    assert prepared.use(content) == 3
    found = load_task(prepared.task, "samples").read_split(prepared.folder, "val")
    assert found == RECORDS[prepared.task]
    assert [*to_rows(found, prepared.schema)] == prepared.rows


@given(data=st.data())
@quick(30)
def test_a_damaged_file_is_refused_by_name_or_read(prepared: Prepared, data: st.DataObject) -> None:
    content = data.draw(damaged_bytes(prepared.content(prepared.rows)))
    try:
        assert prepared.use(content)
    except UserError as error:
        assert "val.parquet" in error.message
        assert "prepare@" in error.message


def test_another_schema_or_a_missing_value_is_refused_by_column(prepared: Prepared) -> None:
    for other in RECORDS.keys() - {prepared.task}:
        another = Prepared(other, prepared.folder)
        assert "is not of this task: it has" in prepared.refusal(another.content(another.rows))
    assert "has no row" in prepared.refusal(prepared.content([]))
    for index, field in enumerate(prepared.schema):
        table = pa.Table.from_pylist(prepared.rows, schema=prepared.schema)
        for changed in (table.drop_columns([field.name]), table.set_column(index, field.name, pa.array([True] * 3))):
            buffer = io.BytesIO()
            pq.write_table(changed, buffer)
            assert f"no {field.name} ({field.type})" in prepared.refusal(buffer.getvalue())
        if field.name != "context":
            rows = [prepared.rows[0], {**prepared.rows[1], field.name: None}, prepared.rows[2]]
            assert f"row 1: {field.name} is missing" in prepared.refusal(prepared.content(rows))
