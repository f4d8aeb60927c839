"""Settings of a dataset; the rows that the reader of each form gives, and how one becomes a record."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from stages.core.params.schema import Text
from stages.core.records import STRICT, cut, shown
from stages.core.tasks import PlainReader
from stages.data.given_images import MAX_IMAGE_PIXELS, parse_image
from stages.data.sources import other_split
from stages.data.texts import composed, markup_problem
from stages.tasks.detection.samples import PROMPT, DetectionRecord, ScoredBoxes
from stages.tasks.detection.samples.boxes import TARGET, AnswerForm, Box

DataForm = Literal["parquet", "coco", "yolo", "voc"]
BoxOrder = Literal["yxyx", "xyxy", "xywh", "cxcywh"]
BoxUnit = Literal["share", "pixels"]

ROUNDING = {"share": 1e-6, "pixels": 0.5}
"""Distance outside the image at which a coordinate is still valid. In shares: the error of float32 and a division by
the image size. In pixels: annotations are often rounded to whole ones."""
MAX_COORDINATE = 1e12
"""More than any coordinate: squares and sums of it are still finite."""


ORDERS: dict[BoxOrder, tuple[str, Callable[[float, float, float, float], Box]]] = {
    "yxyx": ("y_min, x_min, y_max, x_max", lambda y0, x0, y1, x1: (x0, y0, x1, y1)),
    "xyxy": ("x_min, y_min, x_max, y_max", lambda x0, y0, x1, y1: (x0, y0, x1, y1)),
    "xywh": ("x_min, y_min, width, height", lambda x, y, w, h: (x, y, x + w, y + h)),
    "cxcywh": ("x_center, y_center, width, height", lambda x, y, w, h: (x - w / 2, y - h / 2, x + w / 2, y + h / 2)),
}
"""The numbers of a box in each order, for messages, and a function from them to x0, y0, x1, y1."""


NO_PLAIN_BOX = {
    key: what
    for what, keys in {
        "a crowd, no box of one object": "iscrowd is_crowd",
        "a group, no box of one object": "is_group_of isgroupof",
        "to be ignored": "ignore ignored gt_ignore ignore_flag",
        "deleted": "deleted",
        "rotated": "rotation angle theta robndbox rbbox",
    }.items()
    for key in keys.split()
}
"""Fields of a box, in any form, which is none to be learnt if they have a value; and what it is then."""
OWN_GROUP = r"(?:^|/)((?:\d{8}|\d{12,14})(?=_\d{1,3}(?!\d))|[^/]+(?=\.rf\.))[^/]*$"
"""The beginning of an image's name that is its group: the barcode of a product in Open Food Facts, before the number of
its photograph, or the name of a photograph, before that of its version by Roboflow."""


def _group_pattern(group: str) -> str:
    if "(" in group:
        try:
            groups = re.compile(group).groups
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        if not groups:
            raise ValueError("a pattern without a group in parentheses")
    return group


Name = Annotated[Text, AfterValidator(composed)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BoxForm:
    """The form in which a dataset writes a box of the upright image, EXIF rotation applied."""

    order: BoxOrder
    """y_min, x_min, y_max, x_max; x_min, y_min, x_max, y_max; x_min, y_min, width, height; or with the centre first."""
    unit: BoxUnit
    """Or shares of the image's width and height."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Columns(BoxForm):
    """Columns of parquet files with images and boxes; `outer.inner` is a field of a struct, or of a list of structs."""

    order: BoxOrder = "xywh"
    unit: BoxUnit = "pixels"
    image_id: Text | None = None
    """Null: an image is named by its file and row."""
    image: Text = "image"
    """The bytes of an image, or a struct with `bytes`."""
    boxes: Text = "objects.bbox"
    category: Text = "objects.category"
    """Names, or numbers with names in the dataset's description in the file (ClassLabel of datasets)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reader(PlainReader):
    """Settings of a detection dataset: how it is read, what the model is asked, and how it answers."""

    format: DataForm | None = None
    """Form of a folder of images with boxes. Null: the files decide, if they have signs of one form only."""
    columns: Columns | None = None
    """Columns of parquet files, if they are not Open Food Facts' (docs/data.md)."""
    category: Name | Annotated[tuple[Name, ...], Field(min_length=1)] | None = TARGET
    """Categories that are asked for: one name, and every category that starts with it counts; a list of whole names; or
    null for all categories."""
    label: dict[Name, Name] = Field(default_factory=dict)
    """Name of a category in answers, if it is not its own."""
    prompt: Text | None = None
    """Question about each image. Null: the task's own, which names the labels."""
    answer: AnswerForm = "native"
    """The form of boxes in answers: that of the model's family, or JSON, in thousandths of the image."""
    scored_boxes: ScoredBoxes | None = None
    """Whether an image's IoU is of its first box or of all. Null: the first; with a list of categories all."""
    empty_images: bool = False
    """Whether an image without a box that is asked for is a sample, with the answer `none`; else it is invalid."""
    unit: BoxUnit | None = None
    """Unit of the boxes, if it is not that of the form."""
    group: Annotated[Text, AfterValidator(_group_pattern)] | None = None
    """Name of a group, such as a patient, which is in one split only: a regular expression for the path of an image,
    its first group in parentheses; or a key of COCO's image, or a column of parquet. Null: a product's
    photographs (BARCODE_NUMBER) and a photograph's versions by Roboflow (NAME.rf.ID.jpg) are groups, held out together;
    one in two splits is counted."""
    max_image_pixels: Annotated[int, Field(ge=1, le=178_956_970)] = MAX_IMAGE_PIXELS
    """An image with more is an invalid row, refused before it is decoded (nine bytes a pixel). Pillow's limit is the
    maximum."""

    def categories(self) -> tuple[str, ...]:
        """The categories that are named; empty for all."""
        return (self.category,) if isinstance(self.category, str) else self.category or ()

    def labels(self) -> tuple[str, ...]:
        """The labels that are asked for; empty for all."""
        return tuple(dict.fromkeys(self.label.get(name, name) for name in self.categories()))

    def label_of(self, name: str) -> str | None:
        """The name of this category in answers; None if it is not asked for."""
        if isinstance(self.category, str):
            return self.label.get(self.category, self.category) if name.startswith(self.category) else None
        return self.label.get(name, name) if self.category is None or name in self.category else None

    def question(self) -> str:
        if self.prompt is not None:
            return self.prompt
        *others, last = (label.replace("-", " ") for label in self.labels() or ("object",))
        if isinstance(self.category, str):
            return PROMPT.replace(TARGET.replace("-", " "), last)
        return f"Detect the bounding boxes of every {', '.join(others)}{' and ' if others else ''}{last}."

    def fields(self) -> dict[str, Any]:
        """The fields of a record that are the same for all."""
        scored = self.scored_boxes or ("first" if isinstance(self.category, str) else "all")
        return {"asked": self.labels(), "prompt": self.question(), "answer": self.answer, "scored_boxes": scored}


