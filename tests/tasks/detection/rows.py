"""Small raw rows in the Open Food Facts schema, and records, for the tests of this folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.tasks.detection.samples.boxes import Box
from stages.tasks.detection.samples.records import DetectionRecord
from stages.tasks.detection.sources.rows import parse_row
from tests.kit.data.images import png


def raw_row(
    image_id: str = "0000000000017_1",
    image: bytes | None = None,
    bbox: list[Any] | None = None,
    names: list[Any] | None = None,
) -> dict[str, Any]:
    """A valid raw row, but for what is given. bbox: list of (y_min, x_min, y_max, x_max)."""
    bbox = [[0.1, 0.2, 0.5, 0.9]] if bbox is None else bbox
    names = ["nutrition-table"] * len(bbox) if names is None else names
    return {
        "image_id": image_id,
        "image": {"bytes": png() if image is None else image, "path": None},
        "width": 40,
        "height": 30,
        "meta": {"barcode": "0000000000017", "off_image_id": "1", "image_url": ""},
        "objects": {"bbox": bbox, "category_id": [0] * len(bbox), "category_name": names},
    }


def record(boxes: list[Box], image_id: str = "a", categories: tuple[str, ...] | None = None) -> DetectionRecord:
    parsed = parse_row(raw_row(image_id))
    assert isinstance(parsed, DetectionRecord), parsed
    categories = categories or ("nutrition-table",) * len(boxes)
    labels = tuple(name if name.startswith("nutrition-table") else None for name in categories)
    return replace(parsed, boxes=tuple(boxes), categories=categories, labels=labels)


def write_dataset(folder: Path, *, train: list[dict[str, Any]], val: list[dict[str, Any]]) -> Path:
    """A dataset folder as the hub has it. Rows of one split must have the same columns."""
    (folder / "data").mkdir(parents=True)
    for split, rows in (("train", train), ("val", val)):
        pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder
