"""One set of images with boxes, written in every form that is read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageOps

from stages.tasks.detection.samples.boxes import Box
from stages.tasks.detection.sources.rows import Columns
from tests.data.images import patch_jpeg, png

CLASSES = ("cup", "red lid", "Nährwerte")


@dataclass(frozen=True, kw_only=True)
class Photo:
    name: str
    """With its suffix."""
    encoded: bytes
    boxes: Sequence[tuple[Box, str]] = ()
    """x0 y0 x1 y1 in 0..1 of the upright image, and its category."""

    @property
    def size(self) -> tuple[int, int]:
        try:
            return ImageOps.exif_transpose(Image.open(io.BytesIO(self.encoded))).size
        except (OSError, Image.DecompressionBombError):
            return 40, 30

    def pixels(self, box: Box) -> list[float]:
        return [value * side for value, side in zip(box, self.size * 2, strict=True)]


Photos = Mapping[str, Sequence[Photo]]
"""Photos of each split."""

PHOTOS: Photos = {
    "train": [
        Photo(name="a.png", encoded=png((9, 0, 0)), boxes=[((0.25, 0.1, 0.5, 0.9), "cup")]),
        Photo(
            name="b.jpg",
            encoded=patch_jpeg((0.1, 0.25, 0.5, 0.45), (80, 160), 6),
            boxes=[
                ((0.5, 0.5, 1.0, 1.0), "red lid"),
                ((0.1, 0.25, 0.5, 0.45), "cup"),
                ((0.0, 0.0, 1.0, 1.0), "Nährwerte"),
            ],
        ),
        Photo(name="empty.png", encoded=png((0, 9, 0))),
    ],
    "val": [Photo(name="c.png", encoded=png((0, 0, 9)), boxes=[((0.125, 0.5, 0.875, 0.75), "Nährwerte")])],
}
"""One is stored turned, one has several boxes of several categories, one has none."""


def _write(path: Path, content: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def write_coco(folder: Path, photos: Photos) -> None:
    numbers = {name: number for number, name in enumerate(CLASSES, start=3)}
    for split, some in photos.items():
        annotations = [(image, *found) for image, photo in enumerate(some) for found in photo.boxes]
        document = {
            "images": [
                {"id": image, "file_name": photo.name, "width": photo.size[0], "height": photo.size[1]}
                for image, photo in enumerate(some)
            ],
            "annotations": [
                {"id": number, "image_id": image, "category_id": numbers[name], "bbox": _xywh(some[image].pixels(box))}
                for number, (image, box, name) in enumerate(annotations)
            ],
            "categories": [{"id": number, "name": name} for name, number in numbers.items()],
        }
        _write(folder / f"annotations/instances_{split}2017.json", json.dumps(document))
        for photo in some:
            _write(folder / f"{split}2017/{photo.name}", photo.encoded)


def write_yolo(folder: Path, photos: Photos) -> None:
    _write(folder / "data.yaml", f"train: ../train/images\nval: ../val/images\nnames: {json.dumps(CLASSES)}\n")
    for split, some in photos.items():
        for photo in some:
            _write(folder / f"{split}/images/{photo.name}", photo.encoded)
            lines = [
                f"{CLASSES.index(name)} {(x0 + x1) / 2} {(y0 + y1) / 2} {x1 - x0} {y1 - y0}\n"
                for (x0, y0, x1, y1), name in photo.boxes
            ]
            _write((folder / f"{split}/labels/{photo.name}").with_suffix(".txt"), "".join(lines))


def write_voc(folder: Path, photos: Photos) -> None:
    for split, some in photos.items():
        _write(folder / f"ImageSets/Main/{split}.txt", "".join(f"{Path(photo.name).stem}\n" for photo in some))
        for photo in some:
            _write(folder / f"JPEGImages/{photo.name}", photo.encoded)
            (width, height), found = photo.size, ""
            for box, name in photo.boxes:
                corners = zip(("xmin", "ymin", "xmax", "ymax"), photo.pixels(box), strict=True)
                inside = "".join(f"<{key}>{value}</{key}>" for key, value in corners)
                found += f"\n<object><name>{escape(name)}</name><bndbox>{inside}</bndbox></object>"
            size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
            xml = f"<annotation>\n<filename>{photo.name}</filename>{size}{found}\n</annotation>\n"
            _write((folder / f"Annotations/{photo.name}").with_suffix(".xml"), xml)


COLUMNS = Columns(image_id="name", image="photo", boxes="found.box", category="found.kind")


def write_parquet(folder: Path, photos: Photos) -> None:
    """A ClassLabel as the library `datasets` writes it, with the columns of COLUMNS."""
    features: dict[str, Any] = {
        "name": {"dtype": "string", "_type": "Value"},
        "found": {
            "feature": {"kind": {"names": CLASSES, "_type": "ClassLabel"}, "box": {"_type": "List"}},
            "_type": "List",
        },
    }
    schema = pa.schema(
        [
            ("name", pa.string()),
            ("photo", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            ("found", pa.list_(pa.struct([("kind", pa.int64()), ("box", pa.list_(pa.float64()))]))),
        ],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    for split in photos:
        name = {"val": "validation"}.get(split, split)
        rows = [
            {
                "name": Path(photo.name).stem,
                "photo": {"bytes": photo.encoded},
                "found": [{"kind": CLASSES.index(kind), "box": _xywh(photo.pixels(box))} for box, kind in photo.boxes],
            }
            for photo in photos[split]
        ]
        (folder / "data").mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist(rows, schema=schema)
        pq.write_table(table, folder / f"data/{name}-00000-of-00001.parquet")


def _xywh(corners: Sequence[float]) -> list[float]:
    x0, y0, x1, y1 = corners
    return [x0, y0, x1 - x0, y1 - y0]


WRITERS: dict[str, Callable[[Path, Photos], None]] = {
    "coco": write_coco,
    "yolo": write_yolo,
    "voc": write_voc,
    "parquet": write_parquet,
}
