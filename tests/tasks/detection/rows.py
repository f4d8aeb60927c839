"""Small raw rows in the Open Food Facts schema, and records, for the tests of this folder."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from stages.tasks.detection.samples.records import Box, DetectionRecord, parse_row

WHITE, RED = (255, 255, 255), (220, 20, 20)


def picture(colour: tuple[int, int, int] = (90, 120, 200), size: tuple[int, int] = (40, 30)) -> bytes:
    """A plain PNG."""
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def patch_jpeg(box: Box, size: tuple[int, int], orientation: int) -> bytes:
    """A JPEG that *shows*, its EXIF orientation applied, a red patch at `box` on white, `size` large."""
    upright = Image.new("RGB", size, WHITE)
    x0, y0, x1, y1 = (round(v * s) for v, s in zip(box, size * 2, strict=True))
    ImageDraw.Draw(upright).rectangle((x0, y0, x1 - 1, y1 - 1), fill=RED)
    # What a camera stores: the inverse of what a viewer does for the orientation (EXIF 2.32, tag 0x0112).
    stored = {
        1: None,
        3: Image.Transpose.ROTATE_180,
        6: Image.Transpose.ROTATE_90,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    (upright.transpose(stored) if stored is not None else upright).save(buffer, "JPEG", quality=95, exif=exif)
    return buffer.getvalue()


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
        "image": {"bytes": picture() if image is None else image, "path": None},
        "width": 40,
        "height": 30,
        "meta": {"barcode": "0000000000017", "off_image_id": "1", "image_url": ""},
        "objects": {"bbox": bbox, "category_id": [0] * len(bbox), "category_name": names},
    }


def record(boxes: list[Box], image_id: str = "a", categories: tuple[str, ...] | None = None) -> DetectionRecord:
    parsed = parse_row(raw_row(image_id))
    assert isinstance(parsed, DetectionRecord), parsed
    categories = categories or ("nutrition-table",) * len(boxes)
    return DetectionRecord(image_id, parsed.image, 40, 30, tuple(boxes), categories)


def write_dataset(folder: Path, *, train: list[dict[str, Any]], val: list[dict[str, Any]]) -> Path:
    """A dataset folder as the hub has it. Rows of one split must have the same columns."""
    (folder / "data").mkdir(parents=True)
    for split, rows in (("train", train), ("val", val)):
        pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder
