"""Scores of completions: how well they name the boxes that are there, in figures and rows.

Three families of figures, over the same samples:

- one IoU a sample. The original experiment's: first ground-truth box against first predicted one, 0 if the completion
  has none. Or, if the dataset says so (`scored_boxes: all`), of all boxes, matched one to one: 0 for one that is
  missing or too many. An image without a box scores 1 if the completion is that there is none;

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
from scipy.optimize import linear_sum_assignment

from stages.data.groups import groups_of
from stages.evaluation.statistics import Floats, Groups, figures
from stages.tasks.detection.samples import DetectionRecord
from stages.tasks.detection.samples.boxes import Box, Decoded, codec_of, decode_boxes
from stages.tasks.detection.scoring.drawing import example_image as example_image

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
"""Columns of predictions.parquet: they have their types even if no completion holds a box."""

SUMMARY = ("mean_iou", "detection_rate", "iou_over_50", "iou_over_70", "samples")
"""Figures of metrics.json that the log shows."""

SCORE_POLICY = "answer-order"
"""Generated text carries no confidence, and COCO mAP needs one. Under this policy the box at position k of a
completion (from 0) scores 1 / (1 + k): all first boxes rank before all second ones, and equals stay in the order of the
data. The figure compares completions under the same policy; it does not compare with a detector's that has real scores.
"""


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

    One to one, such that the sum of the IoUs is the largest possible (Hungarian method), so the order of a completion
    does not matter and a box named twice counts once.
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
    completions: Sequence[str],
    *,
    answer_format: None = None,
    family: str = "qwen2_vl",
    sizes: Sequence[tuple[int, int]] | None = None,
) -> tuple[dict[str, float | int | str], list[dict[str, Any]]]:
    """Score raw completions, one for each record.

    sizes: (width, height) of the resized images, for the model families that write boxes in their pixels.
    Returns (metrics, rows): the flat figures of metrics.json, and the rows of predictions.parquet in the order of the
    records. The original experiment's figures take the box that was annotated first, as it did; all else takes the
    ground truth in reading order, in which it is asked for.
    """
    rows: list[dict[str, Any]] = []
    decoded: list[Decoded] = []
    matched: list[Floats] = []
    sizes_or_none: Sequence[tuple[int, int] | None] = [None] * len(records) if sizes is None else sizes
    for record, text, size in zip(records, completions, sizes_or_none, strict=True):
        parsed = decode_boxes(text, family=codec_of(record.answer, family), size=size)
        decoded.append(parsed)
        truth, truth_labels = [box for box, _ in record.targets()], [label for _, label in record.targets()]
        labels = (truth_labels, parsed.labels) if len(record.asked) > 1 else None
        matched.append(matched_ious(truth, parsed.boxes, labels))
        iou = _iou(record, parsed, matched[-1])
        row = {
            "image_id": record.image_id,
            "text": text,
            "valid": bool(parsed.boxes) if truth else parsed.none,
            "boxes": [list(box) for box in parsed.boxes],
            "truth": [list(box) for box in truth],
            "labels": list(parsed.labels),
            "truth_labels": truth_labels,
            "iou": iou,
            "matched_iou": float(matched[-1].mean()) if truth else iou,
        }
        rows.append(row)
    num_valid = sum(row["valid"] for row in rows)
    metrics: dict[str, float | int | str] = {
        "samples": len(records),
        **_sample_figures(np.array([row["iou"] for row in rows]), groups_of(records)),
        "detection_rate": num_valid / len(rows),
        "parse_failure_rate": (len(rows) - num_valid) / len(rows),
        "malformed_boxes": sum(parsed.malformed for parsed in decoded),
        **_multi_box_figures(matched, num_predicted=sum(len(parsed.boxes) for parsed in decoded)),
        **_mean_average_precision(records, decoded),
        "map_score_policy": SCORE_POLICY,
    }
    if empty := [row["valid"] for row in rows if not row["truth"]]:
        metrics |= {"empty_images": len(empty), "empty_images_right": sum(empty) / len(empty)}
    return metrics, rows


def _iou(record: DetectionRecord, parsed: Decoded, matched: Floats) -> float:
    """IoU of one sample, as its dataset defines it."""
    annotated, predicted = record.annotated(), parsed.boxes
    if not annotated:
        return float(parsed.none)
    if record.scored_boxes == "first":
        return float(pairwise_iou([annotated[0][0]], predicted[:1])[0, 0]) if predicted else 0.0
    return float(matched.sum()) / max(len(matched), len(predicted))


def _sample_figures(ious: Floats, groups: Groups | None) -> dict[str, float]:
    """Figures of one IoU a sample; "over" is strictly over. A single sample has no interval."""
    return {
        **figures("mean_iou", ious, groups=groups),
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
    metrics = {"matched_mean_iou": float(ious.mean())}
    for percent in (50, 75):
        num_right = int((ious >= percent / 100).sum())
        metrics[f"precision_{percent}"] = num_right / num_predicted if num_predicted else 0.0
        metrics[f"recall_{percent}"] = num_right / len(ious)
        metrics[f"f1_{percent}"] = 2 * num_right / (num_predicted + len(ious))
    return metrics


def _mean_average_precision(records: Sequence[DetectionRecord], decoded: Sequence[Decoded]) -> dict[str, float]:
    """COCO's AP over IoU 0.50:0.95, at 0.50 and at 0.75, averaged over the labels that are there: at most 100 boxes an
    image. A predicted box of a label that is not asked for counts nowhere here, and against precision above.
    """
    several = any(len(record.asked) > 1 for record in records)
    truth = [
        (image, box, label if several else None)
        for image, record in enumerate(records)
        for box, label in record.targets()
    ]
    numbers = {label: number for number, label in enumerate(sorted({label for *_, label in truth}, key=str), start=1)}
    if not numbers:
        return {}

    def entry(image: int, box: Box, label: str | None) -> dict[str, Any]:
        (x0, y0, x1, y1), w, h = box, records[image].width, records[image].height
        wide, high = (x1 - x0) * w, (y1 - y0) * h
        pixels = {"bbox": [x0 * w, y0 * h, wide, high], "area": wide * high, "iscrowd": 0}
        return {"image_id": image, "category_id": numbers[label], **pixels}

    predicted = [
        {**entry(image, box, label), "score": 1 / (1 + position)}
        for image, parsed in enumerate(decoded)
        for position, (box, own) in enumerate(zip(parsed.boxes, parsed.labels, strict=True))
        if (label := own if several else None) in numbers
    ]
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def coco(entries: Sequence[dict[str, Any]]) -> COCO:
        found = COCO()
        found.dataset = {
            "images": [{"id": image} for image in range(len(records))],
            "categories": [{"id": number} for number in numbers.values()],
            # pycocotools takes a match with annotation 0 for no match.
            "annotations": [{**each, "id": number} for number, each in enumerate(entries, start=1)],
        }
        found.createIndex()
        return found

    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        evaluation = COCOeval(coco([entry(*each) for each in truth]), coco(predicted), iouType="bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: float(evaluation.stats[i]) for i, name in enumerate(("map_50_95", "map_50", "map_75"))}


def ordered_by(_: DetectionRecord) -> str:
    """The column that ranks samples from worst to best."""
    return "iou"


def failure(row: Mapping[str, Any]) -> str | None:
    """The kind of failure of a row of predictions; None if its IoU is above 0.5.

    no_box: no readable one; invented: one where there is none. elsewhere: no box overlaps a true one by more than 0.1;
    shifted: none by more than 0.5. Of the others, too_many or too_few if the numbers differ. If they do not, the worst
    box says which: elsewhere, shifted, or mixed_up, where all are right but for their order or their labels.
    """
    if row["iou"] > 0.5:
        return None
    if not row["valid"]:
        return "invented" if row["boxes"] else "no_box"
    overlap = pairwise_iou(row["truth"], row["boxes"]).max()
    more = len(row["boxes"]) - len(row["truth"])
    if overlap > 0.5 and more:
        return "too_many" if more > 0 else "too_few"
    if not more:
        overlap = matched_ious(row["truth"], row["boxes"]).min()
    return "elsewhere" if overlap <= 0.1 else "shifted" if overlap <= 0.5 else "mixed_up"
