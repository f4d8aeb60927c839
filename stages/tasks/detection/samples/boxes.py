"""Boxes as the text that a model family writes.

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
from typing import Literal

from stages.core.errors import UserError
from stages.core.families import FAMILIES, family_of
from stages.data.texts import composed

Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 in 0..1 of the upright image, x0 < x1 and y0 < y1."""
GridBox = tuple[int, int, int, int]
"""x0, y0, x1, y1 in steps of the family's grid."""
Found = tuple[GridBox, str | None] | None
"""A box in a completion with its label; None for a malformed box."""
AnswerForm = Literal["native", "json"]

TARGET = "nutrition-table"
"""The category that is asked for if a dataset names none, and every category that starts with it."""


def reading_order(target: tuple[Box, str]) -> Box:
    """A key to sort boxes with labels from top to bottom, and from left to right if their tops are level."""
    (x0, y0, x1, y1), _ = target
    return y0, x0, y1, x1


@dataclass(frozen=True)
class Decoded:
    """The boxes that a completion names."""

    boxes: tuple[Box, ...]
    """The well-formed boxes, in the order of the completion."""
    malformed: int
    """Malformed boxes. They do not invalidate the well-formed boxes beside them."""
    labels: tuple[str | None, ...] = ()
    """The label of each of the boxes; None if the completion gives it none."""
    none: bool = False
    """Whether the completion is that there is no box, and nothing else."""


@dataclass(frozen=True)
class Codec:
    """The form in which one model family writes boxes."""

    steps: int | None
    """Steps of the grid on either side of the image; None if a step is a pixel of the resized image."""
    render: Callable[[Sequence[tuple[GridBox, str]]], str]
    find: Callable[[str], Iterator[Found]]
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
    if vision.boxes.form == "json":
        return Codec(vision.boxes.steps, _render_json, _find_json, none="[]")
    return Codec(vision.boxes.steps, _render_grounding, _find_grounding, none="none")


def codec_of(answer: AnswerForm, family: str) -> str:
    """The family that gives the form of boxes that a model of `family` is asked for."""
    return "qwen3_vl" if answer == "json" else family


def encode_boxes(
    targets: Sequence[tuple[Box, str]], *, family: str = "qwen2_vl", size: tuple[int, int] | None = None
) -> str:
    """The answer that names these boxes by their labels, in reading order.

    size: (width, height) in pixels of the resized image, for the families that count them.
    """
    form = codec(family)
    width, height = form.grid(size)
    grid_boxes = []
    for box, label in sorted(targets, key=reading_order):
        x0, y0, x1, y1 = box
        assert 0 <= x0 < x1 <= 1, box
        assert 0 <= y0 < y1 <= 1, box
        (left, right), (top, bottom) = _to_grid(x0, x1, width), _to_grid(y0, y1, height)
        grid_boxes.append(((left, top, right, bottom), label))
    return form.render(grid_boxes) if grid_boxes else form.none


def decode_boxes(text: str, *, family: str = "qwen2_vl", size: tuple[int, int] | None = None) -> Decoded:
    """The boxes in a raw completion, special tokens kept. Never raises for anything a model wrote.

    Spaces, fractions, missing tokens, reversed or empty boxes and coordinates outside the grid make a box malformed.
    """
    form = codec(family)
    width, height = form.grid(size)
    boxes: list[Box] = []
    labels: list[str | None] = []
    malformed = 0
    for found in form.find(text):
        (x0, y0, x1, y1), label = found or ((0, 0, 0, 0), None)
        if 0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height:
            boxes.append((x0 / width, y0 / height, x1 / width, y1 / height))
            labels.append(label and composed(label))
        else:
            malformed += 1
    stripped = text.strip()
    none = stripped.startswith(form.none) and bool(_MARKUP.fullmatch(stripped, len(form.none)))
    return Decoded(tuple(boxes), malformed, tuple(labels), none)


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


# Five digits are more than any grid has; without a limit, int() refuses a model's endless number.
_POINTS = re.compile(r"\(([0-9]{1,5}),([0-9]{1,5})\),\(([0-9]{1,5}),([0-9]{1,5})\)")
_MEANT_AS_BOX = re.compile(
    r"<\|box_start\|>(?P<inside>.*?)(?P<end><\|box_end\|>|(?=<\|box_start\|>)|\Z)"
    r"|\([0-9]+,[0-9]+\),\([0-9]+,[0-9]+\)(?:<\|box_end\|>)?|<\|box_end\|>",
    re.DOTALL,
)


def _render_grounding(boxes: Sequence[tuple[GridBox, str]]) -> str:
    return "".join(
        f"<|object_ref_start|>{label}<|object_ref_end|><|box_start|>({x0},{y0}),({x1},{y1})<|box_end|>"
        for (x0, y0, x1, y1), label in boxes
    )


def _find_grounding(text: str) -> Iterator[Found]:
    end = 0
    for match in _MEANT_AS_BOX.finditer(text):
        before, end = text[end : match.start()], match.end()
        if match["end"] and (points := _POINTS.fullmatch(match["inside"])):
            x0, y0, x1, y1 = (int(number) for number in points.groups())
            yield (x0, y0, x1, y1), _label_at_end(before)
        else:
            yield None


def _label_at_end(text: str) -> str | None:
    """The label with which a text ends, as it stands before a box."""
    named, mark, rest = text.rpartition("<|object_ref_end|>")
    has_label = mark and not rest and "<|object_ref_start|>" in named
    return named.rpartition("<|object_ref_start|>")[2] if has_label else None


# A flat JSON object, which is what a box is; the list and the fence around it do not matter. Braces within its texts,
# which are labels, are text. The limit, that of a label, keeps an endless completion from being read over and over.
_FLAT_OBJECT = re.compile(r'\{(?:"(?:[^"\\]|\\.){0,2000}+"|[^{}])*+(?:\}|\Z)', re.DOTALL)


def _render_json(boxes: Sequence[tuple[GridBox, str]]) -> str:
    return json.dumps([{"bbox_2d": list(box), "label": label} for box, label in boxes], ensure_ascii=False)


def _find_json(text: str) -> Iterator[Found]:
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
            yield None
