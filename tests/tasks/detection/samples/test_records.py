import io
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stages.kit.data.prepared import to_row
from stages.tasks.detection.samples import SCHEMA, DetectionRecord
from stages.tasks.detection.sources.rows import parse_row
from tests.damage import damaged_bytes, damaged_tree, quick
from tests.kit.data.images import RED, patch_jpeg, png
from tests.tasks.detection.rows import raw_row


def parsed(row: dict[str, Any]) -> DetectionRecord:
    record = parse_row(row)
    assert isinstance(record, DetectionRecord), record
    return record


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_box_lies_on_its_patch_after_exif_rotation(orientation: int) -> None:
    box, size = (0.1, 0.25, 0.5, 0.45), (80, 160)
    record = parsed(raw_row(image=patch_jpeg(box, size, orientation), bbox=[[0.25, 0.1, 0.45, 0.5]]))
    upright = record.open_image()
    assert upright.size == (record.width, record.height) == size
    assert Image.open(io.BytesIO(record.image)).getexif().get(0x0112, 1) == 1, "nothing is left to rotate"

    (x0, y0, x1, y1) = record.boxes[0]
    is_red = np.abs(np.asarray(upright, dtype=int) - RED).sum(axis=2) < 60  # (height, width)
    ys, xs = np.nonzero(is_red)
    found = (xs.min() / size[0], ys.min() / size[1], (xs.max() + 1) / size[0], (ys.max() + 1) / size[1])
    assert found == pytest.approx((x0, y0, x1, y1), abs=0.02)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({**raw_row(), "image": None}, "no image"),
        ({**raw_row(), "objects": None}, "objects is None, expected bbox and category_name"),
        (raw_row(bbox=[]), "no boxes"),
        (raw_row(bbox=[[0.1, 0.2, 0.5, 0.9]], names=[]), "1 boxes, but 0 category names"),
        (raw_row(bbox=[[0.1, 0.2, 0.5, 1.2]]), r"box 0 \(0.1, 0.2, 0.5, 1.2\) lies outside 0..1"),
        (raw_row(bbox=[[-0.1, 0.2, 0.5, 0.9]]), "box 0 .* lies outside 0..1"),
        (raw_row(bbox=[[10, 20, 50, 90]]), "box 0 .* lies outside 0..1"),
        (raw_row(bbox=[[0.5, 0.2, 0.1, 0.9]]), "box 0 .* wrong order"),
        (raw_row(bbox=[[0.1, 0.9, 0.5, 0.2]]), "box 0 .* wrong order"),
        (raw_row(bbox=[[0.1, 0.2, 0.1, 0.9]]), "box 0 .* zero area"),
        (raw_row(bbox=[[0.1, 1.0, 0.5, 1.0000005]]), "box 0 .* zero area"),
        (raw_row(bbox=[[0.1, 0.2, float("nan"), 0.9]]), "box 0 .* not a number"),
        (raw_row(bbox=[[0.1, 0.2, None, 0.9]]), "box 0 .* not a number"),
        (raw_row(bbox=[[0.1, 0.2, 0.5]]), "box 0 is .*, expected"),
        (raw_row(bbox=[None]), "box 0 is None, expected"),
        (raw_row(names=[None]), "category 0 is None"),
        (raw_row(names=["barcode"]), "no box of a category that starts with nutrition-table; found barcode"),
    ],
)
def test_bad_row_is_reported(row: dict[str, Any], problem: str) -> None:
    problems = parse_row(row)
    assert isinstance(problems, list)
    assert len(problems) == 1
    assert re.search(problem, problems[0])


def test_every_problem_of_a_row_is_reported() -> None:
    problems = parse_row(raw_row(image_id="", image=b"no", bbox=[[0.5, 0.2, 0.1, 0.9], [0.1, 0.2, 0.3, 7.0]]))
    assert isinstance(problems, list)
    assert [problem.split()[0] for problem in problems] == ["image_id", "unreadable", "box", "box"]


def test_rounding_outside_the_image_is_clipped() -> None:
    record = parsed(raw_row(bbox=[[-5e-7, 0.2, 1.0000005, 0.9]]))
    assert record.boxes == ((0.2, 0.0, 0.9, 1.0),)


def test_targets_are_the_nutrition_tables_in_reading_order() -> None:
    bbox = [[0.6, 0.1, 0.9, 0.4], [0.0, 0.0, 0.1, 0.1], [0.1, 0.5, 0.4, 0.9], [0.1, 0.1, 0.4, 0.4]]
    names = ["nutrition-table", "barcode", "nutrition-table-small", "nutrition-table-text"]
    assert parsed(raw_row(bbox=bbox, names=names)).target_boxes() == (
        (0.1, 0.1, 0.4, 0.4),
        (0.5, 0.1, 0.9, 0.4),
        (0.1, 0.6, 0.4, 0.9),
    )


@given(data=st.data())
@quick(150)
def test_any_damage_to_a_row_gives_a_record_or_problems_in_words(data: st.DataObject) -> None:
    image = data.draw(st.sampled_from([png(), patch_jpeg((0.2, 0.1, 0.9, 0.5), (60, 40), orientation=6)]))
    row = raw_row(image=image)
    row = data.draw(st.just(row) | damaged_tree(row).filter(lambda tree: isinstance(tree, dict)))
    if isinstance(row.get("image"), dict) and row["image"].get("bytes") == image:
        row["image"]["bytes"] = data.draw(st.just(image) | damaged_bytes(image))
    found = parse_row(row)
    if isinstance(found, DetectionRecord):
        assert found.target_boxes()
        assert found.open_image().size == (found.width, found.height)
        assert json.dumps(to_row(found, SCHEMA) | {"image": ""}).encode()
    else:
        assert all(len(problem) < 300 and problem.isprintable() for problem in found)
