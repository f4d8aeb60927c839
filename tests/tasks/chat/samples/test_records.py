"""Prepared conversations with pictures, as they are read; tests/tasks/test_prepared.py has those without."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.core.errors import UserError
from stages.kit.data.prepared import to_row
from stages.tasks.chat.samples.records import IMAGES, SCHEMA, Message, read_split
from tests.kit.data.pictures import picture
from tests.tasks.chat.talks import shown

MESSAGES = (Message("user", "abc"), Message("assistant", "d"))
RECORDS = [shown(MESSAGES, spots, number) for number, spots in enumerate(([(0, 0), (0, 3)], [], [(0, 1)]))]
WITH_PICTURES = SCHEMA.append(IMAGES)


def written(folder: Path, **change: Any) -> Path:
    """change: of the first picture."""
    rows = [to_row(each, WITH_PICTURES) for each in RECORDS]
    rows[0]["images"][0] |= change
    pq.write_table(pa.Table.from_pylist(rows, schema=WITH_PICTURES), folder / "val.parquet")
    return folder


def test_what_was_written_is_read_as_it_was(tmp_path: Path) -> None:
    found = read_split(written(tmp_path), "val")
    assert found == RECORDS
    assert [each.content() for each in found] == [each.content() for each in RECORDS]
    assert all(each.open_image().size == (40, 30) for record in found for each in record.pictures)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"image": b"<html>"}, "cannot identify image"),
        ({"image": picture(size=(40, 31))}, r"the image is \(40, 31\), expected \(40, 30\)"),
        ({"width": None}, "a picture has no width"),
        ({"message": 2}, "no place 0 of message 3"),
        ({"offset": 9}, "no place 9 of message 1"),
        ({"offset": -1}, "no place -1 of message 1"),
        ({"message": 1}, "message 2 shows a picture"),
    ],
)
def test_a_damaged_picture_is_named(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=f"val.parquet row 0: .*{problem}.*rebuild it with"):
        read_split(written(tmp_path, **change), "val")


def test_pictures_out_of_order_are_named(tmp_path: Path) -> None:
    rows = [to_row(each, WITH_PICTURES) for each in RECORDS]
    rows[0]["images"].reverse()
    pq.write_table(pa.Table.from_pylist(rows, schema=WITH_PICTURES), tmp_path / "val.parquet")
    with pytest.raises(UserError, match="row 0: pictures are not in the order in which they are shown"):
        read_split(tmp_path, "val")


def test_a_split_may_lack_the_column_but_not_have_another(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([to_row(RECORDS[1], SCHEMA)], schema=SCHEMA), tmp_path / "val.parquet")
    assert read_split(tmp_path, "val") == RECORDS[1:2]
    other = SCHEMA.append(pa.field("images", pa.list_(pa.binary())))
    rows = [{**to_row(RECORDS[1], SCHEMA), "images": []}]
    pq.write_table(pa.Table.from_pylist(rows, schema=other), tmp_path / "val.parquet")
    with pytest.raises(UserError, match=r"is not of this task: it has images \(list<element: binary>\)"):
        read_split(tmp_path, "val")
