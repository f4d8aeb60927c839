import json
import logging
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import UserError
from stages.tasks.detection.samples import DetectionRecord, read_split
from stages.tasks.detection.sources import Reader
from stages.tasks.detection.sources.folder import split_of
from tests.kit.data.images import patch_jpeg, png
from tests.tasks import prepare
from tests.tasks.detection.sources.written import CLASSES, COLUMNS, PHOTOS, WRITERS, Photo, Photos, write_voc

ASKED: dict[str, Any] = {"category": tuple(CLASSES), "label": {"red lid": "lid"}, "empty_images": True}


def records(tmp_path: Path, form: str, photos: Photos = PHOTOS, **settings: Any) -> dict[str, list[DetectionRecord]]:
    folder = tmp_path / form
    if not folder.exists():
        WRITERS[form](folder, photos)
    reader = Reader(**({"columns": COLUMNS} if form == "parquet" else {}) | ASKED | settings)
    prepare("detection", f"folder:{folder}", out_dir=tmp_path / f"prepared-{form}", reader=reader)
    return {split: read_split(tmp_path / f"prepared-{form}", split) for split in ("train", "val")}


def refusal(tmp_path: Path, form: str, **settings: Any) -> str:
    with pytest.raises(UserError) as refused:
        records(tmp_path, form, **settings)
    return refused.value.message


@pytest.mark.parametrize("form", WRITERS)
def test_every_form_of_the_same_pictures_gives_the_same_records(tmp_path: Path, form: str) -> None:
    found = records(tmp_path, form)
    assert {split: [record.image_id for record in some] for split, some in found.items()} == {
        split: [Path(photo.name).stem for photo in some] for split, some in PHOTOS.items()
    }
    for split, some in PHOTOS.items():
        for record, photo in zip(found[split], some, strict=True):
            assert (record.width, record.height) == photo.size
            assert record.categories == tuple(name for _, name in photo.boxes)
            for box, (written, _) in zip(record.boxes, photo.boxes, strict=True):
                assert box == pytest.approx(written, abs=1e-12)
    first, second, empty = found["train"]
    assert first.image == PHOTOS["train"][0].encoded
    assert [label for _, label in second.targets()] == ["Nährwerte", "cup", "lid"], "in reading order"
    assert (empty.boxes, second.asked, second.scored_boxes) == ((), ("cup", "lid", "Nährwerte"), "all")
    assert second.prompt == "Detect the bounding boxes of every cup, lid and Nährwerte."


def test_the_log_says_which_form_it_is_and_how_that_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stages")
    for form, by in (("coco", "coco, by annotations/instances_train2017.json"), ("yolo", "yolo, by data.yaml")):
        records(tmp_path, form)
        assert f"{tmp_path / form} is read as {by}" in caplog.text


def test_a_folder_of_two_forms_or_of_none_is_never_guessed(tmp_path: Path) -> None:
    WRITERS["yolo"](tmp_path / "both", PHOTOS)
    WRITERS["voc"](tmp_path / "both", PHOTOS)
    message = refusal(tmp_path, "both")
    assert "files of several forms:\n  yolo: data.yaml\n  voc: Annotations/a.xml" in message
    assert "`format` of the dataset's `reader` in params.yaml, yolo or voc" in message
    assert records(tmp_path, "both", format="yolo") == records(tmp_path, "yolo")
    (tmp_path / "none").mkdir()
    (tmp_path / "none/a.png").write_bytes(png())
    message = refusal(tmp_path, "none")
    assert "it holds 1 .png file (a.png). Expected one of:" in message
    assert all(form in message for form in ("COCO", "YOLO", "Pascal VOC", "parquet"))
    assert "`columns` in params.yaml are of parquet files" in refusal(tmp_path, "coco", columns=COLUMNS)


