"""The records of detection: a picture, the boxes on it, and what is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa

from stages.kit.data.images import ImageRecord, require_prepared_image
from stages.kit.data.prepared import PreparedRow, read_prepared

Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 in 0..1 of the upright image, x0 < x1 and y0 < y1."""

AnswerForm = Literal["native", "json"]
ScoredBoxes = Literal["first", "all"]

TARGET = "nutrition-table"
"""What is asked for where a dataset names no `category`. Categories that start with it (nutrition-table-small, ...)
count as it."""
PROMPT = "Detect the bounding box of the nutrition table."
"""How it is asked for where a dataset names neither `category` nor `prompt`."""

SCHEMA = pa.schema(
    [
        ("image_id", pa.string()),
        ("image", pa.binary()),
        ("width", pa.int64()),
        ("height", pa.int64()),
        ("boxes", pa.list_(pa.list_(pa.float64()))),
        ("categories", pa.list_(pa.string())),
        ("sha256", pa.string()),
        ("labels", pa.list_(pa.string())),
        ("asked", pa.list_(pa.string())),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("scored_boxes", pa.string()),
    ]
)
"""Of a prepared split."""


@dataclass(frozen=True, kw_only=True)
class DetectionRecord(ImageRecord):
    boxes: tuple[Box, ...]
    """In the order of the dataset."""
    categories: tuple[str, ...]
    """One for each box."""
    labels: tuple[str | None, ...]
    """For each box, what an answer calls it; None where it is not asked for."""
    asked: tuple[str, ...] = (TARGET,)
    """The labels that are asked for; none for all. The label of an answer's box counts where there are several."""
    prompt: str = PROMPT
    """How it is asked for."""
    answer: AnswerForm = "native"
    """How boxes are written: in the model family's own form, or as JSON."""
    scored_boxes: ScoredBoxes = "first"
    """Whether a sample's IoU is of the box that was annotated first, or of all that are asked for."""

    def content(self) -> list[Any]:
        return [*super().content(), self.boxes, self.categories]

    def first_annotated(self) -> Box | None:
        """Of the boxes that are asked for, the one that the dataset names first."""
        return next((box for box, _ in self._wanted()), None)

    def target_boxes(self) -> tuple[Box, ...]:
        """The boxes that are asked for, in reading order, as they are to be answered."""
        return tuple(box for box, _ in self.targets())

    def targets(self) -> tuple[tuple[Box, str], ...]:
        """The boxes that are asked for, each with its label, in reading order."""
        return tuple(sorted(self._wanted(), key=lambda found: place_in_reading(found[0])))

    def _wanted(self) -> list[tuple[Box, str]]:
        return [(box, label) for box, label in zip(self.boxes, self.labels, strict=True) if label is not None]


def reading_order(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """From top to bottom, and from left to right where tops are level."""
    return tuple(sorted(boxes, key=place_in_reading))


def place_in_reading(box: Box) -> Box:
    """The order of reading, as what is smaller comes first."""
    return box[1], box[0], box[3], box[2]


def read_split(prepared_dir: Path, split: str) -> list[DetectionRecord]:
    """The records of a prepared split, in their order.

    Raises UserError where prepare has not run, or what it wrote is damaged.
    """
    return read_prepared(prepared_dir, split, SCHEMA, _from_row)


def _from_row(row: dict[str, Any], place: PreparedRow) -> DetectionRecord:
    boxes, names = tuple(tuple(box) for box in row["boxes"]), ("categories", "labels", "asked")
    for x0, y0, x1, y1 in boxes:
        if not (0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1):
            raise ValueError(f"box {(x0, y0, x1, y1)} is not x0 < x1, y0 < y1 in 0..1")
    texts: dict[str, Any] = {name: tuple(row[name]) for name in names}
    for name in ("categories", "labels"):
        if len(boxes) != len(texts[name]):
            raise ValueError(f"{len(boxes)} boxes, but {len(texts[name])} {name}")
    known_labels = {None, *(texts["asked"] or texts["labels"])}
    if None in texts["categories"] or not known_labels.issuperset(texts["labels"]):
        raise ValueError(f"categories {texts['categories']}, labels {texts['labels']} of {texts['asked']}")
    for name, known in (("answer", get_args(AnswerForm)), ("scored_boxes", get_args(ScoredBoxes))):
        if row[name] not in known:
            raise ValueError(f"{name} is {row[name]!r}")
    require_prepared_image(row)
    return DetectionRecord(**{**row, **texts, "boxes": boxes}, place=place)
