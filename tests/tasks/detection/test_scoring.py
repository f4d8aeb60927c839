"""Scores of completions, and their examples."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stages.tasks.detection.samples import DetectionRecord
from stages.tasks.detection.samples.boxes import TARGET, Box, encode_boxes
from stages.tasks.detection.scoring import failure, matched_ious, pairwise_iou, score
from stages.tasks.detection.scoring.drawing import PREDICTION_COLOUR, TRUTH_COLOUR, example_image
from tests.data.images import png
from tests.tasks.detection.rows import record

# All in halves and quarters, so that their IoUs are exact and a threshold can be met to the bit.
LEFT, RIGHT = (0.0, 0.0, 0.5, 1.0), (0.75, 0.0, 1.0, 1.0)
HALF_OF_LEFT = (0.0, 0.0, 0.5, 0.5)
FAR = (0.5, 0.0, 0.75, 0.25)


def completion(*boxes: Box) -> str:
    """Boxes in the order given, unlike encode_boxes, which sorts."""
    return "".join(encode_boxes([(box, TARGET)]) for box in boxes) + "<|im_end|>"


def test_iou_of_boxes_counted_by_hand() -> None:
    boxes = [(0.0, 0.0, 2.0, 2.0), (0.0, 0.0, 1.0, 1.0), (5.0, 5.0, 5.0, 6.0)]
    others = [(1.0, 1.0, 3.0, 3.0), (0.0, 0.0, 2.0, 2.0), (5.0, 5.0, 5.0, 6.0)]
    assert pairwise_iou(boxes, others) == pytest.approx(np.array([[1 / 7, 1, 0], [0, 1 / 4, 0], [0, 0, 0]]))


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


def test_figures_of_the_original_look_at_first_boxes_only() -> None:
    records = [record([LEFT], "a"), record([LEFT, RIGHT], "b"), record([LEFT], "c"), record([LEFT], "d")]
    texts = [completion(LEFT, FAR), completion(RIGHT, LEFT), completion(HALF_OF_LEFT), "no table here"]
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
    texts = [completion(RIGHT, LEFT, FAR), completion(HALF_OF_LEFT), "nothing"]
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


def test_map_counted_by_hand() -> None:
    """Three ground-truth boxes; in score order: first of a (right), first of b (wrong), second of a (right).

    Precision at recall 1/3 is 1, at 2/3 it is 2/3, and 3/3 is never reached. COCO reads the precision at the
    101 recalls 0, 0.01, ... 1: 34 of them are at most 1/3, the next 33 at most 2/3.
    """
    records = [record([LEFT, RIGHT], "a"), record([LEFT], "b")]
    metrics, _ = score(records, [completion(LEFT, RIGHT), completion(FAR)])
    by_hand = (34 * 1 + 33 * 2 / 3) / 101
    assert metrics["map_50"] == pytest.approx(by_hand)
    assert metrics["map_75"] == pytest.approx(by_hand)
    assert metrics["map_50_95"] == pytest.approx(by_hand)
    assert metrics["map_score_policy"] == "answer-order"


def test_map_ranks_first_boxes_before_second_ones() -> None:
    """Equal boxes score more if the wrong one comes second."""
    records = [record([LEFT], "a"), record([LEFT], "b")]
    wrong_last, _ = score(records, [completion(LEFT, FAR), completion(LEFT)])
    wrong_first, _ = score(records, [completion(FAR, LEFT), completion(LEFT)])
    assert wrong_last["map_50"] == pytest.approx(1.0)
    assert wrong_first["map_50"] == pytest.approx(2 / 3)  # wrong, right, right: 2/3 from the end on


def sample(*found: tuple[Box, str], **settings: Any) -> DetectionRecord:
    boxes, names = [box for box, _ in found], tuple(name for _, name in found)
    empty = replace(record([]), categories=(), labels=())
    several = {"asked": ("cup", "lid"), "scored_boxes": "all"} | settings
    return replace(empty, boxes=tuple(boxes), categories=names, labels=names, **several)


def labelled(*found: tuple[Box, str]) -> str:
    return "".join(encode_boxes([each]) for each in found) + "<|im_end|>"


def test_a_box_of_another_label_is_no_match() -> None:
    truth = sample((LEFT, "cup"), (RIGHT, "lid"))
    texts = [labelled((RIGHT, "lid"), (LEFT, "cup")), labelled((LEFT, "lid"), (RIGHT, "lid")), labelled((LEFT, "pot"))]
    metrics, rows = score([truth] * 3, texts)
    assert [row["iou"] for row in rows] == [1.0, 0.5, 0.0]
    assert rows[1]["labels"] == ["lid", "lid"]
    assert rows[1]["truth_labels"] == ["cup", "lid"]
    assert metrics["recall_50"] == 3 / 6
    assert metrics["precision_50"] == 3 / 5
    # If one label is asked for, the completion's label does not matter.
    one = sample((LEFT, "cup"), asked=("cup",))
    assert score([one], [labelled((LEFT, "pot"))])[1][0]["iou"] == 1.0


def test_map_is_averaged_over_labels() -> None:
    """All is right for the cup, nothing for the lid; a label that is not asked for counts nowhere."""
    truth = sample((LEFT, "cup"), (RIGHT, "lid"))
    metrics, _ = score([truth], [labelled((LEFT, "cup"), (FAR, "lid"), (FAR, "pot"))])
    assert metrics["map_50"] == pytest.approx(0.5)
    assert metrics["precision_50"] == pytest.approx(1 / 3)


def test_a_box_that_is_missing_and_one_too_many_both_count_as_0() -> None:
    truth = sample((LEFT, "cup"), (RIGHT, "cup"))
    texts = [
        labelled((LEFT, "cup")),
        labelled((LEFT, "cup"), (RIGHT, "cup"), (FAR, "cup")),
        labelled((RIGHT, "cup"), (LEFT, "cup")),
    ]
    _, rows = score([truth] * 3, texts)
    assert [row["iou"] for row in rows] == pytest.approx([1 / 2, 2 / 3, 1.0])
    first = replace(truth, scored_boxes="first")
    assert [row["iou"] for row in score([first] * 3, texts)[1]] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("truth", "text", "kind"),
    [
        ([LEFT], completion(LEFT, FAR), None),
        ([LEFT], "I see a table", "no_box"),
        ([], completion(LEFT), "invented"),
        ([], "none", None),
        ([LEFT], completion(RIGHT), "elsewhere"),
        ([LEFT], completion(HALF_OF_LEFT), "shifted"),
        ([LEFT], completion(RIGHT, LEFT), "too_many"),
        ([LEFT, RIGHT, FAR], completion(RIGHT, FAR), "too_few"),
        ([LEFT, RIGHT], completion(RIGHT, LEFT), "mixed_up"),
        ([LEFT, RIGHT], completion(HALF_OF_LEFT, RIGHT), "shifted"),
        ([LEFT, RIGHT], completion(FAR, RIGHT), "elsewhere"),
        ([], "I see a table", "no_box"),
    ],
)
def test_the_kind_of_a_failure_is_told_from_the_boxes(truth: list[Box], text: str, kind: str | None) -> None:
    one = record(truth) if truth else sample(scored_boxes="first")
    assert failure(score([one], [text])[1][0]) == kind


@pytest.mark.parametrize("scored_boxes", ["first", "all"])
def test_only_the_word_none_is_right_for_an_image_without_a_box(scored_boxes: str) -> None:
    empty = sample(scored_boxes=scored_boxes)
    truth = sample((LEFT, "cup"), scored_boxes=scored_boxes)
    texts = ["none<|im_end|>", "", "I see none", labelled((LEFT, "cup")), "none<|im_end|>"]
    metrics, rows = score([empty] * 4 + [truth], texts)
    assert [row["iou"] for row in rows] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [row["matched_iou"] for row in rows] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [row["valid"] for row in rows] == [True, False, False, False, False]
    assert (metrics["empty_images"], metrics["empty_images_right"], metrics["detection_rate"]) == (4, 0.25, 0.2)
    alone, _ = score([empty], ["none"])
    assert (alone["mean_iou"], "map_50" in alone, "matched_mean_iou" in alone) == (1.0, False, False)


TRUTH, PREDICTED = (0.1, 0.1, 0.5, 0.9), (0.6, 0.2, 0.9, 0.6)


def drawn(
    boxes: tuple[Box, ...], size: tuple[int, int] = (200, 100), *, valid: bool = True, **changes: Any
) -> Image.Image:
    image = png((255, 255, 255), size)
    changes = {"image": image, "width": size[0], "height": size[1], **changes}
    row = {"iou": 0.5, "valid": valid, "boxes": [list(box) for box in boxes], "labels": ["lid"] * len(boxes)}
    return example_image(replace(record([TRUTH]), **changes), row)


def extent(image: Image.Image, colour: tuple[int, int, int]) -> tuple[float, ...]:
    """The extent of a colour, as x0 y0 x1 y1 in 0..1 of the sample below the caption."""
    pixels = np.asarray(image)[-100:]
    ys, xs = np.nonzero((pixels == colour).all(axis=2))
    return xs.min() / 200, ys.min() / 100, (xs.max() + 1) / 200, (ys.max() + 1) / 100


def test_boxes_are_drawn_at_their_places_truth_thin() -> None:
    image = drawn((PREDICTED,))
    assert extent(image, TRUTH_COLOUR) == pytest.approx(TRUTH, abs=0.011)
    assert extent(image, PREDICTION_COLOUR) == pytest.approx(PREDICTED, abs=0.011)
    pixels = np.asarray(image)[-100:]
    assert (pixels[10, 20:100] == TRUTH_COLOUR).all()
    assert (pixels[20, 120:180] == PREDICTION_COLOUR).all()
    both = np.asarray(drawn((TRUTH,)))[-100:][10:12, 21:99].reshape(-1, 3)
    assert {tuple(colour) for colour in both.tolist()} == {TRUTH_COLOUR, PREDICTION_COLOUR}


def test_the_caption_says_no_box_only_where_none_is_drawn() -> None:
    """A completion with boxes for an image without any is not valid."""
    invented, right = (np.asarray(drawn((PREDICTED,), valid=valid)) for valid in (False, True))
    assert (invented == right).all()
    assert (np.asarray(drawn((), valid=False))[:-100] != right[:-100]).any()
