"""Records of detection, the conversation about each, and boxes as the text that a model family answers with.

A box is written between grounding tokens or as JSON, in steps of a fixed grid or in pixels of the resized image,
depending on the family (stages/core/families.py). Coordinates are rounded to the nearest step, halves up, so that a box
comes back within half a step of where it was. (Truncation, as is often seen, moves every box up and left by half a step
on average.) A box narrower than a step is widened to one step.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
from PIL import Image, ImageDraw

from stages.core.errors import UserError
from stages.core.families import FAMILIES, family_of
from stages.kit.data.conversation import Conversation
from stages.kit.data.images import ImageRecord, require_prepared_image
from stages.kit.data.prepared import PreparedRow, read_prepared

Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 in 0..1 of the upright image, x0 < x1 and y0 < y1."""
GridBox = tuple[int, int, int, int]
"""x0, y0, x1, y1 in steps of the family's grid."""
AnswerForm = Literal["native", "json"]
ScoredBoxes = Literal["first", "all"]

TARGET = "nutrition-table"
"""The category that is asked for if a dataset names none, and every category that starts with it."""
PROMPT = "Detect the bounding box of the nutrition table."
"""The question about TARGET."""

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
"""Columns of a prepared split."""


@dataclass(frozen=True, kw_only=True)
class DetectionRecord(ImageRecord):
    boxes: tuple[Box, ...]
    """In the order of the dataset."""
    categories: tuple[str, ...]
    """The category of each box."""
    labels: tuple[str | None, ...]
    """The name of each box in answers; None if it is not asked for."""
    asked: tuple[str, ...] = (TARGET,)
    """The labels that are asked for; empty for all. With several, a predicted box's label counts."""
    prompt: str = PROMPT
    answer: AnswerForm = "native"
    """The form of boxes: the model family's own, or JSON."""
    scored_boxes: ScoredBoxes = "first"
    """Whether a sample's IoU is of the box that was annotated first, or of all that are asked for."""

    def content(self) -> list[Any]:
        return [*super().content(), self.boxes, self.categories]

    def first_annotated(self) -> Box | None:
        """The first box of the dataset that is asked for."""
        return next((box for box, label in zip(self.boxes, self.labels, strict=True) if label is not None), None)

    def targets(self) -> tuple[tuple[Box, str], ...]:
        """The boxes that are asked for, each with its label, in reading order."""
        asked = [(box, label) for box, label in zip(self.boxes, self.labels, strict=True) if label is not None]
        return tuple(sorted(asked, key=lambda target: reading_order(target[0])))

    def target_boxes(self) -> tuple[Box, ...]:
        return tuple(box for box, _ in self.targets())


def reading_order(box: Box) -> Box:
    """A key to sort boxes from top to bottom, and from left to right if their tops are level."""
    return box[1], box[0], box[3], box[2]


def read_split(prepared_dir: Path, split: str) -> list[DetectionRecord]:
    """The records of a prepared split, in their order. Raises UserError if it is not prepared, or damaged."""
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


def check(model_type: str, answer_format: str | None) -> None:
    """Raises UserError for a model that writes no boxes, and for an answer format, as there is but one."""
    codec(model_type)
    if answer_format is not None:
        raise UserError(f"answer_format: detection has one answer format, boxes; found {answer_format!r}")


def conversation(record: DetectionRecord, *, answered: bool, answer_format: None = None) -> Conversation:
    """The image and the question. The answer depends on the model: see `ForModel`."""
    assert not answered, "a model's family determines how boxes are written"
    return _conversation(record.image_id, record, record.prompt, None)


@dataclass(frozen=True)
class ForModel:
    """The task for one model, which answers in its family's form."""

    family: str
    """model_type of its config."""
    resized: Callable[[int, int], tuple[int, int]]
    """From the (width, height) of an image to those that the model sees."""

    def conversation(self, record: DetectionRecord, *, answered: bool, answer_format: None = None) -> Conversation:
        """The image and the question; with the true boxes as the assistant's answer if `answered`."""
        answer = None
        if answered:
            targets = record.targets()
            boxes, labels = [box for box, _ in targets], [label for _, label in targets]
            form, size = codec_of(record.answer, self.family), self.resized(record.width, record.height)
            answer = encode_boxes(boxes, family=form, size=size, label=labels)
        return _conversation(record.image_id, record, record.prompt, answer)

    def score_options(self, records: Sequence[DetectionRecord]) -> dict[str, Any]:
        """Arguments of `scoring.score` that depend on the model."""
        return {"family": self.family, "sizes": [self.resized(record.width, record.height) for record in records]}


def probes(answer_format: None = None) -> list[Conversation]:
    """Two answered conversations about plain drawings, upright and wide, to compare two models on."""
    boxes: tuple[Box, ...] = ((0.2, 0.1, 0.7, 0.5), (0.25, 0.6, 0.9, 0.95))
    found = []
    for index, size in enumerate(((224, 280), (280, 224))):
        image = Image.linear_gradient("L").resize(size).convert("RGB")
        draw = ImageDraw.Draw(image)
        for x0, y0, x1, y1 in boxes[: index + 1]:
            draw.rectangle((x0 * size[0], y0 * size[1], x1 * size[0], y1 * size[1]), fill="white", outline="black")
        found.append(_conversation(f"probe-{index}", image, PROMPT, encode_boxes(boxes[: index + 1])))
    return found


def _conversation(
    sample_id: str, image: Image.Image | DetectionRecord, prompt: str, answer: str | None
) -> Conversation:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}]
    if answer is not None:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return Conversation(sample_id=sample_id, messages=messages, images=[image])


@dataclass(frozen=True)
class Decoded:
    """The boxes that an answer names."""

    boxes: tuple[Box, ...]
    """The well-formed boxes, in the order of the answer."""
    problems: tuple[str, ...]
    """One for each malformed box. They do not invalidate the well-formed boxes beside them."""
    labels: tuple[str | None, ...] = ()
    """The label of each of the boxes; None if the answer gives it none."""
    none: bool = False
    """Whether the answer is that there is no box, and nothing else."""


@dataclass(frozen=True)
class Codec:
    """The form in which one model family writes boxes."""

    steps: int | None
    """Steps of the grid on either side of the image; None if a step is a pixel of the resized image."""
    render: Callable[[Sequence[tuple[GridBox, str]]], str]
    """Boxes and their labels as text."""
    find: Callable[[str], Iterator[tuple[GridBox, str | None] | str]]
    """The boxes in a text: coordinates and label, or the problem of a malformed box."""
    none: str
    """The answer if there is no box."""

    def grid(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Steps in x and in y. Raises ValueError if they depend on a size that is not given."""
        if self.steps is not None:
            return self.steps, self.steps
        if size is None:
            raise ValueError("this model family counts pixels: pass size=(width, height) of the resized image")
        return size


@cache
def codec(family: str) -> Codec:
    """family: the `model_type` of the model's config. Raises UserError for one that writes no boxes."""
    vision = family_of(family).vision
    if vision is None or vision.boxes is None:
        known = [name for name, each in FAMILIES.items() if each.vision and each.vision.boxes]
        raise UserError(f"detection asks for boxes as {', '.join(known)} writes them; the base is a {family}")
    render, find, none = _FORMS[vision.boxes.form]
    return Codec(steps=vision.boxes.steps, render=render, find=find, none=none)


def codec_of(answer: AnswerForm, family: str) -> str:
    """The family whose form of boxes a model of `family` is asked for."""
    return "qwen3_vl" if answer == "json" else family


def encode_boxes(
    boxes: Sequence[Box],
    *,
    family: str = "qwen2_vl",
    size: tuple[int, int] | None = None,
    label: str | Sequence[str] = TARGET,
) -> str:
    """The answer that names these boxes, in reading order.

    boxes: x0 y0 x1 y1 in 0..1, x0 < x1 and y0 < y1.
    label: of all of them, or one for each.
    size:  (width, height) in pixels of the resized image, for the families that count them.
    Raises ValueError for a box of another form.
    """
    form = codec(family)
    width, height = form.grid(size)
    labels = [label] * len(boxes) if isinstance(label, str) else label
    grid_boxes = []
    for (x0, y0, x1, y1), name in sorted(zip(boxes, labels, strict=True), key=lambda target: reading_order(target[0])):
        if not (0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1):
            raise ValueError(f"box {(x0, y0, x1, y1)} is not x0 < x1, y0 < y1 in 0..1")
        (left, right), (top, bottom) = _to_grid(x0, x1, width), _to_grid(y0, y1, height)
        grid_boxes.append(((left, top, right, bottom), name))
    return form.render(grid_boxes) if grid_boxes else form.none


def decode_boxes(text: str, *, family: str = "qwen2_vl", size: tuple[int, int] | None = None) -> Decoded:
    """The boxes in a model's raw answer, special tokens kept. Never raises for anything a model wrote.

    Spaces, fractions, missing tokens, reversed or empty boxes and coordinates outside the grid make a box malformed.
    """
    form = codec(family)
    width, height = form.grid(size)
    boxes: list[Box] = []
    labels: list[str | None] = []
    problems: list[str] = []
    for found in form.find(text):
        if isinstance(found, str):
            problems.append(found)
        elif problem := _grid_problem(found[0], width, height):
            problems.append(problem)
        else:
            x0, y0, x1, y1 = found[0]
            boxes.append((x0 / width, y0 / height, x1 / width, y1 / height))
            labels.append(found[1])
    answer = text.strip()
    none = answer.startswith(form.none) and bool(_MARKUP.fullmatch(answer, len(form.none)))
    return Decoded(tuple(boxes), tuple(problems), tuple(labels), none)


_MARKUP = re.compile(r"(?:<\|[a-z_]{1,40}\|>|\s)*+")
"""The end of the turn, and padding behind it."""


def _to_grid(low: float, high: float, steps: int) -> tuple[int, int]:
    """The nearest steps to an interval of 0..1, at least one apart."""
    first, last = math.floor(low * steps + 0.5), math.floor(high * steps + 0.5)
    if first == last:
        # Widen to the side on which most of the interval lies; past the last step there is none.
        up = (low + high) / 2 * steps >= first and first < steps
        return (first, first + 1) if up else (first - 1, first)
    return first, last


def _grid_problem(box: GridBox, width: int, height: int) -> str | None:
    x0, y0, x1, y1 = box
    if not (0 <= x0 <= width and 0 <= x1 <= width and 0 <= y0 <= height and 0 <= y1 <= height):
        return f"{_shortened(str(box))} lies outside 0..{width}, 0..{height}"
    if x0 > x1 or y0 > y1:
        return f"{box} is reversed"
    return f"{box} has zero area" if x0 == x1 or y0 == y1 else None


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


# Five digits are more than any grid has; without a limit, int() refuses a model's endless number.
_POINTS = re.compile(r"\(([0-9]{1,5}),([0-9]{1,5})\),\(([0-9]{1,5}),([0-9]{1,5})\)")
_MEANT_AS_BOX = re.compile(
    r"<\|box_start\|>(?P<inside>.*?)(?P<end><\|box_end\|>|(?=<\|box_start\|>)|\Z)"
    r"|(?P<bare>\([0-9]+,[0-9]+\),\([0-9]+,[0-9]+\)(?:<\|box_end\|>)?|<\|box_end\|>)",
    re.DOTALL,
)


def _render_grounding(boxes: Sequence[tuple[GridBox, str]]) -> str:
    return "".join(
        f"<|object_ref_start|>{label}<|object_ref_end|><|box_start|>({x0},{y0}),({x1},{y1})<|box_end|>"
        for (x0, y0, x1, y1), label in boxes
    )


def _find_grounding(text: str) -> Iterator[tuple[GridBox, str | None] | str]:
    end = 0
    for match in _MEANT_AS_BOX.finditer(text):
        before, end = text[end : match.start()], match.end()
        if match["inside"] is None:
            yield f"{_shortened(match['bare'])} has no <|box_start|> before it"
        elif not match["end"]:
            yield f"{_shortened(match['inside'])} has no <|box_end|> after it"
        elif points := _POINTS.fullmatch(match["inside"]):
            x0, y0, x1, y1 = (int(number) for number in points.groups())
            yield (x0, y0, x1, y1), _label_at_end(before)
        else:
            yield f"{_shortened(match['inside'])} is not (x0,y0),(x1,y1)"


def _label_at_end(text: str) -> str | None:
    """The label with which a text ends, as it stands before a box."""
    named, mark, rest = text.rpartition("<|object_ref_end|>")
    has_label = mark and not rest and "<|object_ref_start|>" in named
    return named.rpartition("<|object_ref_start|>")[2] if has_label else None


# A flat JSON object, which is what a box is; the list and the fence around it do not matter.
_FLAT_OBJECT = re.compile(r"\{[^{}]*+(?:\}|\Z)")


def _render_json(boxes: Sequence[tuple[GridBox, str]]) -> str:
    return json.dumps([{"bbox_2d": list(box), "label": label} for box, label in boxes], ensure_ascii=False)


def _find_json(text: str) -> Iterator[tuple[GridBox, str | None] | str]:
    for match in _FLAT_OBJECT.finditer(text):
        if '"bbox_2d"' not in match[0]:  # as part of the pattern, it would take the square of the text's length
            continue
        try:
            found = json.loads(match[0])
        except (ValueError, RecursionError):  # the latter for a model's endless "[[[["
            found = {}
        numbers, label = found.get("bbox_2d"), found.get("label")
        if isinstance(numbers, list) and len(numbers) == 4 and all(type(number) is int for number in numbers):
            x0, y0, x1, y1 = numbers
            yield (x0, y0, x1, y1), label if isinstance(label, str) else None
        else:
            yield f"{_shortened(match[0])} has no bbox_2d of four whole numbers"


_FORMS = {"grounding": (_render_grounding, _find_grounding, "none"), "json": (_render_json, _find_json, "[]")}
"""Functions that write and find boxes, and the answer if there is none."""
