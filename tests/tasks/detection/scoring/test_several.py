"""Scores of several labels, of all boxes, and of pictures without one."""

from dataclasses import replace
from typing import Any

import pytest

from stages.tasks.detection.samples import Box, DetectionRecord, ForModel, encode_boxes
from stages.tasks.detection.scoring import PREDICTION_COLOUR, TRUTH_COLOUR, draw_boxes, draw_prediction, score
from tests.tasks.detection.rows import record

LEFT, RIGHT = (0.0, 0.0, 0.5, 1.0), (0.75, 0.0, 1.0, 1.0)
FAR = (0.5, 0.0, 0.75, 0.25)


def sample(*found: tuple[Box, str], **settings: Any) -> DetectionRecord:
    boxes, names = [box for box, _ in found], tuple(name for _, name in found)
    empty = replace(record([]), categories=(), labels=())
    several = {"asked": ("cup", "lid"), "scored_boxes": "all"} | settings
    return replace(empty, boxes=tuple(boxes), categories=names, labels=names, **several)


def answer(*found: tuple[Box, str]) -> str:
    return "".join(encode_boxes([box], label=name) for box, name in found) + "<|im_end|>"


def test_a_box_of_another_label_is_no_match() -> None:
    truth = sample((LEFT, "cup"), (RIGHT, "lid"))
    texts = [answer((RIGHT, "lid"), (LEFT, "cup")), answer((LEFT, "lid"), (RIGHT, "lid")), answer((LEFT, "pot"))]
    metrics, rows = score([truth] * 3, texts)
    assert [row["iou"] for row in rows] == [1.0, 0.5, 0.0]
    assert rows[1]["labels"] == ["lid", "lid"]
    assert rows[1]["truth_labels"] == ["cup", "lid"]
    assert metrics["recall_50"] == 3 / 6
    assert metrics["precision_50"] == 3 / 5
    # Where one label is asked for, what the answer calls it does not matter.
    one = sample((LEFT, "cup"), asked=("cup",))
    assert score([one], [answer((LEFT, "pot"))])[1][0]["iou"] == 1.0


def test_map_is_averaged_over_labels() -> None:
    """Of the cup all is right, of the lid nothing; a label that is not asked for counts nowhere."""
    truth = sample((LEFT, "cup"), (RIGHT, "lid"))
    metrics, _ = score([truth], [answer((LEFT, "cup"), (FAR, "lid"), (FAR, "pot"))])
    assert metrics["map_50"] == pytest.approx(0.5)
    assert metrics["precision_50"] == pytest.approx(1 / 3)


def test_a_box_that_is_missing_and_one_too_many_both_count_as_0() -> None:
    truth = sample((LEFT, "cup"), (RIGHT, "cup"))
    texts = [
        answer((LEFT, "cup")),
        answer((LEFT, "cup"), (RIGHT, "cup"), (FAR, "cup")),
        answer((RIGHT, "cup"), (LEFT, "cup")),
    ]
    _, rows = score([truth] * 3, texts)
    assert [row["iou"] for row in rows] == pytest.approx([1 / 2, 2 / 3, 1.0])
    first = replace(truth, scored_boxes="first")
    assert [row["iou"] for row in score([first] * 3, texts)[1]] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("scored_boxes", ["first", "all"])
def test_of_a_picture_without_a_box_the_word_none_is_right_and_nothing_else(scored_boxes: str) -> None:
    empty = sample(scored_boxes=scored_boxes)
    truth = sample((LEFT, "cup"), scored_boxes=scored_boxes)
    texts = ["none<|im_end|>", "", "I see none", answer((LEFT, "cup")), "none<|im_end|>"]
    metrics, rows = score([empty] * 4 + [truth], texts)
    assert [row["iou"] for row in rows] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [row["matched_iou"] for row in rows] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [row["valid"] for row in rows] == [True, False, False, False, False]
    assert (metrics["empty_images"], metrics["empty_images_right"], metrics["detection_rate"]) == (4, 0.25, 0.2)
    alone, _ = score([empty], ["none"])
    assert (alone["mean_iou"], "map_50" in alone, "matched_mean_iou" in alone) == (1.0, False, False)


def test_the_answer_has_every_box_with_its_label_in_reading_order_in_either_form() -> None:
    truth = sample((RIGHT, "lid"), (LEFT, "cup"))

    def answered(one: DetectionRecord) -> str:
        return str(
            ForModel("qwen2_vl", lambda *size: size).conversation(one, answered=True).messages[1]["content"][0]["text"]
        )

    assert answered(truth) == answer((LEFT, "cup"), (RIGHT, "lid")).removesuffix("<|im_end|>")
    as_json = replace(truth, answer="json")
    assert answered(as_json) == (
        '[{"bbox_2d": [0, 0, 500, 1000], "label": "cup"}, {"bbox_2d": [750, 0, 1000, 1000], "label": "lid"}]'
    )
    assert (answered(sample()), answered(sample(answer="json"))) == ("none", "[]")
    _, rows = score([as_json, sample(answer="json")], [answered(as_json), "[]<|im_end|>"])
    assert [row["iou"] for row in rows] == [1.0, 1.0]


def test_labels_are_drawn_where_several_are_asked_for() -> None:
    truth = sample((LEFT, "cup"), (RIGHT, "lid\n\x1b[31m"))
    _, (row,) = score([truth], [answer((LEFT, "lid"))])
    plain = draw_prediction(replace(truth, asked=("cup",)), row)
    labelled = draw_prediction(truth, row)
    assert labelled.size == plain.size
    assert labelled.tobytes() != plain.tobytes()
    assert PREDICTION_COLOUR in {colour for _, colour in labelled.getcolors(100_000) or []}
    assert draw_boxes(truth, truth.targets(), TRUTH_COLOUR).size == (truth.width, truth.height)
