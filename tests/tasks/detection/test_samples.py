"""Records, the conversations about them, and boxes as text."""

import io
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from stages.core.families import FAMILIES as ALL
from stages.data.splits import to_rows
from stages.data.texts import composed
from stages.tasks.detection.samples import SCHEMA, DetectionRecord, ForModel
from stages.tasks.detection.samples.boxes import TARGET, Box, codec, decode_boxes, encode_boxes, reading_order
from stages.tasks.detection.sources import row_of
from stages.tasks.detection.sources.rows import OPEN_FOOD_FACTS, Reader, parse_row
from tests.damage import damaged_bytes, damaged_text, damaged_tree, quick
from tests.data.images import RED, patch_jpeg, png
from tests.tasks.detection.rows import FORM, parsed, raw_row, record, row

FAMILIES = [name for name, family in ALL.items() if family.vision and family.vision.boxes]
SIZE = (644, 924)
"""A resized image, for the families that count its pixels."""


def label(points: str) -> str:
    return f"<|object_ref_start|>nutrition-table<|object_ref_end|><|box_start|>{points}<|box_end|>"


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    x, y = (sorted(draw(st.lists(st.floats(0, 1), min_size=2, max_size=2, unique=True))) for _ in range(2))
    return x[0], y[0], x[1], y[1]


def tables(*given_boxes: Box) -> list[tuple[Box, str]]:
    return [(box, TARGET) for box in given_boxes]


@pytest.mark.parametrize("family", FAMILIES)
@given(given_boxes=st.lists(boxes(), min_size=1, max_size=4))
@example(given_boxes=[(0.0, 0.0, 1.0, 1.0)])
@example(given_boxes=[(1 - 1e-9, 0.0, 1.0, 1e-9)])
@example(given_boxes=[(0.50051, 0.4995, 0.50052, 0.49951)])
def test_boxes_come_back_within_half_a_step(family: str, given_boxes: list[Box]) -> None:
    targets = tables(*given_boxes)
    decoded = decode_boxes(encode_boxes(targets, family=family, size=SIZE), family=family, size=SIZE)
    assert not decoded.malformed
    assert len(decoded.boxes) == len(given_boxes)
    grid = codec(family).grid(SIZE)
    for back, (box, _) in zip(decoded.boxes, sorted(targets, key=reading_order), strict=True):
        for axis, step in enumerate(1 / steps for steps in grid):
            # A side narrower than a step may have been widened to one, its ends moved by up to a step.
            off = 0.5 * step if box[axis + 2] - box[axis] >= step else step
            assert abs(back[axis] - box[axis]) <= off + 1e-9
            assert abs(back[axis + 2] - box[axis + 2]) <= off + 1e-9


def test_answer_is_qwen2_vls_grounding_text_in_reading_order() -> None:
    answer = encode_boxes(tables((0.5, 0.6, 0.7, 0.8), (0.1234, 0.0, 1.0, 0.5678)))
    assert answer == label("(123,0),(1000,568)") + label("(500,600),(700,800)")


def test_other_families_write_json() -> None:
    boxes = tables((0.25, 0.5, 0.75, 1.0))
    assert encode_boxes(boxes, family="qwen3_vl") == '[{"bbox_2d": [250, 500, 750, 1000], "label": "nutrition-table"}]'
    assert "[161, 462, 483, 924]" in encode_boxes(boxes, family="qwen2_5_vl", size=SIZE)
    with pytest.raises(ValueError, match="of the resized image"):
        encode_boxes(boxes, family="qwen2_5_vl")


def test_a_fenced_json_completion_is_read_and_its_broken_box_counted() -> None:
    text = '```json\n[{"bbox_2d": [1, 2, 30, 40], "label": "a"}, {"bbox_2d": [1, 2], "label": "b"}, {"bbox_2d"'
    decoded = decode_boxes(text, family="qwen3_vl")
    assert decoded.boxes == ((0.001, 0.002, 0.03, 0.04),)
    assert decoded.malformed == 2


@pytest.mark.parametrize(
    "text",
    [
        label("(500,100),(400,900)"),
        label("(100,100),(100,900)"),
        label("(100,100),(1001,900)"),
        label("(0.1,0.1),(0.4,0.9)"),
        label(""),
        label("(\u0661\u0660\u0660,100),(400,900)"),  # digits, but not the tokenizer's
        "<|box_start|>(100,100),(400,900)",
        "(100,100),(400,900)<|box_end|>",
    ],
)
def test_malformed_box_is_counted_and_leaves_its_neighbour_alone(text: str) -> None:
    alone = decode_boxes(text + "<|im_end|>")
    assert not alone.boxes
    assert alone.malformed == 1
    beside = decode_boxes(text + label("(0,0),(500,1000)"))
    assert beside.boxes == ((0.0, 0.0, 0.5, 1.0),)
    assert beside.malformed == 1