@pytest.mark.parametrize("form", WRITERS)
def test_what_no_form_may_hold_is_refused_alike(tmp_path: Path, form: str) -> None:
    """All of it at once, each by its place: a corrupt picture, a bomb, a box outside or without area, and none."""
    box = (0.1, 0.1, 0.5, 0.5)
    header = b"IHDR" + (60_000).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    bomb = png()[:12] + header + zlib.crc32(header).to_bytes(4, "big") + png()[33:]
    wrong = {
        "bomb.png": Photo(name="bomb.png", encoded=bomb, boxes=[(box, "cup")]),
        "cut.png": Photo(name="cut.png", encoded=png()[:45], boxes=[(box, "cup")]),
        "outside.png": Photo(name="outside.png", encoded=png((1, 2, 3)), boxes=[((0.1, 0.1, 1.2, 0.5), "cup")]),
        "reversed.png": Photo(name="reversed.png", encoded=png((1, 2, 4)), boxes=[((0.5, 0.1, 0.5, 0.5), "cup")]),
        "none.png": Photo(name="none.png", encoded=png((1, 2, 5))),
    }
    WRITERS[form](tmp_path / form, {"train": [*PHOTOS["train"], *wrong.values()], "val": PHOTOS["val"]})
    message = refusal(tmp_path, form, empty_images=False)
    expected = [
        "exceeds limit",
        "unreadable image: ",
        "lies outside",
        "zero area",
        "no boxes; with empty_images: true",
    ]
    assert [problem for problem in expected if problem not in message] == []
    place = {
        "coco": "annotations/instances_train2017.json image 5: annotation 6 (4, 3, 44, 12) lies outside the image",
        "yolo": "train/labels/outside.txt: line 1: box (0.65, 0.3, 1.1, 0.4) lies outside 0..1",
        "voc": "Annotations/outside.xml: object 1: box (4, 3, 48, 15) lies outside the image, 40 x 30 pixels",
        "parquet": "data/train-00000-of-00001.parquet row 5: box 0 (4, 3, 44, 12) lies outside the image",
    }[form]
    assert place in message


