"""How well a model's answers name the boxes that are there.

Three families of figures, over the same samples:

- the original experiment's: first ground-truth box against first predicted one, 0 where the answer has none;
- several boxes an image: boxes matched one to one, then counted over the whole set;
- COCO mean average precision, which ranks boxes by a score; SCORE_POLICY says where that comes from.
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

from stages.kit.statistics.intervals import bootstrap_mean
from stages.tasks.detection.samples.boxes import Decoded, decode_boxes
from stages.tasks.detection.samples.records import Box, DetectionRecord

Floats = NDArray[np.float64]

PREDICTIONS = pa.schema(
    [
        ("image_id", pa.string()),
        ("text", pa.string()),
        ("valid", pa.bool_()),
        ("boxes", pa.list_(pa.list_(pa.float64()))),
        ("truth", pa.list_(pa.list_(pa.float64()))),
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


def matched_ious(truth: Sequence[Box], predicted: Sequence[Box]) -> Floats:
    """IoU of each ground-truth box with the predicted box it is matched to; 0 where none is left for it.

    One to one, such that the sum of the IoUs is the largest possible (Hungarian method), so the order of an
    answer does not matter and a box named twice counts once.
    Returns (len(truth),).
    """
    overlaps = pairwise_iou(truth, predicted)
    rows, columns = linear_sum_assignment(overlaps, maximize=True)
    matched = np.zeros(len(truth))
    matched[rows] = overlaps[rows, columns]
    return matched


def score(
    records: Sequence[DetectionRecord],
    texts: Sequence[str],
    *,
    target: None = None,
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
    answers = [decode_boxes(text, family=family, size=size) for text, size in zip(texts, sizes_or_none, strict=True)]
    truths = [record.target_boxes() for record in records]
    predictions = [answer.boxes for answer in answers]
    first = np.array([_first_iou(record, boxes) for record, boxes in zip(records, predictions, strict=True)])
    matched = [matched_ious(truth, boxes) for truth, boxes in zip(truths, predictions, strict=True)]
    metrics = {
        "samples": len(records),
        **_first_box_figures(first),
        **_answer_figures(answers),
        **_multi_box_figures(matched, num_predicted=sum(len(boxes) for boxes in predictions)),
        **_mean_average_precision(records, truths, predictions),
        "map_score_policy": SCORE_POLICY,
    }
    rows = [
        {
            "image_id": record.image_id,
            "text": text,
            "valid": answer.valid,
            "boxes": [list(box) for box in answer.boxes],
            "truth": [list(box) for box in truth],
            "iou": float(iou),
            "matched_iou": float(ious.mean()),
        }
        for record, text, answer, truth, iou, ious in zip(records, texts, answers, truths, first, matched, strict=True)
    ]
    return metrics, rows


def _first_iou(record: DetectionRecord, predicted: Sequence[Box]) -> float:
    return float(pairwise_iou([record.first_annotated()], predicted[:1])[0, 0]) if predicted else 0.0


def _first_box_figures(ious: Floats) -> dict[str, float]:
    """The figures of the original experiment; "over" is strictly over. A single sample has no interval."""
    interval = bootstrap_mean(ious)
    return {
        "mean_iou": float(ious.mean()),
        **({"mean_iou_low": interval.low, "mean_iou_high": interval.high} if interval else {}),
        "median_iou": float(np.median(ious)),
        "min_iou": float(ious.min()),
        "max_iou": float(ious.max()),
        "iou_over_50": float((ious > 0.5).mean()),
        "iou_over_70": float((ious > 0.7).mean()),
    }


def _answer_figures(answers: Sequence[Decoded]) -> dict[str, float | int]:
    """Shares of the answers with and without a usable box, and the number of malformed boxes in all."""
    num_valid = sum(answer.valid for answer in answers)
    return {
        "detection_rate": num_valid / len(answers),
        "parse_failure_rate": (len(answers) - num_valid) / len(answers),
        "malformed_boxes": sum(answer.malformed for answer in answers),
    }


def _multi_box_figures(matched: Sequence[Floats], num_predicted: int) -> dict[str, float]:
    """Over all boxes of all images; a predicted box is right where its match reaches the threshold."""
    ious = np.concatenate(matched)
    figures = {"matched_mean_iou": float(ious.mean())}
    for percent in (50, 75):
        num_right = int((ious >= percent / 100).sum())
        figures[f"precision_{percent}"] = num_right / num_predicted if num_predicted else 0.0
        figures[f"recall_{percent}"] = num_right / len(ious)
        figures[f"f1_{percent}"] = 2 * num_right / (num_predicted + len(ious))
    return figures


def _mean_average_precision(
    records: Sequence[DetectionRecord], truths: Sequence[Sequence[Box]], predictions: Sequence[Sequence[Box]]
) -> dict[str, float]:
    """COCO's AP over IoU 0.50:0.95, at 0.50 and at 0.75: one category, at most 100 boxes an image."""
    if not any(predictions):  # loadRes refuses an empty list
        return {"map_50_95": 0.0, "map_50": 0.0, "map_75": 0.0}
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    sizes = [(record.width, record.height) for record in records]
    annotations = [
        {"image_id": image, "category_id": 1, "bbox": bbox, "area": bbox[2] * bbox[3], "iscrowd": 0}
        for image, bbox, _ in _coco_boxes(truths, sizes)
    ]
    results = [
        {"image_id": image, "category_id": 1, "bbox": bbox, "score": 1 / (1 + position)}
        for image, bbox, position in _coco_boxes(predictions, sizes)
    ]
    truth = COCO()
    truth.dataset = {
        "images": [{"id": image, "width": w, "height": h} for image, (w, h) in enumerate(sizes)],
        "categories": [{"id": 1}],
        # pycocotools takes a match with annotation 0 for no match.
        "annotations": [{"id": number, **annotation} for number, annotation in enumerate(annotations, start=1)],
    }
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), iouType="bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: float(evaluation.stats[i]) for i, name in enumerate(("map_50_95", "map_50", "map_75"))}


def _coco_boxes(
    boxes_by_image: Sequence[Sequence[Box]], sizes: Sequence[tuple[int, int]]
) -> list[tuple[int, list[float], int]]:
    """(index of the image, [x, y, width, height] in its pixels, position of the box in it) of every box."""
    return [
        (image, [x0 * w, y0 * h, (x1 - x0) * w, (y1 - y0) * h], position)
        for image, (boxes, (w, h)) in enumerate(zip(boxes_by_image, sizes, strict=True))
        for position, (x0, y0, x1, y1) in enumerate(boxes)
    ]
