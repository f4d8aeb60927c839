"""Boxes as the text that a model family answers with, and back.

qwen2_vl    whole numbers 0 to 1000 of the image's width and height, between grounding tokens
qwen2_5_vl  pixels of the resized image, as JSON
qwen3_vl    whole numbers 0 to 1000, as JSON

Sources: the grounding examples in the model cards of Qwen2-VL, Qwen2.5-VL and Qwen3-VL. The recipes here use
qwen2_vl; the others hold the place where their families differ.

Coordinates are rounded to the nearest step, halves up, so a box comes back within half a step of where it
was. (Cutting the fraction off, as is often seen, moves every box up and left by half a step on average.) A
box narrower than a step that would collapse is widened to one step.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stages.tasks.detection.samples.records import TARGET, Box, reading_order

GridBox = tuple[int, int, int, int]
"""x0, y0, x1, y1 in steps of the family's grid."""


@dataclass(frozen=True)
class Decoded:
    boxes: tuple[Box, ...]
    """The well-formed boxes, in the order of the answer."""
    problems: tuple[str, ...]
    """One for each malformed box."""

    @property
    def valid(self) -> bool:
        """At least one box is well-formed. Malformed ones beside it are counted and do not take that away."""
        return bool(self.boxes)

    @property
    def malformed(self) -> int:
        return len(self.problems)


@dataclass(frozen=True)
class Codec:
    """How one model family writes boxes."""

    steps: int | None
    """Of the grid on either side of the image; None where a step is a pixel of the resized image."""
    render: Callable[[Sequence[GridBox], str], str]
    """Boxes and their label as text."""
    find: Callable[[str], Iterator[GridBox | str]]
    """What in a text means to be a box: its coordinates, or what is wrong with it."""

    def grid(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Steps in x and in y. Raises ValueError where they depend on a size that is not given."""
        if self.steps is not None:
            return self.steps, self.steps
        if size is None:
            raise ValueError("this model family counts pixels: pass size=(width, height) of the resized image")
        return size


def encode_boxes(
    boxes: Sequence[Box],
    *,
    family: str = "qwen2_vl",
    size: tuple[int, int] | None = None,
    label: str = TARGET,
) -> str:
    """The answer that names these boxes, in reading order.

    boxes: x0 y0 x1 y1 in 0..1, x0 < x1 and y0 < y1.
    size:  (width, height) in pixels of the resized image, for the families that count them.
    Raises ValueError where a box is not of that form.
    """
    codec = CODECS[family]
    width, height = codec.grid(size)
    grid_boxes = []
    for x0, y0, x1, y1 in reading_order(boxes):
        if not (0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1):
            raise ValueError(f"box {(x0, y0, x1, y1)} is not x0 < x1, y0 < y1 in 0..1")
        (left, right), (top, bottom) = _to_grid(x0, x1, width), _to_grid(y0, y1, height)
        grid_boxes.append((left, top, right, bottom))
    return codec.render(grid_boxes, label)


def decode_boxes(text: str, *, family: str = "qwen2_vl", size: tuple[int, int] | None = None) -> Decoded:
    """The boxes in a model's raw answer, special tokens kept. Never raises for what a model wrote.

    Strict in form: spaces, fractions, missing tokens, reversed or empty boxes and coordinates outside the
    grid make a box malformed. The label is not looked at: only one kind of object is ever asked for.
    """
    codec = CODECS[family]
    width, height = codec.grid(size)
    boxes: list[Box] = []
    problems: list[str] = []
    for found in codec.find(text):
        if isinstance(found, str):
            problems.append(found)
        elif problem := _grid_problem(found, width, height):
            problems.append(problem)
        else:
            x0, y0, x1, y1 = found
            boxes.append((x0 / width, y0 / height, x1 / width, y1 / height))
    return Decoded(tuple(boxes), tuple(problems))


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
    if x0 == x1 or y0 == y1:
        return f"{box} has zero area"
    return None


# Five digits are more than any grid has; without a limit, int() refuses a model's endless number.
_POINTS = re.compile(r"\(([0-9]{1,5}),([0-9]{1,5})\),\(([0-9]{1,5}),([0-9]{1,5})\)")
_MEANT_AS_BOX = re.compile(
    r"<\|box_start\|>(?P<inside>.*?)(?P<end><\|box_end\|>|(?=<\|box_start\|>)|\Z)"
    r"|(?P<bare>\([0-9]+,[0-9]+\),\([0-9]+,[0-9]+\)(?:<\|box_end\|>)?|<\|box_end\|>)",
    re.DOTALL,
)


def _render_grounding(boxes: Sequence[GridBox], label: str) -> str:
    return "".join(
        f"<|object_ref_start|>{label}<|object_ref_end|><|box_start|>({x0},{y0}),({x1},{y1})<|box_end|>"
        for x0, y0, x1, y1 in boxes
    )


def _find_grounding(text: str) -> Iterator[GridBox | str]:
    for match in _MEANT_AS_BOX.finditer(text):
        if match["inside"] is None:
            yield f"{_shortened(match['bare'])} has no <|box_start|> before it"
        elif not match["end"]:
            yield f"{_shortened(match['inside'])} has no <|box_end|> after it"
        elif points := _POINTS.fullmatch(match["inside"]):
            x0, y0, x1, y1 = (int(number) for number in points.groups())
            yield x0, y0, x1, y1
        else:
            yield f"{_shortened(match['inside'])} is not (x0,y0),(x1,y1)"


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


# A flat JSON object, which is what a box is; the list and the fence around it do not matter.
_FLAT_OBJECT = re.compile(r"\{[^{}]*+(?:\}|\Z)")


def _render_json(boxes: Sequence[GridBox], label: str) -> str:
    return json.dumps([{"bbox_2d": list(box), "label": label} for box in boxes])


def _find_json(text: str) -> Iterator[GridBox | str]:
    for match in _FLAT_OBJECT.finditer(text):
        if '"bbox_2d"' not in match[0]:  # looked for by the pattern, it would take the square of the text's length
            continue
        try:
            numbers = json.loads(match[0]).get("bbox_2d")
        except (ValueError, RecursionError):  # the latter for a model's endless "[[[["
            numbers = None
        if isinstance(numbers, list) and len(numbers) == 4 and all(type(number) is int for number in numbers):
            x0, y0, x1, y1 = numbers
            yield x0, y0, x1, y1
        else:
            yield f"{_shortened(match[0])} has no bbox_2d of four whole numbers"


CODECS = {
    "qwen2_vl": Codec(steps=1000, render=_render_grounding, find=_find_grounding),
    "qwen2_5_vl": Codec(steps=None, render=_render_json, find=_find_json),
    "qwen3_vl": Codec(steps=1000, render=_render_json, find=_find_json),
}
"""By the `model_type` of the model's config."""
