"""How well a model's answers name the boxes that are there.

Three families of figures, over the same samples:

- one IoU a sample. The original experiment's: first ground-truth box against first predicted one, 0 where the answer
  has none. Or, where the dataset says so (`scored_boxes: all`), of all boxes, matched one to one: 0 for one that is
  missing or too many. A picture without a box is right, with 1, where the answer says that there is none;
- several boxes an image: boxes matched one to one, then counted over the whole set;
- COCO mean average precision, which ranks boxes by a score; SCORE_POLICY says where that comes from.

Where several labels are asked for, a predicted box matches those of its own label only.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from stages.kit.statistics import figures
from stages.tasks.detection.samples.boxes import Decoded, codec_of, decode_boxes
from stages.tasks.detection.samples.records import Box, DetectionRecord

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
"""Of predictions.parquet: the columns have their types even where no answer holds a box."""

SCORE_POLICY = "answer-order"
"""Generated text carries no confidence, and COCO mAP needs one. Under this policy the box at position k of
its answer (from 0) scores 1 / (1 + k): all first boxes rank before all second ones, and equals stay in the
order of the data. The figure compares answers given under the same policy; it does not compare with a
detector's that has real scores."""


def summary(metrics: Mapping[str, Any]) -> str:
    """The original experiment's figures in a line."""
    return (
        f"mean IoU {metrics['mean_iou']:.3f}, detection rate {metrics['detection_rate']:.0%}, "
        f"IoU>0.5 {metrics['iou_over_50']:.0%}, IoU>0.7 {metrics['iou_over_70']:.0%} of {metrics['samples']} samples"
    )


def pairwise_iou(boxes: Sequence[Box] | Floats, others: Sequence[Box] | Floats) -> Floats:
    """Overlap of every box with every other box: intersection over union.

    boxes:  (N, 4) float, x0 y0 x1 y1, any one unit.
    others: (M, 4) likewise.
    Returns (N, M) in [0, 1]; a zero-area box scores 0.
    Raises ValueError where x1 < x0 or y1 < y0.
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
    # A union of 0, or one that underflows, only where both boxes are (as good as) empty.
    iou: Floats = np.divide(overlap, union, out=np.zeros_like(overlap), where=union > 0)
    return iou.clip(0, 1)


def matched_ious(
    truth: Sequence[Box],
    predicted: Sequence[Box],
    labels: tuple[Sequence[str], Sequence[str | None]] | None = None,
) -> Floats:
    """IoU of each ground-truth box with the predicted box it is matched to; 0 where none is left for it.

    labels: of truth and of predicted, of which equal ones match; None where any may match any.

    One to one, such that the sum of the IoUs is the largest possible (Hungarian method), so the order of an
    answer does not matter and a box named twice counts once.
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
    predictions = [answer.boxes for answer in answers]
    matched = [_matched(record, answer) for record, answer in zip(records, answers, strict=True)]
    ious = np.array([_iou(*each) for each in zip(records, answers, matched, strict=True)])
    valid = [answer.valid if truth else answer.none for answer, truth in zip(answers, truths, strict=True)]
    metrics = {
        "samples": len(records),
        **_sample_figures(ious),
        **_answer_figures(answers, valid),
        **_multi_box_figures(matched, num_predicted=sum(len(boxes) for boxes in predictions)),
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
    """Of one sample, as its dataset says."""
    first, predicted = record.first_annotated(), answer.boxes
    if first is None:
        return float(answer.none)
    if record.scored_boxes == "first":
        return float(pairwise_iou([first], predicted[:1])[0, 0]) if predicted else 0.0
    return float(matched.sum()) / max(len(matched), len(predicted))


def _sample_figures(ious: Floats) -> dict[str, float]:
    """Of one IoU a sample; "over" is strictly over. A single sample has no interval."""
    return {
        **figures("mean_iou", ious),
        "median_iou": float(np.median(ious)),
        "min_iou": float(ious.min()),
        "max_iou": float(ious.max()),
        "iou_over_50": float((ious > 0.5).mean()),
        "iou_over_70": float((ious > 0.7).mean()),
    }


def _answer_figures(answers: Sequence[Decoded], valid: Sequence[bool]) -> dict[str, float | int]:
    """Shares of the answers with and without a usable box, and the number of malformed boxes in all.

    valid: whether an answer has a box, or, of a picture without one, says so.
    """
    num_valid = sum(valid)
    return {
        "detection_rate": num_valid / len(answers),
        "parse_failure_rate": (len(answers) - num_valid) / len(answers),
        "malformed_boxes": sum(answer.malformed for answer in answers),
    }


def _multi_box_figures(matched: Sequence[Floats], num_predicted: int) -> dict[str, float]:
    """Over all boxes of all images; a predicted box is right where its match reaches the threshold."""
    ious = np.concatenate(matched)
    if not ious.size:  # only pictures without a box, of so few samples
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
    """(position of the box in its image, what COCO says of it) of every box whose label has a number.

    bbox is [x, y, width, height] in pixels; an image is called by its index.
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
