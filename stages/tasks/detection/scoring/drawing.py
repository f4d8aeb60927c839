"""Samples as images, with the boxes that are there and those that a model named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from stages.core.records import cut
from stages.tasks.detection.samples import DetectionRecord
from stages.tasks.detection.samples.boxes import Box

MAX_WIDTH = 512
"""Pixels of an example; a report holds many of them."""
TRUTH_COLOUR = (0, 185, 70)
PREDICTION_COLOUR = (225, 25, 25)
_LINE, _FONT_SIZE = 3, 15


def example_image(record: DetectionRecord, row: Mapping[str, Any]) -> Image.Image:
    """One sample as an RGB image at most MAX_WIDTH wide: truth thin and green, prediction red, the IoU above."""
    several = len(record.asked) > 1
    labels = [label or "?" for label in row["labels"]] if several else [None] * len(row["boxes"])
    image = draw_boxes(record, list(zip(row["boxes"], labels, strict=True)), below=True)
    # The truth comes last and is thinner, so that the red shows beside it where both lie on one line.
    for box, label in record.targets():
        _draw_box(image, box, label if several else None, TRUTH_COLOUR, line=1)
    font = ImageFont.load_default(_FONT_SIZE)
    figure = f"IoU {row['iou']:.2f}" if row["valid"] or row["boxes"] else "IoU 0.00, no box"
    text = f"{figure}   {record.image_id}"
    strip = round(_FONT_SIZE * 1.6)
    captioned = Image.new("RGB", (image.width, image.height + strip), "white")
    captioned.paste(image, (0, strip))
    text = text if font.getlength(text) <= image.width - 8 else figure
    ImageDraw.Draw(captioned).text((4, strip // 2), text, fill="black", font=font, anchor="lm")
    return captioned


def draw_boxes(
    record: DetectionRecord,
    boxes: Sequence[tuple[Box, str | None]],
    colour: tuple[int, int, int] = PREDICTION_COLOUR,
    *,
    below: bool = False,
) -> Image.Image:
    """Boxes on a sample's image, RGB and at most MAX_WIDTH wide. below: labels at the bottom of the boxes."""
    image = record.open_image()
    if image.width > MAX_WIDTH:
        height = max(1, round(image.height * MAX_WIDTH / image.width))
        image = image.resize((MAX_WIDTH, height), Image.Resampling.LANCZOS)
    for box, label in boxes:
        _draw_box(image, box, label, colour, below=below)
    return image


def _draw_box(
    image: Image.Image,
    box: Box,
    label: str | None,
    colour: tuple[int, int, int],
    *,
    line: int = _LINE,
    below: bool = False,
) -> None:
    """The frame of a box, its line inside the box, with its label on white in the box's corner."""
    draw, (width, height), (x0, y0, x1, y1) = ImageDraw.Draw(image), image.size, box
    left, top = min(round(x0 * width), width - 1), min(round(y0 * height), height - 1)
    right, bottom = max(round(x1 * width) - 1, left), max(round(y1 * height) - 1, top)
    draw.rectangle((left, top, right, bottom), outline=colour, width=line)
    if label is not None:
        place = (left + _LINE + 1, bottom - _LINE if below else top + _LINE)
        text, anchor = cut(label.encode(errors="replace").decode().replace("\n", " ")), "ls" if below else "la"
        font = ImageFont.load_default(_FONT_SIZE)
        draw.rectangle(draw.textbbox(place, text, font=font, anchor=anchor), fill="white")
        draw.text(place, text, fill=colour, font=font, anchor=anchor)