TOKENS = ["<|box_start|>", "<|box_end|>", *"(),7[{}:", "1000", "(1,2)", '"bbox_2d"', "[1,2,3,4]"]


@pytest.mark.parametrize("family", FAMILIES)
@given(
    text=st.one_of(
        st.text(),
        st.lists(st.sampled_from(TOKENS)).map("".join),
        st.lists(boxes(), max_size=3).flatmap(
            lambda some: st.sampled_from(FAMILIES).flatmap(
                lambda family: damaged_text(encode_boxes(tables(*some), family=family, size=SIZE), TOKENS)
            )
        ),
    )
)
@example(text="<|box_start|>(" + "9" * 5000 + ",1),(2,3)<|box_end|>")
@example(text='{"bbox_2d": ' + "[" * 100_000)
@example(text='{"bbox_2d": [' + "9" * 5000 + "]}")
@example(text='{"label": "bbox_2d"}')
def test_decoding_never_raises_and_gives_only_proper_boxes(family: str, text: str) -> None:
    decoded = decode_boxes(text, family=family, size=SIZE)
    for x0, y0, x1, y1 in decoded.boxes:
        assert 0 <= x0 < x1 <= 1
        assert 0 <= y0 < y1 <= 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("repeated", [*TOKENS, "(1,", "(1,2),", '{"bbox_2d"', "<|box_start|>(1,2),(3,4)<|box_end|>"])
@pytest.mark.parametrize(("before", "after"), [("", ""), ("{", "{"), ("<|box_start|>", "("), ('{"bbox_2d": ', "}")])
def test_a_completion_without_end_takes_no_longer_than_its_length(
    family: str, before: str, repeated: str, after: str
) -> None:
    """A quarter of a million characters, of which the square would take hours."""
    times = 250_000 // len(repeated)
    decoded = decode_boxes(before + repeated * times + after, family=family, size=SIZE)
    assert len(decoded.boxes) + decoded.malformed <= times + 1


@given(
    names=st.lists(st.text(st.characters(exclude_characters="<>", exclude_categories=["C"]), min_size=1), min_size=1)
)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_box_comes_back_with_its_label(family: str, names: list[str]) -> None:
    size = (900, 20_000)
    targets = [((0.1, index / len(names), 0.9, (index + 1) / len(names)), name) for index, name in enumerate(names)]
    decoded = decode_boxes(encode_boxes(targets, family=family, size=size), family=family, size=size)
    assert list(decoded.labels) == [composed(name) for name in names]


def test_a_box_without_its_label_has_none() -> None:
    bare = "<|box_start|>(0,0),(500,1000)<|box_end|>"
    assert decode_boxes(label("(0,0),(500,1000)") + bare).labels == ("nutrition-table", None)
    assert decode_boxes("a<|object_ref_end|>" + bare).labels == (None,)
    assert decode_boxes('{"bbox_2d": [1, 2, 30, 40], "label": 7}', family="qwen3_vl").labels == (None,)


@pytest.mark.parametrize(("family", "none"), [("qwen2_vl", "none"), ("qwen3_vl", "[]")])
def test_that_there_is_none_is_said_in_so_many_words(family: str, none: str) -> None:
    assert encode_boxes([], family=family) == none
    assert decode_boxes(none + "<|im_end|>\n<|endoftext|>", family=family).none
    for text in ("", "<|im_end|>", f"{none} at all", f"there is {none}", f"{none}{none}"):
        assert not decode_boxes(text, family=family).none


