"""Raw rows, as every form of dataset gives them, and how one becomes a record.

A row has image_id, image {bytes} and objects {bbox, category_name}, as the Open Food Facts schema has it (dataset
openfoodfacts/nutrition-table-detection on the hub). Readers of other forms add `named`, what a message calls each of
the boxes; `size`, the [width, height] that the annotations say the picture has; and `problems` found so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.documents import cut, shown
from stages.core.params.schema import STRICT, Text
from stages.kit.data.images import MAX_IMAGE_PIXELS, parse_image
from stages.kit.data.texts import markup_problem
from stages.tasks.detection.samples.records import PROMPT, TARGET, AnswerForm, Box, DetectionRecord, ScoredBoxes

DataForm = Literal["parquet", "coco", "yolo", "voc"]
BoxOrder = Literal["yxyx", "xyxy", "xywh", "cxcywh"]
BoxUnit = Literal["share", "pixels"]

REQUIRED = ("image_id", "image.bytes", "objects.bbox", "objects.category_name")
"""Columns of the Open Food Facts schema; its width, height and meta are not used."""

ROUNDING = 1e-6
"""How far outside 0..1 a coordinate may lie: what float32 and a division by the image size leave behind."""
ROUNDING_PIXELS = 0.5
"""The same in pixels: annotations are often rounded to whole ones."""

_OBJECTS = ("bbox", "category_name")
_NAMES = {
    "yxyx": ("y_min", "x_min", "y_max", "x_max"),
    "xyxy": ("x_min", "y_min", "x_max", "y_max"),
    "xywh": ("x_min", "y_min", "width", "height"),
    "cxcywh": ("x_center", "y_center", "width", "height"),
}


@dataclass(frozen=True, kw_only=True)
class BoxForm:
    """How a dataset writes a box of the image as it is seen, its EXIF rotation applied."""

    order: BoxOrder = "yxyx"
    unit: BoxUnit = "share"
    """Of the image's width and height, or pixels."""

    def expected(self) -> str:
        return f"({', '.join(_NAMES[self.order])})"

    def corners(self, bbox: Sequence[float]) -> Box:
        """x0, y0, x1, y1 in the same unit."""
        a, b, c, d = map(float, bbox)
        match self.order:
            case "yxyx":
                return b, a, d, c
            case "xyxy":
                return a, b, c, d
            case "xywh":
                return a, b, a + c, b + d
            case "cxcywh":
                return a - c / 2, b - d / 2, a + c / 2, b + d / 2


OPEN_FOOD_FACTS = BoxForm()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Columns:
    """Columns of parquet files with images and boxes; `outer.inner` is a field of a struct, or of a list of structs."""

    image_id: Text | None = None
    """Null: an image is named by its file and row."""
    image: Text = "image"
    """The bytes of an image, or a struct with `bytes`."""
    boxes: Text = "objects.bbox"
    category: Text = "objects.category"
    """Names, or numbers whose names the dataset's description in the file has (ClassLabel of datasets)."""
    order: BoxOrder = "xywh"
    """y_min, x_min, y_max, x_max; x_min, y_min, x_max, y_max; x_min, y_min, width, height; or with the centre first."""
    unit: BoxUnit = "pixels"
    """Or shares of the image's width and height."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reader:
    """Settings of a detection dataset: how it is read, what the model is asked, and how it answers."""

    format: DataForm | None = None
    """Form of a folder of images with boxes. Null: the files decide, if they have signs of one form only."""
    columns: Columns | None = None
    """Columns of parquet files, if they are not Open Food Facts' (docs/data.md)."""
    category: Text | Annotated[tuple[Text, ...], Field(min_length=1)] | None = TARGET
    """Categories that are asked for: one name, and every category that starts with it counts; a list of whole names; or
    null for all categories."""
    label: dict[Text, Text] = Field(default_factory=dict)
    """Name of a category in answers, if it is not its own."""
    prompt: Text | None = None
    """Question about each image. Null: the task's own, which names the labels."""
    answer: AnswerForm = "native"
    """How an answer writes boxes: as the model's family does, or as JSON, in thousandths of the image."""
    scored_boxes: ScoredBoxes | None = None
    """Whether an image's IoU is of its first box or of all. Null: the first; with a list of categories all."""
    empty_images: bool = False
    """Whether an image without a box that is asked for is a sample, whose answer is `none`; else it is invalid."""
    max_image_pixels: Annotated[int, Field(ge=1, le=178_956_970)] = MAX_IMAGE_PIXELS
    """An image with more is an invalid row, refused before it is decoded (nine bytes a pixel). Pillow's limit is the
    maximum."""

    def label_of(self, name: str) -> str | None:
        """What an answer calls a box of this category; None where it is not asked for."""
        if isinstance(self.category, str):
            return self.label.get(self.category, self.category) if name.startswith(self.category) else None
        return self.label.get(name, name) if self.category is None or name in self.category else None

    def labels(self) -> tuple[str, ...]:
        """All that are asked for."""
        one = (self.category,) if isinstance(self.category, str) else self.category or ()
        return tuple(dict.fromkeys(self.label.get(name, name) for name in one))

    def question(self) -> str:
        """The prompt; the task's own names the labels."""
        if self.prompt is not None:
            return self.prompt
        *others, last = (label.replace("-", " ") for label in self.labels() or ("objects",))
        if not others:
            return PROMPT.replace(TARGET.replace("-", " "), last)
        return f"Detect the bounding boxes of every {', '.join(others)} and {last}."

    def fields(self) -> dict[str, Any]:
        """Of each record."""
        scored = self.scored_boxes or ("first" if isinstance(self.category, str) else "all")
        return {"asked": self.labels(), "prompt": self.question(), "answer": self.answer, "scored_boxes": scored}

    def missing(self, names: Sequence[str]) -> str | None:
        """What is wrong where none of the boxes is asked for."""
        if self.empty_images or any(self.label_of(name) for name in names):
            return None
        found = cut(", ".join(sorted(set(names))))
        one = f"of a category that starts with {self.category}"
        wanted = one if isinstance(self.category, str) else f"of {', '.join(self.category or ())}"
        what = f"no box {wanted}; found {found}" if names else "no boxes"
        return f"{what}; with empty_images: true it is a sample that has none"


def parse_row(
    row: Mapping[str, Any],
    *,
    reader: Reader | None = None,
    form: BoxForm = OPEN_FOOD_FACTS,
) -> DetectionRecord | list[str]:
    """Check one raw row.

    Returns the record, or every problem that keeps the row from being one.
    """
    reader = reader or Reader()
    image, image_problems = parse_image(row, reader.max_image_pixels)
    size = (image["width"], image["height"]) if image else None
    found, object_problems = _parse_objects(row, form, size)
    problems = [*row.get("problems", ()), *image_problems, *_size_problems(row.get("size"), size), *object_problems]
    names = tuple(name for _, name in found)
    if not problems and (problem := reader.missing(names)):
        problems.append(": ".join(filter(None, (problem, row.get("none_because")))))
    if problems:
        return problems
    return DetectionRecord(
        **image,
        **reader.fields(),
        boxes=tuple(box for box, _ in found),
        categories=names,
        labels=tuple(map(reader.label_of, names)),
    )


def _parse_objects(
    row: Mapping[str, Any], form: BoxForm, size: tuple[int, int] | None
) -> tuple[list[tuple[Box, str]], list[str]]:
    """The boxes with their categories, and what is wrong."""
    objects = row.get("objects")
    if not isinstance(objects, Mapping):
        return [], [f"objects is {shown(objects)}, expected bbox and category_name"]
    if missing := [f"column objects.{name} is missing" for name in _OBJECTS if objects.get(name) is None]:
        return [], missing
    bboxes, names = (objects[name] for name in _OBJECTS)
    if not (isinstance(bboxes, list | tuple) and isinstance(names, list | tuple)):
        return [], [f"objects has bbox {shown(bboxes)} and category_name {shown(names)}, expected lists"]
    if len(bboxes) != len(names):
        return [], [f"{len(bboxes)} boxes, but {len(names)} category names"]
    found, problems = [], []
    for index, (bbox, name) in enumerate(zip(bboxes, names, strict=True)):
        here = row["named"][index] if row.get("named") else f"box {index}"
        box = _parse_box(bbox, form, size)
        if isinstance(box, str):
            problems.append(f"{here} {box}")
        if not (isinstance(name, str) and name):
            problems.append(f"category {index} is {shown(name)}, expected a name")
        elif problem := markup_problem(name):
            problems.append(f"category {index}: {problem}")
        elif not isinstance(box, str):
            found.append((box, name))
    return found, problems


def _size_problems(declared: Any, size: tuple[int, int] | None) -> list[str]:
    if declared is None or size is None or tuple(declared) == size:
        return []
    (width, height), (w, h) = size, declared
    turned = ": the boxes may be of the picture before its EXIF rotation" if (h, w) == size else ""
    return [f"the annotations are for {w:g} x {h:g} pixels, the picture is {width} x {height} as it is seen{turned}"]


def _parse_box(bbox: Any, form: BoxForm, size: tuple[int, int] | None) -> Box | str:
    """The box within 0..1, or what is wrong with it. Without a size nobody knows how large a pixel is."""
    if not isinstance(bbox, list | tuple) or len(bbox) != 4:
        return f"is {shown(bbox)}, expected {form.expected()}"
    box = cut("(" + ", ".join(f"{v:.6g}" if isinstance(v, float) else repr(v) for v in bbox) + ")")
    if not all(isinstance(value, int | float) and -_LARGE < value < _LARGE for value in bbox):
        return f"{box} holds what is not a number"
    if form.order in ("xywh", "cxcywh") and min(bbox[2:]) < 0:
        return f"{box} has a negative width or height"
    x0, y0, x1, y1 = form.corners(bbox)
    width, height = (size or (math.inf, math.inf)) if form.unit == "pixels" else (1, 1)
    slack = ROUNDING_PIXELS if form.unit == "pixels" else ROUNDING
    if min(x0, y0, x1, y1) < -slack or max(x0, x1) > width + slack or max(y0, y1) > height + slack:
        limits = "0..1" if form.unit == "share" else f"the picture, {width} x {height} pixels"
        return f"{box} lies outside {limits}" if size or form.unit == "share" else f"{box} lies outside the picture"
    x0, x1 = (min(max(value, 0.0), width) for value in (x0, x1))
    y0, y1 = (min(max(value, 0.0), height) for value in (y0, y1))
    if y0 > y1 or x0 > x1:
        return f"{box} is in the wrong order: expected {' and '.join(_order(form))}"
    if y0 == y1 or x0 == x1:
        return f"{box} has zero area"
    x0, x1, y0, y1 = x0 / width, x1 / width, y0 / height, y1 / height
    return (x0, y0, x1, y1) if size is None or (x0 < x1 and y0 < y1) else f"{box} has zero area"


_LARGE = 1e12
"""More than any coordinate: squares and sums of it are still numbers."""


def _order(form: BoxForm) -> tuple[str, str]:
    return ("y_min < y_max", "x_min < x_max") if form.order == "yxyx" else ("x_min < x_max", "y_min < y_max")