NamedBox = tuple[str, Any, Any]
"""A box's name in messages, its four numbers and its category."""


class Row(NamedTuple):
    """An image with its boxes, as a dataset has it."""

    image_id: Any
    image: Any
    """Encoded."""
    boxes: Sequence[NamedBox]
    problems: Sequence[str] = ()
    """Problems found so far."""
    size: Sequence[Any] | None = None
    """Width and height of the image according to the annotations. If one is missing, NaN or 0, which is some tools'
    word for unknown, they say nothing."""
    none_because: str = ""
    """The reason if there can be no box."""
    file: str = ""
    """Path of the image, if it is a file of its own."""
    entry: Mapping[str, Any] = {}
    """Further fields of the image, one of which may be its group."""


OPEN_FOOD_FACTS = Columns(
    image_id="image_id", image="image.bytes", category="objects.category_name", order="yxyx", unit="share"
)
"""The columns of openfoodfacts/nutrition-table-detection on the hub that are read."""


def parse_row(row: Row, reader: Reader, form: BoxForm, split: str) -> DetectionRecord | list[str]:
    """The record of a row of this split, or every problem that keeps the row from being one."""
    image, image_problems = parse_image(row.image_id, row.image, reader.max_image_pixels)
    size = (image["width"], image["height"]) if image else None
    group, ungrouped = _group_of(row, reader.group)
    problems = [*row.problems, *image_problems, *_size_problems(row.size, size), *ungrouped]
    # A list beside an image is of its boxes.
    if fault := no_plain_box({key: value for key, value in row.entry.items() if not isinstance(value, list)}):
        problems.append(f"the image {fault}")
    elif fault := other_split(row.entry, split):
        problems.append(fault)
    boxes: list[Box] = []
    for name, numbers, category in row.boxes:
        box = _parse_box(numbers, form, size)
        if isinstance(box, str):
            problems.append(f"{name} {box}")
        else:
            boxes.append(box)
        if not (isinstance(category, str) and category.strip()):
            problems.append(f"{name} has the category {shown(category)}, expected a name")
        elif problem := markup_problem(category):
            problems.append(f"{name}: {problem}")
    if problems:
        return problems
    categories = tuple(composed(category).strip() for _, _, category in row.boxes)
    labels = tuple(map(reader.label_of, categories))
    if not reader.empty_images and not any(labels):
        return [_nothing_asked_for(categories, reader, row.none_because)]
    named: dict[str, Any] = {**reader.fields(), "categories": categories, "labels": labels}
    return DetectionRecord(**image, **named, boxes=tuple(boxes), group=group)


