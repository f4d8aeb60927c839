"""Small rows, records and a dataset in the Open Food Facts schema, for the tests of this folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.tasks.detection.samples import DetectionRecord
from stages.tasks.detection.samples.boxes import Box
from stages.tasks.detection.sources.rows import BoxForm, Reader, Row, parse_row
from tests.data.images import png

FORM = BoxForm(order="yxyx", unit="share")


def row(
    image_id: str = "0000000000017_1",
    image: bytes | None = None,
    bbox: list[Any] | None = None,
    names: list[Any] | None = None,
) -> Row:
    """A valid row, but for what is given. bbox: list of (y_min, x_min, y_max, x_max)."""
    bbox = [[0.1, 0.2, 0.5, 0.9]] if bbox is None else bbox
    names = ["nutrition-table"] * len(bbox) if names is None else names
    boxes = [(f"box {index}", *found) for index, found in enumerate(zip(bbox, names, strict=True))]
    return Row(image_id, png() if image is None else image, boxes)


def parsed(given: Row) -> DetectionRecord:
    found = parse_row(given, Reader(), FORM, "train")
    assert isinstance(found, DetectionRecord), found
    return found


def record(boxes: list[Box], image_id: str = "a", categories: tuple[str, ...] | None = None) -> DetectionRecord:
    categories = categories or ("nutrition-table",) * len(boxes)
    labels = tuple(name if name.startswith("nutrition-table") else None for name in categories)
    image = replace(parsed(row(image_id)), sha256=image_id)  # another one for each id
    return replace(image, boxes=tuple(boxes), categories=categories, labels=labels)


def raw_row(row: Row) -> dict[str, Any]:
    """The row as Open Food Facts has it."""
    objects = {
        "bbox": [bbox for _, bbox, _ in row.boxes],
        "category_id": [0] * len(row.boxes),
        "category_name": [name for _, _, name in row.boxes],
    }
    return {"image_id": row.image_id, "image": {"bytes": row.image, "path": None}, "objects": objects}


def write_dataset(folder: Path, **splits: list[Row]) -> Path:
    """A dataset folder as the hub has it, by split."""
    (folder / "data").mkdir(parents=True)
    for split, rows in splits.items():
        pq.write_table(
            pa.Table.from_pylist(list(map(raw_row, rows))), folder / "data" / f"{split}-00000-of-00001.parquet"
        )
    return folder
