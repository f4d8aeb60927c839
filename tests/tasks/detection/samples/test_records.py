import io
import json
import re
import subprocess
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from stages.tasks.detection.samples.records import DetectionRecord, parse_row, reading_order, to_row
from tests.damage import damaged_bytes, damaged_tree, quick
from tests.tasks.detection.rows import RED, patch_jpeg, picture, raw_row


def parsed(row: dict[str, Any]) -> DetectionRecord:
    record = parse_row(row)
    assert isinstance(record, DetectionRecord), record
    return record


def greyscale(mode: str, form: str) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (40, 30), 1).save(buffer, form)
    return buffer.getvalue()


def without(name: str) -> dict[str, Any]:
    row = raw_row()
    del row[name]
    return row


def test_axes_of_the_file_become_x_first() -> None:
    record = parsed(raw_row(bbox=[[0.1, 0.2, 0.5, 0.9]]))
    assert record.boxes == ((0.2, 0.1, 0.9, 0.5),)
    assert (record.width, record.height) == (40, 30)


def test_upright_image_keeps_its_bytes() -> None:
    for image in (picture(), patch_jpeg((0.2, 0.1, 0.9, 0.5), (160, 120), orientation=1)):
        assert parsed(raw_row(image=image)).image == image


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
        (without("image"), "column image is missing"),
        (without("objects"), "column objects is missing"),
        ({**raw_row(), "image_id": None}, "image_id is None"),
        ({**raw_row(), "image": None}, "no image"),
        ({**raw_row(), "image": {"bytes": None, "path": "a.jpg"}}, "no image"),
        (raw_row(image=b"<html>not found</html>"), "unreadable image: cannot identify"),
        (raw_row(image=patch_jpeg((0, 0, 1, 1), (160, 120), 1)[:-300]), "unreadable image: .*truncated"),
        (raw_row(image=picture(size=(160, 120))[:-30]), "unreadable image"),
        (raw_row("long", image=picture(size=(805, 4))), "image of 'long' is 805 x 4 pixels: .* more than 200 times"),
        (raw_row(image=picture(size=(1, 201))), "1 x 201 pixels"),
        (raw_row(image=greyscale("I;16", "PNG")), "unreadable image: greyscale pixels of more than 8 bits .*I;16"),
        (raw_row(image=greyscale("I", "TIFF")), "greyscale pixels of more than 8 bits"),
        (raw_row(image=greyscale("F", "TIFF")), "greyscale pixels of more than 8 bits"),
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


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PNG of a few kilobytes can be one of gigabytes."""
    row = raw_row(image=picture(size=(40, 30)))
    assert isinstance(parse_row(row, max_image_pixels=1200), DetectionRecord)
    bomb = bytearray(picture())
    bomb[16:24] = (13_000).to_bytes(4) * 2  # width and height in its header
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4)
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("it was decoded"))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
    assert parse_row(row, max_image_pixels=1199) == [
        "unreadable image: 40 x 30 pixels, more than max_image_pixels, 1,199"
    ]
    assert parse_row(raw_row(image=bytes(bomb))) == [
        "unreadable image: 13000 x 13000 pixels, more than max_image_pixels, 64,000,000"
    ]


def test_a_picture_that_another_program_would_be_started_for_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow has Ghostscript draw EPS, which is a program of its own."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30)).save(buffer, "EPS")
    assert parse_row(raw_row(image=buffer.getvalue())) == [
        "unreadable image: cannot identify image as JPEG, PNG, WEBP, GIF, BMP, TIFF"
    ]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "MPO"])
def test_photographs_of_every_usual_form_are_read(form: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30)).save(buffer, form)
    assert parsed(raw_row(image=buffer.getvalue())).open_image().size == (40, 30)


def test_the_longest_picture_taken_is_the_longest_that_the_processor_takes() -> None:
    parsed(raw_row(image=picture(size=(800, 4))))
    smart_resize(4, 800)
    with pytest.raises(ValueError, match="aspect ratio"):
        smart_resize(4, 801)


def test_every_problem_of_a_row_is_reported() -> None:
    problems = parse_row(raw_row(image_id="", image=b"no", bbox=[[0.5, 0.2, 0.1, 0.9], [0.1, 0.2, 0.3, 7.0]]))
    assert isinstance(problems, list)
    assert [problem.split()[0] for problem in problems] == ["image_id", "box", "box", "unreadable"]


def test_rounding_outside_the_image_is_clipped() -> None:
    record = parsed(raw_row(bbox=[[-5e-7, 0.2, 1.0000005, 0.9]]))
    assert record.boxes == ((0.2, 0.0, 0.9, 1.0),)


def test_same_picture_in_other_clothes_has_the_same_digest() -> None:
    plain = picture((10, 20, 30))
    with_metadata = io.BytesIO()
    Image.open(io.BytesIO(plain)).save(with_metadata, "PNG", dpi=(300, 300))
    assert plain != with_metadata.getvalue()
    assert parsed(raw_row(image=plain)).sha256 == parsed(raw_row(image=with_metadata.getvalue())).sha256
    assert parsed(raw_row(image=plain)).sha256 != parsed(raw_row(image=picture((10, 20, 31)))).sha256


def test_digest_tells_shapes_with_equal_pixels_apart() -> None:
    wide, tall = (parsed(raw_row(image=picture(size=size))) for size in ((40, 30), (30, 40)))
    assert wide.sha256 != tall.sha256


def test_targets_are_the_nutrition_tables_in_reading_order() -> None:
    bbox = [[0.6, 0.1, 0.9, 0.4], [0.0, 0.0, 0.1, 0.1], [0.1, 0.5, 0.4, 0.9], [0.1, 0.1, 0.4, 0.4]]
    names = ["nutrition-table", "barcode", "nutrition-table-small", "nutrition-table-text"]
    assert parsed(raw_row(bbox=bbox, names=names)).target_boxes() == (
        (0.1, 0.1, 0.4, 0.4),
        (0.5, 0.1, 0.9, 0.4),
        (0.1, 0.6, 0.4, 0.9),
    )


def test_reading_order_is_top_to_bottom_then_left_to_right() -> None:
    low, right, left = (0.0, 0.5, 0.2, 0.9), (0.6, 0.1, 0.9, 0.3), (0.1, 0.1, 0.4, 0.4)
    assert reading_order([low, right, left]) == (left, right, low)


@given(data=st.data())
@quick(150)
def test_any_damage_to_a_row_gives_a_record_or_problems_in_words(data: st.DataObject) -> None:
    image = data.draw(st.sampled_from([picture(), patch_jpeg((0.2, 0.1, 0.9, 0.5), (60, 40), orientation=6)]))
    row = raw_row(image=image)
    row = data.draw(st.just(row) | damaged_tree(row).filter(lambda tree: isinstance(tree, dict)))
    if isinstance(row.get("image"), dict) and row["image"].get("bytes") == image:
        row["image"]["bytes"] = data.draw(st.just(image) | damaged_bytes(image))
    found = parse_row(row)
    if isinstance(found, DetectionRecord):
        assert found.target_boxes()
        assert found.open_image().size == (found.width, found.height)
        assert json.dumps(to_row(found) | {"image": ""}).encode()
    else:
        assert all(len(problem) < 300 and problem.isprintable() for problem in found)
