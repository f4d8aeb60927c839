"""What one sample of detection data is, and how a raw row of a dataset becomes one.

The raw rows follow the Open Food Facts schema (dataset openfoodfacts/nutrition-table-detection on the hub):
image_id, image {bytes, path}, objects {bbox, category_name}, where a bbox is (y_min, x_min, y_max, x_max) in
0..1 of the image as it is seen, its EXIF rotation applied. Elsewhere in the code a box is (x0, y0, x1, y1).
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from PIL import Image, ImageOps

from stages.core.documents import cut, shown
from stages.kit.data.parquet import PreparedRow, read_prepared
from stages.kit.data.pictures import DECODING_ERRORS, open_picture

Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 in 0..1 of the upright image, x0 < x1 and y0 < y1."""

TARGET = "nutrition-table"
"""What is asked for where a dataset names no `category`. Categories that start with it (nutrition-table-small, ...)
count as it."""
PROMPT = "Detect the bounding box of the nutrition table."
"""How it is asked for where a dataset names no `prompt`."""
MAX_IMAGE_PIXELS = 64_000_000
"""Of a picture where a dataset names no `max_image_pixels`: more than most cameras make, and 0.6 GB to look at."""

MAX_ASPECT = 200
"""A longer picture is refused by the image processor (smart_resize in transformers/models/qwen2_vl)."""

COLUMNS = ("image_id", "image", "objects")
REQUIRED = ("image_id", "image.bytes", "objects.bbox", "objects.category_name")
"""What a row is read from; width and height are the decoded image's own, and `meta` is not used."""

SCHEMA = pa.schema(
    [
        ("image_id", pa.string()),
        ("image", pa.binary()),
        ("width", pa.int64()),
        ("height", pa.int64()),
        ("boxes", pa.list_(pa.list_(pa.float64()))),
        ("categories", pa.list_(pa.string())),
        ("sha256", pa.string()),
        ("category", pa.string()),
        ("prompt", pa.string()),
    ]
)
"""Of a prepared split."""

ROUNDING = 1e-6
"""How far outside 0..1 a coordinate may lie: what float32 and a division by the image size leave behind."""

_ORIENTATION = 0x0112
_TURNED = range(2, 9)  # 1 is upright; anything else is not in the standard and means nothing


@dataclass(frozen=True)
class DetectionRecord:
    image_id: str
    image: bytes
    """Encoded (JPEG, PNG, ...), upright: no EXIF orientation is left to apply."""
    width: int
    height: int
    """In pixels, of the upright image."""
    boxes: tuple[Box, ...]
    """At least one, in the order of the dataset."""
    categories: tuple[str, ...]
    """One for each box."""
    sha256: str = ""
    """Of the upright image's pixels."""
    category: str = TARGET
    """What is asked for; categories that start with it count as it."""
    prompt: str = PROMPT
    """How it is asked for."""
    place: PreparedRow | None = field(default=None, compare=False, repr=False)

    def open_image(self) -> Image.Image:
        """The decoded picture, RGB. Raises UserError where prepared data are damaged."""
        try:
            with open_picture(self.image) as image:
                return image.convert("RGB")
        except DECODING_ERRORS as error:
            if self.place is None:
                raise
            raise self.place.damaged(f"unreadable image: {error}") from None

    def first_annotated(self) -> Box:
        """The box of the category that the dataset names first."""
        return next(iter(self._wanted()))

    def target_boxes(self) -> tuple[Box, ...]:
        """The boxes of the category, at least one, in reading order, as they are to be answered."""
        return reading_order(self._wanted())

    def _wanted(self) -> list[Box]:
        return [box for box, name in zip(self.boxes, self.categories, strict=True) if name.startswith(self.category)]


