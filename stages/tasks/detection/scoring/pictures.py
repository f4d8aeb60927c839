"""Boxes drawn on their pictures: ground truth dashed green, prediction red, the IoU above."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from stages.core.documents import cut
from stages.core.errors import printable
from stages.tasks.detection.samples.records import Box, DetectionRecord

MAX_WIDTH = 512
"""Pixels; a report holds many of them."""
TRUTH_COLOUR = (0, 185, 70)
PREDICTION_COLOUR = (225, 25, 25)
_LINE = 3
_DASH = 9
_FONT_SIZE = 15


def ordered_by(_: DetectionRecord) -> str:
    """The column by which samples are the best and the worst."""
    return "iou"


def draw_prediction(record: DetectionRecord, row: Mapping[str, Any]) -> Image.Image:
    """One sample as an RGB picture, at most MAX_WIDTH wide, with a caption above it."""
    image = _scaled(record.open_image())
    draw, several = ImageDraw.Draw(image), len(record.asked) > 1
    for position, box in enumerate(row["boxes"]):
        _draw_outline(draw, _pixels(box, image.size), PREDICTION_COLOUR, dashed=False)
        if several:
            _draw_label(draw, box, image.size, row["labels"][position] or "?", PREDICTION_COLOUR, below=True)
    # The truth comes last, so that the red shows between its dashes where both lie on one line.
    for box, label in record.targets():
        _draw_outline(draw, _pixels(box, image.size), TRUTH_COLOUR, dashed=True)
        if several:
            _draw_label(draw, box, image.size, label, TRUTH_COLOUR)
    return _captioned(image, f"IoU {row['iou']:.2f}" if row["valid"] else "IoU 0.00, no box", record.image_id)


def draw_truth(record: DetectionRecord) -> Image.Image:
    """A sample's boxes that are asked for, with their labels, as an RGB picture at most MAX_WIDTH wide."""
    return draw_boxes(record, record.targets(), TRUTH_COLOUR)


def draw_boxes(record: DetectionRecord, boxes: Sequence[tuple[Box, str]], colour: tuple[int, int, int]) -> Image.Image:
    """Boxes with their labels on a sample's picture, RGB and at most MAX_WIDTH wide."""
    image = _scaled(record.open_image())
    draw = ImageDraw.Draw(image)
    for box, label in boxes:
        _draw_outline(draw, _pixels(box, image.size), colour, dashed=False)
        _draw_label(draw, box, image.size, label, colour)
    return image


def _scaled(image: Image.Image) -> Image.Image:
    if image.width <= MAX_WIDTH:
        return image
    height = max(1, round(image.height * MAX_WIDTH / image.width))
    return image.resize((MAX_WIDTH, height), Image.Resampling.LANCZOS)


def _draw_label(
    draw: ImageDraw.ImageDraw,
    box: Box | Sequence[float],
    size: tuple[int, int],
    label: str,
    colour: tuple[int, int, int],
    *,
    below: bool = False,
) -> None:
    """In the box's corner, on white: at its top, or `below`, at its bottom."""
    left, top, _, bottom = _pixels(box, size)
    place = (left + _LINE + 1, bottom - _LINE if below else top + _LINE)
    text, anchor = cut(printable(label).replace("\n", " ")), "ls" if below else "la"
    font = ImageFont.load_default(_FONT_SIZE)
    draw.rectangle(draw.textbbox(place, text, font=font, anchor=anchor), fill="white")
    draw.text(place, text, fill=colour, font=font, anchor=anchor)


def _pixels(box: Box | Sequence[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """First and last pixel of a box in x and y, inside the picture."""
    (width, height), (x0, y0, x1, y1) = size, box
    left, top = min(round(x0 * width), width - 1), min(round(y0 * height), height - 1)
    return left, top, max(round(x1 * width) - 1, left), max(round(y1 * height) - 1, top)


def _draw_outline(
    draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int], colour: tuple[int, int, int], *, dashed: bool
) -> None:
    """The frame of a box, its line inside the box."""
    if not dashed:
        draw.rectangle(box, outline=colour, width=_LINE)
        return
    left, top, right, bottom = box
    for start, end in _dashes(left, right):
        draw.rectangle((start, top, end, min(top + _LINE - 1, bottom)), fill=colour)
        draw.rectangle((start, max(bottom - _LINE + 1, top), end, bottom), fill=colour)
    for start, end in _dashes(top, bottom):
        draw.rectangle((left, start, min(left + _LINE - 1, right), end), fill=colour)
        draw.rectangle((max(right - _LINE + 1, left), start, right, end), fill=colour)


def _dashes(first: int, last: int) -> Iterator[tuple[int, int]]:
    for start in range(first, last + 1, 2 * _DASH):
        yield start, min(start + _DASH - 1, last)


def _captioned(image: Image.Image, figure: str, image_id: str) -> Image.Image:
    """The picture below a white strip with the figure, and the image's id where there is room for it."""
    font = ImageFont.load_default(_FONT_SIZE)
    text = f"{figure}   {image_id}"
    if font.getlength(text) > image.width - 8:
        text = figure
    strip = round(_FONT_SIZE * 1.6)
    captioned = Image.new("RGB", (image.width, image.height + strip), "white")
    captioned.paste(image, (0, strip))
    ImageDraw.Draw(captioned).text((4, strip // 2), text, fill="black", font=font, anchor="lm")
    return captioned
