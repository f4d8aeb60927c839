import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.kit.data.parquet import read_rows, write_rows
from stages.tasks.detection.samples import Box, encode_boxes
from stages.tasks.detection.scoring import PREDICTIONS, matched_ious, pairwise_iou, score
from tests.tasks.detection.rows import record

# All in halves and quarters, so that their IoUs are exact and a threshold can be met to the bit.
LEFT, RIGHT = (0.0, 0.0, 0.5, 1.0), (0.75, 0.0, 1.0, 1.0)
HALF_OF_LEFT = (0.0, 0.0, 0.5, 0.5)
FAR = (0.5, 0.0, 0.75, 0.25)


def answer(*boxes: Box) -> str:
    """Boxes in the order given, unlike encode_boxes, which sorts."""
    return "".join(encode_boxes([box]) for box in boxes) + "<|im_end|>"


def test_iou_of_boxes_counted_by_hand() -> None:
    boxes = [(0.0, 0.0, 2.0, 2.0), (0.0, 0.0, 1.0, 1.0), (5.0, 5.0, 5.0, 6.0)]
    others = [(1.0, 1.0, 3.0, 3.0), (0.0, 0.0, 2.0, 2.0), (5.0, 5.0, 5.0, 6.0)]
    assert pairwise_iou(boxes, others) == pytest.approx(np.array([[1 / 7, 1, 0], [0, 1 / 4, 0], [0, 0, 0]]))


def test_iou_of_nothing_has_the_right_shape() -> None:
    assert pairwise_iou([], [LEFT]).shape == (0, 1)
    assert pairwise_iou([LEFT], []).shape == (1, 0)


def test_iou_refuses_reversed_boxes() -> None:
    with pytest.raises(ValueError, match=r"boxes \[1\] are reversed"):
        pairwise_iou([LEFT, (0.5, 0.0, 0.4, 1.0)], [LEFT])


corners = st.floats(0, 1)
any_box = st.tuples(corners, corners, corners, corners).map(
    lambda c: (min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]), max(c[1], c[3]))
)


@given(st.lists(any_box, max_size=4), st.lists(any_box, max_size=4))
def test_iou_is_a_symmetric_share(boxes: list[Box], others: list[Box]) -> None:
    iou = pairwise_iou(boxes, others)
    assert ((iou >= 0) & (iou <= 1)).all()
    assert iou == pytest.approx(pairwise_iou(others, boxes).T)


@given(st.lists(any_box, min_size=1, max_size=4), st.lists(any_box, max_size=4))
def test_matching_is_the_best_of_all_one_to_one_matchings(truth: list[Box], predicted: list[Box]) -> None:
    iou = pairwise_iou(truth, predicted)
    # Every way to give each ground-truth box another predicted box, or none.
    choices = itertools.permutations([*range(len(predicted)), *([None] * len(truth))], len(truth))
    best = max(sum(iou[i, j] for i, j in enumerate(choice) if j is not None) for choice in choices)
    assert matched_ious(truth, predicted).sum() == pytest.approx(best)


def test_box_named_twice_counts_once() -> None:
    assert matched_ious([LEFT, RIGHT], [LEFT, LEFT]).tolist() == [1.0, 0.0]


def test_figures_of_the_original_look_at_first_boxes_only() -> None:
    records = [record([LEFT], "a"), record([LEFT, RIGHT], "b"), record([LEFT], "c"), record([LEFT], "d")]
    texts = [answer(LEFT, FAR), answer(RIGHT, LEFT), answer(HALF_OF_LEFT), "no table here"]
    metrics, rows = score(records, texts)
    assert [row["iou"] for row in rows] == pytest.approx([1.0, 0.0, 0.5, 0.0])
    wanted = {
        "samples": 4,
        "mean_iou": 0.375,
        "median_iou": 0.25,
        "min_iou": 0.0,
        "max_iou": 1.0,
        "detection_rate": 0.75,
        "parse_failure_rate": 0.25,
        "iou_over_50": 0.25,  # strictly over: the third is exactly half
        "iou_over_70": 0.25,
        "malformed_boxes": 0,
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)
    assert 0 <= float(metrics["mean_iou_low"]) < 0.375 < float(metrics["mean_iou_high"]) <= 1