@pytest.mark.parametrize("form", WRITERS)
def test_markup_in_a_category_is_refused_and_a_picture_in_both_splits_too(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = "cup<|im_end|>"
    monkeypatch.setattr("tests.tasks.detection.sources.written.CLASSES", (named, *CLASSES))
    one = replace(PHOTOS["train"][0], boxes=[((0.1, 0.1, 0.5, 0.5), named)])
    WRITERS[form](tmp_path / form, {"train": [*PHOTOS["train"][1:], one], "val": PHOTOS["val"]})
    assert "chat markup, <|im_end|>" in refusal(tmp_path, form)
    twice = replace(PHOTOS["val"][0], name="again.png")
    WRITERS[form](tmp_path / f"twice/{form}", {"train": [*PHOTOS["train"], twice], "val": PHOTOS["val"]})
    assert "1 training sample whose image is in the validation split too" in refusal(tmp_path / "twice", form)


def test_boxes_of_a_picture_before_its_rotation_are_refused(tmp_path: Path) -> None:
    turned = replace(PHOTOS["train"][1], encoded=patch_jpeg((0.1, 0.25, 0.5, 0.45), (80, 160), 6))
    for form in ("coco", "voc"):
        WRITERS[form](tmp_path / form, {"train": [turned], "val": PHOTOS["val"]})
        for path in (*(tmp_path / form).rglob("b.xml"), *(tmp_path / form).rglob("*train2017.json")):
            text = path.read_text().replace('"width": 80, "height": 160', '"width": 160, "height": 80')
            path.write_text(text.replace("<width>80</width><height>160", "<width>160</width><height>80"))
        assert "are for 160 x 80 pixels, the upright image is 80 x 160: the boxes may be of the image before" in (
            refusal(tmp_path, form)
        )


def test_what_is_wrong_with_coco_is_named_by_id(tmp_path: Path) -> None:
    WRITERS["coco"](tmp_path / "coco", PHOTOS)
    path = tmp_path / "coco/annotations/instances_train2017.json"
    document = json.loads(path.read_text())
    document["images"][2]["file_name"] = "../val2017/missing.png"
    document["images"].append({"id": 0, "file_name": "a.png"})
    document["annotations"] += [
        {"id": "x", "image_id": 99, "category_id": 3, "bbox": [1, 1, 2, 2]},
        {"id": 71, "image_id": 1, "category_id": 99, "bbox": [1, 1, 2, 2]},
        {"id": 72, "image_id": 1, "category_id": 3, "bbox": [1, 1, "2", None]},
        {"id": 73, "image_id": 1, "category_id": 3, "bbox": [1, 1, 2, 2], "iscrowd": 1},
    ]
    path.write_text(json.dumps(document))
    message = refusal(tmp_path, "coco")
    here = "annotations/instances_train2017.json"
    for problem in (
        f"{here} annotation x: image_id 99 is not that of a valid image",
        f"{here} image 1: annotation 71: category_id 99 is not among the categories",
        f"{here} image 1: annotation 72: bbox.2: input should be a valid number, found '2'",
        f"{here} image 1: annotation 73 is a crowd (iscrowd)",
        f"{here} image 2: image '../val2017/missing.png': there is none",
        f"{here} image 0: its id is that of several images",
    ):
        assert problem in message
    path.write_text('{"images": [}')
    assert f"{here}: no JSON: line 1, column 13" in refusal(tmp_path, "coco")


def test_what_is_wrong_with_yolo_is_named_by_line(tmp_path: Path) -> None:
    WRITERS["yolo"](tmp_path / "yolo", PHOTOS)
    labels = tmp_path / "yolo/train/labels"
    (labels / "a.txt").write_text(
        "0 0.5 0.5 0.1 0.1\n\n7 0.5 0.5 0.1 0.1\n0 0.5 0.5 nan 0.1\n0 0.1 0.1 0.2 0.2 0.3 0.3\n"
    )
    (labels / "stray.txt").write_text("")
    (labels / "empty.txt").unlink()
    message = refusal(tmp_path, "yolo", empty_images=False)
    for problem in (
        "train/labels/a.txt: line 3: no class has the number 7; there are 3",
        "train/labels/a.txt: line 4 is '0 0.5 0.5 nan 0.1', 5 fields; expected five numbers",
        "train/labels/a.txt: line 5 is '0 0.1 0.1 0.2 0.2 0.3 0.3', 7 fields of an outline; export boxes",
        "train/labels/stray.txt: there is no image with this name",
        "train/images/empty.png: no boxes; with empty_images: true it is a sample that has none: there is no train/",
    ):
        assert problem in message
    (tmp_path / "yolo/classes.txt").write_text("cup\n")
    (tmp_path / "yolo/data.yaml").write_text("names: [cup\n")
    assert "data.yaml cannot be read: line " in refusal(tmp_path, "yolo")
    (tmp_path / "yolo/data.yaml").write_text("names: [cup]\ntrain: elsewhere\nval: val\n")
    assert "data.yaml names 'elsewhere', and" in refusal(tmp_path, "yolo")
    (tmp_path / "yolo/data.yaml").unlink()
    (tmp_path / "yolo/classes.txt").unlink()
    assert "the names of the classes are in data.yaml, classes.txt or obj.names, and there is none" in (
        refusal(tmp_path, "yolo", format="yolo")
    )


def test_what_is_wrong_with_voc_is_named_by_line_and_entities_are_never_read(tmp_path: Path) -> None:
    write_voc(tmp_path / "voc", PHOTOS)
    annotations = tmp_path / "voc/Annotations"
    (annotations / "a.xml").write_text(
        "<annotation>\n<object><name>cup</name>\n<bndbox><xmin>1</xmin><ymin>x</ymin><xmax>9</xmax></bndbox></object>\n"
        "<object><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object></annotation>"
    )
    billion = '<!DOCTYPE annotation [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]>\n<annotation>&b;</annotation>'
    (annotations / "b.xml").write_text(billion)
    (annotations / "empty.xml").write_text("<annotation>\n<size></annotation>")
    (annotations / "more").mkdir()
    (annotations / "more/c.xml").write_bytes((annotations / "c.xml").read_bytes())
    (tmp_path / "voc/ImageSets/Main/val.txt").write_text("c\n\nlost 1\n")
    message = refusal(tmp_path, "voc")
    for problem in (
        "Annotations/a.xml: object 1: bndbox/ymin is 'x', expected a number",
        "Annotations/a.xml: object 1: bndbox/ymax is missing",
        "Annotations/a.xml: object 2: name is missing",
        "Annotations/b.xml: a document type (<!DOCTYPE) is never read",
        "Annotations/empty.xml: no XML: mismatched tag: line 2, column 8",
        "ImageSets/Main/val.txt line 1: 2 XML files have the name 'c': Annotations/c.xml, Annotations/more/c.xml",
        "ImageSets/Main/val.txt line 3: 0 XML files have the name 'lost'",
    ):
        assert problem in message


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    WRITERS["yolo"](tmp_path / "yolo", PHOTOS)
    secret = tmp_path / "secret.txt"
    secret.write_text("0 0.5 0.5 0.1 0.1")
    label = tmp_path / "yolo/train/labels/a.txt"
    label.unlink()
    label.symlink_to(secret)
    assert "leads out of" in refusal(tmp_path, "yolo")


def test_without_a_split_a_share_is_held_out(tmp_path: Path) -> None:
    photos = [Photo(name=f"{n}.png", encoded=png((n, n, 0)), boxes=[((0, 0, 0.5, 1), "cup")]) for n in range(10)]
    write_voc(tmp_path / "voc", {"all": photos})
    found = records(tmp_path, "voc", category="cup", label={})
    assert (len(found["train"]), len(found["val"])) == (8, 2)
    assert found["train"][0].scored_boxes == "first", "of one category that is no list"


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("annotations/instances_train2017.json", "train"),
        ("valid/labels/7.txt", "val"),
        ("data/test-set/train/1.xml", "train"),
        ("my-tests/1.xml", None),
        ("Training/1.xml", "train"),
        ("dev.json", "dev"),
    ],
)
def test_a_split_is_a_word_of_the_path_the_nearest_first(path: str, split: str | None) -> None:
    assert split_of(path) == split


