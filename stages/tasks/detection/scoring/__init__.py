"""Scores of answers: how well they name the boxes that are there, in figures, rows and examples.

Three families of figures, over the same samples:

- one IoU a sample. The original experiment's: first ground-truth box against first predicted one, 0 if the answer has
  none. Or, if the dataset says so (`scored_boxes: all`), of all boxes, matched one to one: 0 for one that is missing or
  too many. An image without a box scores 1 if the answer is that there is none;
- several boxes an image: boxes matched one to one, then counted over the whole set;
- COCO mean average precision, which ranks boxes by a score; SCORE_POLICY says where that comes from.

If several labels are asked for, a predicted box matches those of its own label only.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scipy.optimize import linear_sum_assignment

from stages.core.errors import printable
from stages.core.records import cut
from stages.kit.statistics import figures
from stages.tasks.detection.samples import Box, Decoded, DetectionRecord, codec_of, decode_boxes

Floats = NDArray[np.float64]

PREDICTIONS = pa.schema(
    [
        ("image_id", pa.string()),
        ("text", pa.string()),
        ("valid", pa.bool_()),
        ("boxes", pa.list_(pa.list_(pa.float64()))),
        ("truth", pa.list_(pa.list_(pa.float64()))),
        ("labels", pa.list_(pa.string())),
        ("truth_labels", pa.list_(pa.string())),
        ("iou", pa.float64()),
        ("matched_iou", pa.float64()),
    ]
)
"""Columns of predictions.parquet: they have their types even if no answer holds a box."""

SCORE_POLICY = "answer-order"
"""Generated text carries no confidence, and COCO mAP needs one. Under this policy the box at position k of an answer
(from 0) scores 1 / (1 + k): all first boxes rank before all second ones, and equals stay in the order of the data. The
figure compares answers given under the same policy; it does not compare with a detector's that has real scores."""

MAX_WIDTH = 512
"""Pixels of an example; a report holds many of them."""
TRUTH_COLOUR = (0, 185, 70)
PREDICTION_COLOUR = (225, 25, 25)
_LINE, _FONT_SIZE = 3, 15


def summary(metrics: Mapping[str, Any]) -> str:
    """The original experiment's figures in a line."""
    return (
        f"mean IoU {metrics['mean_iou']:.3f}, detection rate {metrics['detection_rate']:.0%}, "
        f"IoU>0.5 {metrics['iou_over_50']:.0%}, IoU>0.7 {metrics['iou_over_70']:.0%} of {metrics['samples']} samples"
    )


def pairwise_iou(boxes: Sequence[Box] | Floats, others: Sequence[Box] | Floats) -> Floats:
    """Overlap of every box with every other box: intersection over union.

    boxes:  (N, 4) float, x0 y0 x1 y1, any one unit.
    others: (M, 4), the same.
    Returns (N, M) in [0, 1]; a zero-area box scores 0.
    Raises ValueError if x1 < x0 or y1 < y0.
    """
    a, b = (np.asarray(given, dtype=np.float64).reshape(-1, 4) for given in (boxes, others))
    for given in (a, b):
        if reversed_rows := np.flatnonzero((given[:, 2:] < given[:, :2]).any(axis=1)).tolist():
            raise ValueError(f"boxes {reversed_rows} are reversed: {given[reversed_rows].tolist()}")
    top_left = np.maximum(a[:, None, :2], b[None, :, :2])  # (N, M, 2)
    bottom_right = np.minimum(a[:, None, 2:], b[None, :, 2:])
    overlap = np.clip(bottom_right - top_left, 0, None).prod(axis=2)
    area_a, area_b = ((given[:, 2:] - given[:, :2]).prod(axis=1) for given in (a, b))
    union = area_a[:, None] + area_b[None, :] - overlap
    # A union of 0, or one that underflows, only if both boxes are (as good as) empty.
    iou: Floats = np.divide(overlap, union, out=np.zeros_like(overlap), where=union > 0)
    return iou.clip(0, 1)


def matched_ious(
    truth: Sequence[Box],
    predicted: Sequence[Box],
    labels: tuple[Sequence[str], Sequence[str | None]] | None = None,
) -> Floats:
    """IoU of each ground-truth box with the predicted box it is matched to; 0 if none is left for it.

    labels: of truth and of predicted, of which equal ones match; None if any may match any.

    One to one, such that the sum of the IoUs is the largest possible (Hungarian method), so the order of an answer does
    not matter and a box named twice counts once.
    Returns (len(truth),).
    """
    overlaps = pairwise_iou(truth, predicted)
    if labels is not None:
        ours, theirs = (np.array(each, dtype=object) for each in labels)
        overlaps = np.where(ours[:, None] == theirs[None, :], overlaps, 0.0)
    rows, columns = linear_sum_assignment(overlaps, maximize=True)
    matched = np.zeros(len(truth))
    matched[rows] = overlaps[rows, columns]
    return matched


def score(
    records: Sequence[DetectionRecord],
    texts: Sequence[str],
    *,
    answer_format: None = None,
    family: str = "qwen2_vl",
    sizes: Sequence[tuple[int, int]] | None = None,
) -> tuple[dict[str, float | int | str], list[dict[str, Any]]]:
    """Score raw answers, one for each record.

    sizes: (width, height) of the resized images, for the model families that answer in their pixels.
    Returns (metrics, rows): the flat figures of metrics.json, and the rows of predictions.parquet in the order of the
    records. The original experiment's figures take the box that was annotated first, as it did; all else takes the
    ground truth in reading order, in which it is asked for.
    """
    assert len(records) == len(texts) > 0, f"{len(texts)} answers for {len(records)} records"
    sizes_or_none = [None] * len(texts) if sizes is None else sizes
    answers = [
        decode_boxes(text, family=codec_of(record.answer, family), size=size)
        for record, text, size in zip(records, texts, sizes_or_none, strict=True)
    ]
    truths = [record.target_boxes() for record in records]
    matched = [_matched(record, answer) for record, answer in zip(records, answers, strict=True)]
    ious = np.array([_iou(*each) for each in zip(records, answers, matched, strict=True)])
    valid = [bool(answer.boxes) if truth else answer.none for answer, truth in zip(answers, truths, strict=True)]
    metrics: dict[str, float | int | str] = {
        "samples": len(records),
        **_sample_figures(ious),
        "detection_rate": sum(valid) / len(valid),
        "parse_failure_rate": (len(valid) - sum(valid)) / len(valid),
        "malformed_boxes": sum(len(answer.problems) for answer in answers),
        **_multi_box_figures(matched, num_predicted=sum(len(answer.boxes) for answer in answers)),
        **_mean_average_precision(records, answers),
        "map_score_policy": SCORE_POLICY,
    }
    if empty := [right for right, truth in zip(valid, truths, strict=True) if not truth]:
        metrics |= {"empty_images": len(empty), "empty_images_right": sum(empty) / len(empty)}
    rows = [
        {
            "image_id": record.image_id,
            "text": text,
            "valid": readable,
            "boxes": [list(box) for box in answer.boxes],
            "truth": [list(box) for box in truth],
            "labels": list(answer.labels),
            "truth_labels": [label for _, label in record.targets()],
            "iou": float(iou),
            "matched_iou": float(each.mean()) if truth else float(iou),
        }
        for record, text, answer, truth, iou, each, readable in zip(
            records, texts, answers, truths, ious, matched, valid, strict=True
        )
    ]
    return metrics, rows


def _matched(record: DetectionRecord, answer: Decoded) -> Floats:
    """IoU of each of the record's boxes with its match."""
    labels = ([label for _, label in record.targets()], answer.labels) if len(record.asked) > 1 else None
    return matched_ious(record.target_boxes(), answer.boxes, labels)


def _iou(record: DetectionRecord, answer: Decoded, matched: Floats) -> float:
    """IoU of one sample, as its dataset defines it."""
    first, predicted = record.first_annotated(), answer.boxes
    if first is None:
        return float(answer.none)
    if record.scored_boxes == "first":
        return float(pairwise_iou([first], predicted[:1])[0, 0]) if predicted else 0.0
    return float(matched.sum()) / max(len(matched), len(predicted))


def _sample_figures(ious: Floats) -> dict[str, float]:
    """Figures of one IoU a sample; "over" is strictly over. A single sample has no interval."""
    return {
        **figures("mean_iou", ious),
        "median_iou": float(np.median(ious)),
        "min_iou": float(ious.min()),
        "max_iou": float(ious.max()),
        "iou_over_50": float((ious > 0.5).mean()),
        "iou_over_70": float((ious > 0.7).mean()),
    }


def _multi_box_figures(matched: Sequence[Floats], num_predicted: int) -> dict[str, float]:
    """Figures over all boxes of all images; a predicted box is right if its match reaches the threshold."""
    ious = np.concatenate(matched)
    if not ious.size:  # only images without a box, of so few samples
        return {}
    found = {"matched_mean_iou": float(ious.mean())}
    for percent in (50, 75):
        num_right = int((ious >= percent / 100).sum())
        found[f"precision_{percent}"] = num_right / num_predicted if num_predicted else 0.0
        found[f"recall_{percent}"] = num_right / len(ious)
        found[f"f1_{percent}"] = 2 * num_right / (num_predicted + len(ious))
    return found


def _mean_average_precision(records: Sequence[DetectionRecord], answers: Sequence[Decoded]) -> dict[str, float]:
    """COCO's AP over IoU 0.50:0.95, at 0.50 and at 0.75, averaged over the labels that are there: at most 100 boxes an
    image. A predicted box of a label that is not asked for counts nowhere here, and against precision above.
    """
    names = ("map_50_95", "map_50", "map_75")
    several = any(len(record.asked) > 1 for record in records)
    labels = [[label if several else None for _, label in record.targets()] for record in records]
    numbers = {label: number for number, label in enumerate(sorted({x for some in labels for x in some}, key=str), 1)}
    if not numbers:
        return {}
    sizes = [(record.width, record.height) for record in records]
    truth_boxes = _coco_boxes([record.target_boxes() for record in records], labels, sizes, numbers)
    found = [[label if several else None for label in answer.labels] for answer in answers]
    predicted = _coco_boxes([answer.boxes for answer in answers], found, sizes, numbers)
    if not predicted:  # loadRes refuses an empty list
        return dict.fromkeys(names, 0.0)
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    annotations = [{**box, "area": box["bbox"][2] * box["bbox"][3], "iscrowd": 0} for _, box in truth_boxes]
    results = [{**box, "score": 1 / (1 + position)} for position, box in predicted]
    truth = COCO()
    truth.dataset = {
        "images": [{"id": image, "width": w, "height": h} for image, (w, h) in enumerate(sizes)],
        "categories": [{"id": number} for number in numbers.values()],
        # pycocotools takes a match with annotation 0 for no match.
        "annotations": [{"id": number, **annotation} for number, annotation in enumerate(annotations, start=1)],
    }
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), iouType="bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: float(evaluation.stats[i]) for i, name in enumerate(names)}


def _coco_boxes(
    boxes_by_image: Sequence[Sequence[Box]],
    labels_by_image: Sequence[Sequence[str | None]],
    sizes: Sequence[tuple[int, int]],
    numbers: Mapping[str | None, int],
) -> list[tuple[int, dict[str, Any]]]:
    """(position of the box in its image, COCO's entry) of every box whose label has a number.

    bbox is [x, y, width, height] in pixels; image_id is the image's index.
    """
    return [
        (
            position,
            {
                "image_id": image,
                "category_id": numbers[label],
                "bbox": [x0 * w, y0 * h, (x1 - x0) * w, (y1 - y0) * h],
            },
        )
        for image, (boxes, labels, (w, h)) in enumerate(zip(boxes_by_image, labels_by_image, sizes, strict=True))
        for position, ((x0, y0, x1, y1), label) in enumerate(zip(boxes, labels, strict=True))
        if label in numbers
    ]


def ordered_by(_: DetectionRecord) -> str:
    """The column by which samples are best and worst."""
    return "iou"


def draw_prediction(record: DetectionRecord, row: Mapping[str, Any]) -> Image.Image:
    """One sample as an RGB image at most MAX_WIDTH wide: truth thin and green, prediction red, the IoU above."""
    several = len(record.asked) > 1
    predicted = list(zip(row["boxes"], row["labels"] if several else [None] * len(row["boxes"]), strict=True))
    image = draw_boxes(record, [(box, (label or "?") if several else None) for box, label in predicted], below=True)
    # The truth comes last and is thinner, so that the red shows beside it where both lie on one line.
    for box, label in record.targets():
        _draw_box(image, box, label if several else None, TRUTH_COLOUR, line=1)
    font = ImageFont.load_default(_FONT_SIZE)
    figure = f"IoU {row['iou']:.2f}" if row["valid"] else "IoU 0.00, no box"
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
        text, anchor = cut(printable(label).replace("\n", " ")), "ls" if below else "la"
        font = ImageFont.load_default(_FONT_SIZE)
        draw.rectangle(draw.textbbox(place, text, font=font, anchor=anchor), fill="white")
        draw.text(place, text, fill=colour, font=font, anchor=anchor)
