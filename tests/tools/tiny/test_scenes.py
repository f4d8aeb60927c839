import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from stages.tasks.detection.samples import TARGET, DetectionRecord
from stages.tasks.detection.sources.rows import parse_row
from tools.tiny.drawing import FACES, load_font
from tools.tiny.scenes import (
    OBJECTS,
    Kind,
    _split_seed,
    _turned_hull,
    draw_scene,
    ean13,
    generate_rows,
)

KINDS: tuple[Kind, ...] = ("objects", "front", "back")
indices = st.integers(0, 10**6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scene_depends_on_kind_seed_and_index_alone(kind: Kind):
    first, again = draw_scene(kind, 5, 3), draw_scene(kind, 5, 3)
    assert first.image.tobytes() == again.image.tobytes()
    assert (first.boxes, first.categories) == (again.boxes, again.categories)
    others = [draw_scene(kind, 5, 4), draw_scene(kind, 6, 3)]
    assert all(other.image.tobytes() != first.image.tobytes() for other in others)


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=indices, index=indices)
def test_boxes_lie_in_the_picture_from_top_to_bottom(kind: Kind, seed: int, index: int):
    scene = draw_scene(kind, seed, index)
    assert 224 <= min(scene.image.size) <= max(scene.image.size) <= 280
    for x0, y0, x1, y1 in scene.boxes:
        assert 0 <= x0 < x1 <= 1
        assert 0 <= y0 < y1 <= 1
        assert (x1 - x0) * (y1 - y0) > 0.005
    assert [box[1] for box in scene.boxes] == sorted(box[1] for box in scene.boxes)


@settings(max_examples=40, deadline=None)
@given(seed=indices, index=indices, kind=st.sampled_from(KINDS[1:]))
def test_a_package_shows_one_to_three_nutrition_tables(seed: int, index: int, kind: Kind):
    assert 1 <= len(draw_scene(kind, seed, index).boxes) <= 3
    assert set(draw_scene(kind, seed, index).categories) == {TARGET}


@settings(max_examples=30, deadline=None)
@given(seed=indices, index=indices, objects=st.sampled_from([1, 2, 3]))
def test_pre_training_scenes_show_the_wanted_number_of_kinds_and_no_table(seed: int, index: int, objects: int):
    categories = draw_scene("objects", seed, index, objects=objects).categories
    assert len(set(categories)) == objects
    assert set(categories) <= set(OBJECTS)


@pytest.mark.parametrize("angle", [0.0, 7.5, -12.0, 90.0])
def test_the_hull_of_a_turned_table_is_where_the_turned_pixels_are(angle: float):
    face = Image.new("L", (120, 90))
    face.paste(255, (70, 10, 100, 40))
    picture = Image.new("L", (200, 200))
    turned = face.rotate(angle, expand=True, resample=Image.Resampling.BICUBIC)
    picture.paste(turned, (100 - turned.width // 2, 100 - turned.height // 2))
    rows, columns = np.nonzero(np.array(picture) > 100)
    seen = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    assert _turned_hull((70, 10, 100, 40), face.size, angle, (100, 100)) == pytest.approx(seen, abs=2)


def test_rows_are_valid_and_give_a_scenes_boxes_as_y_min_x_min_y_max_x_max():
    for index, row in enumerate(generate_rows("val", 4, seed=3)):
        assert isinstance(parse_row(row), DetectionRecord)
        kind: Kind = "front" if row["image_id"].endswith("_1") else "back"
        boxes = draw_scene(kind, _split_seed("val", 3), index).boxes
        assert row["objects"]["bbox"] == [[y0, x0, y1, x1] for x0, y0, x1, y1 in boxes]


@pytest.mark.parametrize("seed", [0, 42])
def test_train_and_val_share_no_picture_and_no_product(seed: int):
    train, val = (list(generate_rows(split, 25, seed)) for split in ("train", "val"))
    for key in (
        lambda row: row["image"]["bytes"],
        lambda row: row["image_id"].partition("_")[0],  # the barcode
    ):
        assert len({key(row) for row in train + val}) == 50


def test_a_longer_dataset_begins_with_the_shorter_one():
    shorter, longer = list(generate_rows("train", 3, 9)), list(generate_rows("train", 5, 9))
    assert longer[:3] == shorter


@pytest.mark.parametrize("code", ["4006381333931", "9780201379624"])
def test_check_digits_are_those_of_ean13(code: str):
    assert ean13(code[:12]) == code


def test_fonts_come_with_the_libraries():
    for face, size in itertools.product(FACES, (5, 20)):
        assert "site-packages" in str(load_font(face, size).path)