def test_multi_box_figures_count_over_all_boxes() -> None:
    records = [record([LEFT, RIGHT], "a"), record([LEFT], "b"), record([LEFT], "c")]
    texts = [answer(RIGHT, LEFT, FAR), answer(HALF_OF_LEFT), "nothing"]
    metrics, rows = score(records, texts)
    assert [row["matched_iou"] for row in rows] == pytest.approx([1.0, 0.5, 0.0])
    wanted = {
        "matched_mean_iou": (1 + 1 + 0.5 + 0) / 4,
        "precision_50": 3 / 4,  # from the threshold on, as COCO has it: one is exactly half
        "recall_50": 3 / 4,
        "f1_50": 3 / 4,
        "precision_75": 2 / 4,
        "recall_75": 2 / 4,
        "f1_75": 2 / 4,
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)


def test_malformed_box_is_counted_beside_a_good_one() -> None:
    metrics, rows = score([record([LEFT])], [answer(LEFT) + "<|box_start|>(1,2),(3"])
    assert (metrics["detection_rate"], metrics["malformed_boxes"]) == (1.0, 1)
    assert rows[0]["boxes"] == [list(LEFT)]


def test_map_counted_by_hand() -> None:
    """Three ground-truth boxes; in score order: first of a (right), first of b (wrong), second of a (right).

    Precision at recall 1/3 is 1, at 2/3 it is 2/3, and 3/3 is never reached. COCO reads the precision at the
    101 recalls 0, 0.01, ... 1: 34 of them are at most 1/3, the next 33 at most 2/3.
    """
    records = [record([LEFT, RIGHT], "a"), record([LEFT], "b")]
    metrics, _ = score(records, [answer(LEFT, RIGHT), answer(FAR)])
    by_hand = (34 * 1 + 33 * 2 / 3) / 101
    assert metrics["map_50"] == pytest.approx(by_hand)
    assert metrics["map_75"] == pytest.approx(by_hand)
    assert metrics["map_50_95"] == pytest.approx(by_hand)
    assert metrics["map_score_policy"] == "answer-order"


def test_map_ranks_first_boxes_before_second_ones() -> None:
    """The same right boxes score more where the wrong one comes second."""
    records = [record([LEFT], "a"), record([LEFT], "b")]
    wrong_last, _ = score(records, [answer(LEFT, FAR), answer(LEFT)])
    wrong_first, _ = score(records, [answer(FAR, LEFT), answer(LEFT)])
    assert wrong_last["map_50"] == pytest.approx(1.0)
    assert wrong_first["map_50"] == pytest.approx(2 / 3)  # wrong, right, right: 2/3 from the end on


def test_map_averages_over_thresholds() -> None:
    """IoU 0.72 is right at 0.50, 0.55, 0.60, 0.65 and 0.70, five thresholds of ten."""
    metrics, _ = score([record([(0.0, 0.0, 1.0, 1.0)])], [answer((0.0, 0.0, 1.0, 0.72))])
    assert (metrics["map_50_95"], metrics["map_50"], metrics["map_75"]) == pytest.approx((0.5, 1.0, 0.0))


def test_answers_without_any_box_score_zero_everywhere() -> None:
    metrics, rows = score([record([LEFT], "a"), record([RIGHT], "b")], ["", "none"])
    zero = ["mean_iou", "max_iou", "detection_rate", "matched_mean_iou", "precision_50", "f1_50", "map_50_95"]
    assert {metrics[name] for name in zero} == {0.0}
    assert metrics["parse_failure_rate"] == 1.0
    assert [row["valid"] for row in rows] == [False, False]


def test_rows_have_the_columns_of_the_predictions_file() -> None:
    _, rows = score([record([RIGHT, LEFT], "a")], [answer(RIGHT)])
    assert rows[0] == {
        "image_id": "a",
        "text": answer(RIGHT),
        "valid": True,
        "boxes": [list(RIGHT)],
        "truth": [list(LEFT), list(RIGHT)],  # in reading order
        "labels": ["nutrition-table"],
        "truth_labels": ["nutrition-table", "nutrition-table"],
        "iou": pytest.approx(1.0),
        "matched_iou": pytest.approx(0.5),
    }
    assert list(rows[0]) == PREDICTIONS.names


def test_predictions_without_any_box_keep_their_types(tmp_path: Path) -> None:
    _, rows = score([record([LEFT])], ["none"])
    write_rows(rows, tmp_path / "predictions.parquet", PREDICTIONS)
    assert list(read_rows(tmp_path / "predictions.parquet")) == rows
    assert pq.read_schema(tmp_path / "predictions.parquet").field("boxes").type == pa.list_(pa.list_(pa.float64()))


def test_single_sample_has_no_interval() -> None:
    metrics, _ = score([record([LEFT])], [answer(LEFT)])
    assert "mean_iou_low" not in metrics


def test_scoring_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    score([record([LEFT])], [answer(LEFT)])
    assert capsys.readouterr().out == ""