def _group_of(row: Row, group: str | None) -> tuple[str, list[str]]:
    """The name of an image's group, empty for none; and the problem if it should have one."""
    if group is None or "(" in group:
        path = row.file or str(row.image_id)
        match = re.search(group or OWN_GROUP, path)
        name, there = match[1] if match else None, f"it finds no name in {path!r}"
    elif (name := value_at(row.entry, group)) is None:
        there = "the image has no value of it; a pattern of its path has parentheses"
    else:
        there = f"it is {shown(name)}, expected a text or a whole number"
    if isinstance(name, str | int) and name != "":
        return composed(str(name)), []
    return "", [f"no group by reader.group, {group}: {there}"] if group else []


def value_at(value: Any, path: str) -> Any:
    """The value of a field, `outer.inner` for one of a struct, or those of a list of structs."""
    for step in path.split("."):
        if isinstance(value, list):
            value = [each.get(step) if isinstance(each, Mapping) else None for each in value]
        else:
            value = value.get(step) if isinstance(value, Mapping) else None
    return value


def no_plain_box(fields: Mapping[str, Any]) -> str | None:
    """The reason why a box with these fields beside it is none to be learnt; None without one."""
    inner = fields.get("attributes")  # as CVAT writes them
    for key, value in {**fields, **(inner if isinstance(inner, Mapping) else {})}.items():
        if (what := NO_PLAIN_BOX.get(str(key).lower())) and has_value(value):
            return f"is {what} ({key} {shown(value)}); leave it out"
    return None


def has_value(value: Any) -> bool:
    """Whether a field says something: false for null, false, 0, and for what is empty, also as texts."""
    text = value.strip().lower() if isinstance(value, str) else value
    if isinstance(text, str) and text.replace(".", "", 1).isdecimal():
        return float(text) != 0
    return bool(text) and text not in ("false", "null", "none", "no")


def _nothing_asked_for(categories: Sequence[str], reader: Reader, why: str) -> str:
    what = "no boxes"
    if categories:
        named = ", ".join(reader.categories())
        wanted = f"a category that starts with {named}" if isinstance(reader.category, str) else named
        what = f"no box of {wanted} (reader.category); found {cut(', '.join(sorted(set(categories))))}"
    return f"{what}; with empty_images: true it is a sample that has none{f': {why}' if why else ''}"


def _size_problems(declared: Sequence[Any] | None, size: tuple[int, int] | None) -> list[str]:
    w, h = (side if isinstance(side, int | float) and side == side else 0 for side in declared or (0, 0))
    if not w or not h or size is None or (w, h) == size:
        return []
    width, height = size
    turned = ": the boxes may be of the image before its EXIF rotation" if (h, w) == size else ""
    return [f"the annotations are for {w:g} x {h:g} pixels, the upright image is {width} x {height}{turned}"]


def _parse_box(bbox: Any, form: BoxForm, size: tuple[int, int] | None) -> Box | str:
    """The box in 0..1, or its problem. size: of the image; None if it cannot be read."""
    expected, corners = ORDERS[form.order]
    if not isinstance(bbox, list | tuple) or len(bbox) != 4:
        return f"is {shown(bbox)}, expected ({expected})"
    text = cut("(" + ", ".join(f"{v:.6g}" if isinstance(v, float) else repr(v) for v in bbox) + ")")
    if not all(isinstance(value, int | float) and -MAX_COORDINATE < value < MAX_COORDINATE for value in bbox):
        return f"{text} holds what is not a number"
    width, height = (1, 1) if form.unit == "share" else size or (math.inf, math.inf)
    x0, y0, x1, y1 = corners(*map(float, bbox))
    slack = ROUNDING[form.unit]
    outside = min(x0, y0, x1, y1) < -slack or max(x0, x1) > width + slack or max(y0, y1) > height + slack
    x0, x1 = (min(max(value, 0.0), width) for value in (x0, x1))
    y0, y1 = (min(max(value, 0.0), height) for value in (y0, y1))
    box = x0 / width, y0 / height, x1 / width, y1 / height
    faults = (
        (form.order in ("xywh", "cxcywh") and min(bbox[2:]) < 0, "has a negative width or height"),
        (outside, f"lies outside {'0..1' if form.unit == 'share' else f'the image, {width} x {height} pixels'}"),
        (x0 > x1 or y0 > y1, f"is in the wrong order: expected ({expected})"),
        (x0 == x1 or y0 == y1 or (size is not None and not (box[0] < box[2] and box[1] < box[3])), "has zero area"),
        (form.unit == "pixels" and max(x1, y1) <= 1, "lies in 0..1, shares of the image: set reader: {unit: share}"),
    )
    return next((f"{text} {fault}" for found, fault in faults if found), box)