def reading_order(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """From top to bottom, and from left to right where tops are level."""
    return tuple(sorted(boxes, key=lambda box: (box[1], box[0], box[3], box[2])))


def parse_row(
    row: Mapping[str, Any],
    *,
    category: str = TARGET,
    prompt: str = PROMPT,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> DetectionRecord | list[str]:
    """Check one raw row.

    category, prompt: what is asked for, and how. max_image_pixels: of a picture that is decoded.
    Returns the record, or every problem that keeps the row from being one, in words.
    """
    problems = [f"column {name} is missing" for name in COLUMNS if name not in row]
    if problems:
        return problems
    if not isinstance(row["image_id"], str) or not row["image_id"]:
        problems.append(f"image_id is {shown(row['image_id'])}, expected a non-empty string")
    boxes, categories, object_problems = _parse_objects(row["objects"], category)
    problems += object_problems
    encoded = row["image"].get("bytes") if isinstance(row["image"], Mapping) else None
    if not isinstance(encoded, bytes) or not encoded:
        return [*problems, "no image: there are no bytes in column image"]
    try:
        image, (width, height), sha256 = _upright(encoded, max_image_pixels)
    except DECODING_ERRORS as error:
        return [*problems, f"unreadable image: {error}"]
    if max(width, height) > MAX_ASPECT * min(width, height):
        problems.append(
            f"the image of {shown(row['image_id'])} is {width} x {height} pixels: one side is more than {MAX_ASPECT} "
            "times the other, which no model here takes"
        )
    return problems or DetectionRecord(
        row["image_id"], image, width, height, boxes, categories, sha256, category=category, prompt=prompt
    )


def to_row(record: DetectionRecord) -> dict[str, Any]:
    """A record as a row of SCHEMA."""
    return {
        **{name: getattr(record, name) for name in SCHEMA.names},
        "boxes": [list(box) for box in record.boxes],
        "categories": list(record.categories),
    }


def read_split(prepared_dir: Path, split: str) -> list[DetectionRecord]:
    """The records of a prepared split, in their order.

    Raises UserError where prepare has not run, or what it wrote is damaged.
    """
    return read_prepared(prepared_dir, split, SCHEMA, _from_row)


def _from_row(row: dict[str, Any], place: PreparedRow) -> DetectionRecord:
    boxes, categories = tuple(tuple(box) for box in row["boxes"]), tuple(map(str, row["categories"]))
    for x0, y0, x1, y1 in boxes:
        if not (0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1):
            raise ValueError(f"box {(x0, y0, x1, y1)} is not x0 < x1, y0 < y1 in 0..1")
    if len(boxes) != len(categories):
        raise ValueError(f"{len(boxes)} boxes, but {len(categories)} categories")
    if not any(category.startswith(row["category"]) for category in categories):
        raise ValueError(f"no box of a {row['category']}")
    with open_picture(row["image"]) as image:  # its beginning; the rest is read where it is needed
        if image.size != (row["width"], row["height"]):
            raise ValueError(f"the image is {image.size}, expected {(row['width'], row['height'])}")
    return DetectionRecord(**{**row, "boxes": boxes, "categories": categories}, place=place)


def _parse_objects(objects: Any, wanted: str) -> tuple[tuple[Box, ...], tuple[str, ...], list[str]]:
    if not isinstance(objects, Mapping):
        return (), (), [f"objects is {shown(objects)}, expected bbox and category_name"]
    missing = [f"column objects.{name} is missing" for name in ("bbox", "category_name") if objects.get(name) is None]
    if missing:
        return (), (), missing
    bboxes, names = objects["bbox"], objects["category_name"]
    if not (isinstance(bboxes, list | tuple) and isinstance(names, list | tuple)):
        return (), (), [f"objects has bbox {shown(bboxes)} and category_name {shown(names)}, expected lists"]
    if len(bboxes) != len(names):
        return (), (), [f"{len(bboxes)} boxes, but {len(names)} category names"]
    if not bboxes:
        return (), (), ["no boxes"]
    problems = [f"category {i} is {shown(name)}, expected a name" for i, name in enumerate(names) if not _is_name(name)]
    boxes = []
    for index, bbox in enumerate(bboxes):
        if problem := _box_problem(bbox):
            problems.append(f"box {index} {problem}")
        else:
            y0, x0, y1, x1 = (min(max(float(value), 0.0), 1.0) for value in bbox)
            boxes.append((x0, y0, x1, y1))
    if not problems and not any(name.startswith(wanted) for name in names):
        problems.append(f"no box of a category that starts with {wanted}; found {cut(', '.join(sorted(set(names))))}")
    return tuple(boxes), tuple(names), problems


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name)


def _box_problem(bbox: Any) -> str | None:
    """What is wrong with one (y_min, x_min, y_max, x_max)."""
    if not isinstance(bbox, list | tuple) or len(bbox) != 4:
        return f"is {shown(bbox)}, expected (y_min, x_min, y_max, x_max)"
    box = cut("(" + ", ".join(f"{v:.6g}" if isinstance(v, float) else repr(v) for v in bbox) + ")")
    if not all(isinstance(value, int | float) and -math.inf < value < math.inf for value in bbox):
        return f"{box} holds what is not a number"
    if not all(-ROUNDING <= value <= 1 + ROUNDING for value in bbox):
        return f"{box} lies outside 0..1"
    y0, x0, y1, x1 = (min(max(value, 0), 1) for value in bbox)
    if y0 > y1 or x0 > x1:
        return f"{box} is in the wrong order: expected y_min < y_max and x_min < x_max"
    if y0 == y1 or x0 == x1:
        return f"{box} has zero area"
    return None


def _upright(encoded: bytes, max_pixels: int) -> tuple[bytes, tuple[int, int], str]:
    """Decode an image in full and undo its EXIF orientation.

    Returns (encoded bytes, (width, height), digest of the pixels). The bytes stay as they are unless the
    image has to be turned; then they are a JPEG of quality 95 without chroma subsampling, so that boxes on
    fine lines survive.
    Raises one of DECODING_ERRORS where it is no image, or not a whole one, or has too many pixels to decode it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # a large photograph is none; errors remain
        with open_picture(encoded) as opened:
            if math.prod(opened.size) > max_pixels:
                width, height = opened.size
                raise ValueError(f"{width} x {height} pixels, more than max_image_pixels, {max_pixels:,}")
            if opened.getexif().get(_ORIENTATION) not in _TURNED:
                return encoded, opened.size, _digest(opened)
            turned = ImageOps.exif_transpose(opened).convert("RGB")
    buffer = io.BytesIO()
    turned.save(buffer, "JPEG", quality=95, subsampling=0)
    # The digest of the pixels before they are encoded again: a lossless copy of the same picture has it too.
    return buffer.getvalue(), turned.size, _digest(turned)


def _digest(image: Image.Image) -> str:
    """SHA-256 of the size and the RGB pixels: the same picture with other metadata counts as the same."""
    width, height = image.size
    return hashlib.sha256(struct.pack("<II", width, height) + image.convert("RGB").tobytes()).hexdigest()