def test_the_answer_has_every_box_with_its_label_in_reading_order_in_either_form() -> None:
    left, right = (0.0, 0.0, 0.5, 1.0), (0.75, 0.0, 1.0, 1.0)
    truth = replace(record([right, left]), labels=("lid", "cup"), asked=("cup", "lid"))
    empty = replace(record([]), labels=())

    def answered(one: DetectionRecord) -> str:
        return str(
            ForModel("qwen2_vl", lambda *size: size).conversation(one, answered=True).messages[1]["content"][0]["text"]
        )

    assert answered(truth) == encode_boxes([(left, "cup")]) + encode_boxes([(right, "lid")])
    assert answered(replace(truth, answer="json")) == (
        '[{"bbox_2d": [0, 0, 500, 1000], "label": "cup"}, {"bbox_2d": [750, 0, 1000, 1000], "label": "lid"}]'
    )
    assert (answered(empty), answered(replace(empty, answer="json"))) == ("none", "[]")


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_box_lies_on_its_patch_after_exif_rotation(orientation: int) -> None:
    box, size = (0.1, 0.25, 0.5, 0.45), (80, 160)
    record = parsed(row(image=patch_jpeg(box, size, orientation), bbox=[[0.25, 0.1, 0.45, 0.5]]))
    upright = record.open_image()
    assert upright.size == (record.width, record.height) == size
    assert Image.open(io.BytesIO(record.image)).getexif().get(0x0112, 1) == 1, "nothing is left to rotate"

    (x0, y0, x1, y1) = record.boxes[0]
    is_red = np.abs(np.asarray(upright, dtype=int) - RED).sum(axis=2) < 60  # (height, width)
    ys, xs = np.nonzero(is_red)
    found = (xs.min() / size[0], ys.min() / size[1], (xs.max() + 1) / size[0], (ys.max() + 1) / size[1])
    assert found == pytest.approx((x0, y0, x1, y1), abs=0.02)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"image": b""}, "no image"),
        ({"bbox": []}, "no boxes"),
        ({"bbox": [[0.1, 0.2, 0.5, 1.2]]}, r"box 0 \(0.1, 0.2, 0.5, 1.2\) lies outside 0..1"),
        ({"bbox": [[0.5, 0.2, 0.1, 0.9]]}, "box 0 .* wrong order"),
        ({"bbox": [[0.1, 0.2, 0.1, 0.9]]}, "box 0 .* zero area"),
        ({"bbox": [[0.1, 0.2, float("nan"), 0.9]]}, "box 0 .* not a number"),
        ({"bbox": [[0.1, 0.2, 0.5]]}, "box 0 is .*, expected"),
        ({"names": [None]}, "box 0 has the category None"),
        (
            {"names": ["barcode"]},
            r"no box of a category that starts with nutrition-table \(reader\.category\); found barcode",
        ),
    ],
)
def test_bad_row_is_reported(changes: dict[str, Any], problem: str) -> None:
    problems = parse_row(row(**changes), Reader(), FORM, "train")
    assert isinstance(problems, list)
    assert len(problems) == 1
    assert re.search(problem, problems[0])


def test_every_problem_of_a_row_is_reported() -> None:
    wrong = row(image_id="", image=b"no", bbox=[[0.5, 0.2, 0.1, 0.9], [0.1, 0.2, 0.3, 7.0]])
    problems = parse_row(wrong, Reader(), FORM, "train")
    assert isinstance(problems, list)
    assert [problem.split()[0] for problem in problems] == ["image_id", "unreadable", "box", "box"]


def test_rounding_outside_the_image_is_clipped() -> None:
    record = parsed(row(bbox=[[-5e-7, 0.2, 1.0000005, 0.9]]))
    assert record.boxes == ((0.2, 0.0, 0.9, 1.0),)


def test_targets_are_the_nutrition_tables_in_reading_order() -> None:
    bbox = [[0.6, 0.1, 0.9, 0.4], [0.0, 0.0, 0.1, 0.1], [0.1, 0.5, 0.4, 0.9], [0.1, 0.1, 0.4, 0.4]]
    names = ["nutrition-table", "barcode", "nutrition-table-small", "nutrition-table-text"]
    assert [box for box, _ in parsed(row(bbox=bbox, names=names)).targets()] == [
        (0.1, 0.1, 0.4, 0.4),
        (0.5, 0.1, 0.9, 0.4),
        (0.1, 0.6, 0.4, 0.9),
    ]


def test_columns_that_do_not_fit_each_other_are_named() -> None:
    for wrong in ({"bbox": [[0, 0, 1, 1]], "category_name": []}, {"bbox": 3, "category_name": None}):
        (problem,) = row_of({**raw_row(row()), "objects": wrong}, "row 0", OPEN_FOOD_FACTS, ()).problems
        assert "objects.bbox is" in problem
        assert "two lists of the same length" in problem


@given(data=st.data())
@quick(150)
def test_any_damage_to_a_row_gives_a_record_or_problems_in_words(data: st.DataObject) -> None:
    image = data.draw(st.sampled_from([png(), patch_jpeg((0.2, 0.1, 0.9, 0.5), (60, 40), orientation=6)]))
    whole = raw_row(row(image=image))
    damaged = data.draw(st.just(whole) | damaged_tree(whole).filter(lambda tree: isinstance(tree, dict)))
    if isinstance(damaged.get("image"), dict) and damaged["image"].get("bytes") == image:
        damaged["image"]["bytes"] = data.draw(st.just(image) | damaged_bytes(image))
    found = parse_row(row_of(damaged, "row 0", OPEN_FOOD_FACTS, ()), Reader(), FORM, "train")
    if isinstance(found, DetectionRecord):
        assert found.targets()
        assert found.open_image().size == (found.width, found.height)
        assert json.dumps([row | {"image": ""} for row in to_rows([found], SCHEMA)]).encode()
    else:
        assert all(len(problem) < 300 and problem.isprintable() for problem in found)