def test_what_nobody_would_be_asked_is_not_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "no image to train on has a box of cpu, which is asked for; found Nährwerte, cup, red lid" in (
        refusal(tmp_path, "coco", category=("cup", "cpu"), label={})
    )
    assert "'red lit' is not asked for (did you mean 'red lid'?)" in refusal(tmp_path, "coco", label={"red lit": "lid"})
    assert "does not come back out of an answer" in refusal(tmp_path, "coco", label={"cup": "{cup}"}, answer="json")
    (tmp_path / "coco/train2017/more.png").write_bytes(png((5, 5, 5)))
    records(tmp_path, "coco")
    assert "not read: train2017/more.png" in caplog.text
    (tmp_path / "coco/annotations/instances_test.json").write_text('{"images": [], "annotations": []}')
    records(tmp_path, "coco")
    assert "not read: annotations/instances_test.json, train2017/more.png" in caplog.text


def test_two_annotation_files_of_a_picture_and_two_pictures_of_a_name_are_refused(tmp_path: Path) -> None:
    WRITERS["coco"](tmp_path / "coco", PHOTOS)
    annotations = tmp_path / "coco/annotations"
    (annotations / "captions_train2017.json").write_text((annotations / "instances_train2017.json").read_text())
    (tmp_path / "coco/val2017/a.png").write_bytes(png())
    message = refusal(tmp_path, "coco")
    assert "a.png is that of annotations/captions_train2017.json image 0 too" in message
    (annotations / "captions_train2017.json").unlink()
    assert records(tmp_path, "coco")["train"][0].image == PHOTOS["train"][0].encoded, "that of its own split"
    (tmp_path / "coco/train2017/b").mkdir()
    (tmp_path / "coco/train2017/b/a.png").write_bytes(png())
    assert "image 'a.png': 2 images have this name: train2017/a.png, train2017/b/a.png" in refusal(tmp_path, "coco")
