"""Nothing in a folder of images is ignored, whatever its form: one image and one box of it, changed in one way."""

import json
import logging
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.core.errors import UserError
from stages.core.records import parse
from stages.data import folder as folder_files
from stages.tasks.detection.samples import DetectionRecord, ForModel, read_split
from stages.tasks.detection.samples.boxes import decode_boxes, encode_boxes
from stages.tasks.detection.sources import coco as coco_form
from stages.tasks.detection.sources.rows import NO_PLAIN_BOX, Reader
from tests.data.images import png
from tests.tasks import prepare
from tests.tasks.detection.written import WRITERS, Photo

FORMS = ("coco", "yolo", "voc", "parquet")
FOLDERS = ("coco", "yolo", "voc")
"""Forms in which images are files of their own."""
BOX = {"cup": (4, 3, 20, 15)}


def write(path: Path, content: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def write_samples(
    folder: Path,
    form: str,
    names: dict[str, list[str]],
    *,
    category: str = "cup",
    boxes: list[list[float]] | None = None,
    field: tuple[str, Any] | None = None,
    entry: tuple[str, list[Any]] | None = None,
    annotated: Callable[[str], str] = lambda name: name,
) -> Path:
    """A folder of images of these names by split, each with the boxes, corners in pixels of 40 x 30.

    field: a further field of each box. entry: one of each image, with its values. annotated: from an image's name to
    that in the annotations.
    """
    boxes = [[4, 3, 20, 15]] if boxes is None else boxes
    more, numbers = dict([field] if field else []), iter(range(999))
    values = iter(entry[1]) if entry else iter(())
    for split, some in names.items():
        images, annotations, rows = [], [], []
        for name in some:
            number = next(numbers)
            encoded, own = png((number * 9, 40, 90)), {entry[0]: next(values)} if entry else {}
            if form != "parquet":
                write(folder / split / f"{name}.png", encoded)
            images.append({"id": number, "file_name": annotated(f"{split}/{name}.png"), **own})
            annotations += [
                {"id": next(numbers), "image_id": number, "category_id": 1, "bbox": [x, y, u - x, v - y], **more}
                for x, y, u, v in boxes
            ]
            lines = [f"0 {(x + u) / 80} {(y + v) / 60} {(u - x) / 40} {(v - y) / 30}\n" for x, y, u, v in boxes]
            inside = "".join(f"<{key}>{value}</{key}>" for key, value in more.items())
            objects = [
                f"<object><name>{category}</name>{inside}<bndbox>"
                f"<xmin>{x}</xmin><ymin>{y}</ymin><xmax>{u}</xmax><ymax>{v}</ymax></bndbox></object>"
                for x, y, u, v in boxes
            ]
            struct = {"bbox": boxes, "category": [category] * len(boxes)}
            struct |= {key: [value] * len(boxes) for key, value in more.items()}
            rows.append({"name": name, "image": {"bytes": encoded}, "objects": struct, **own})
            if form == "yolo":
                write(folder / annotated(f"{split}/{name}.txt"), "".join(lines))
            if form == "voc":
                write(folder / annotated(f"{split}/{name}.xml"), f"<annotation>{''.join(objects)}</annotation>")
        if form == "coco":
            document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": category}]}
            write(folder / f"{split}/_annotations.coco.json", json.dumps(document))
        if form == "parquet":
            (folder / "data").mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows), folder / f"data/{split}-0.parquet")
    if form == "yolo":
        write(folder / "classes.txt", f"{category}\n")
    return folder


def read(folder: Path, form: str, **settings: Any) -> tuple[dict[str, Any], dict[str, list[DetectionRecord]]]:
    """stats.json and the records of each split."""
    columns = {"columns": {"image_id": "name", "order": "xyxy"}} if form == "parquet" else {}
    reader = parse(Reader, {"category": ["cup"], "empty_images": True} | columns | settings)
    out_dir = folder.parent / "prepared"
    stats = prepare("detection", f"folder:{folder}", out_dir=out_dir, reader=reader)
    return stats, {split: read_split(out_dir, split) for split in stats["splits"]}


def refusal(folder: Path, form: str, **settings: Any) -> str:
    with pytest.raises(UserError) as refused:
        read(folder, form, **settings)
    return refused.value.message


def names_of(splits: dict[str, list[DetectionRecord]]) -> dict[str, list[str]]:
    return {split: sorted(record.image_id for record in records) for split, records in splits.items()}


NAMES = {"train": ["a", "b"], "val": ["c"]}


@pytest.mark.parametrize("form", [form for form in FORMS if form != "yolo"])
@pytest.mark.parametrize(
    ("key", "value"), [("IsGroupOf", 1), ("rotation", 12.5), ("angle", -3), *((key, 1) for key in NO_PLAIN_BOX)]
)
def test_a_field_by_which_a_box_is_none_to_be_learnt_is_refused(
    tmp_path: Path, form: str, key: str, value: float
) -> None:
    message = refusal(write_samples(tmp_path / "in", form, NAMES, field=(key, value)), form)
    assert "3 invalid samples" in message
    assert f"({key} {value}" in message.replace("'", "")
    stats, _ = read(write_samples(tmp_path / "zero", form, NAMES, field=(key, 0)), form, strict=True)
    assert stats["splits"]["train"]["records"] == 2


@pytest.mark.parametrize("form", [form for form in FORMS if form != "yolo"])
@pytest.mark.parametrize(("key", "value"), [("keypoints", "1 2 3"), ("score", 0.5), ("difficult", 1)])
def test_other_fields_of_boxes_are_counted_and_refused_on_request(
    tmp_path: Path, form: str, key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stages")
    folder = write_samples(tmp_path / "in", form, NAMES, field=(key, value))
    name = {"coco": f"annotations.{key}", "voc": f"object.{key}", "parquet": f"objects.{key}"}[form]
    assert read(folder, form)[0]["unread_fields"] == {name: 3}
    assert f"{name} (3)" in caplog.text
    assert f"fields that are not read: {name} (3)" in refusal(folder, form, strict=True)
    assert "unread_fields" not in read(write_samples(tmp_path / "plain", form, NAMES), form, strict=True)[0]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "yolo"])
@pytest.mark.parametrize("value", ["", "false", "0", 0.0])
def test_a_field_of_a_box_that_says_nothing_is_as_none(tmp_path: Path, form: str, value: Any) -> None:
    folder = write_samples(tmp_path / "in", form, NAMES, field=("ignore", value))
    assert len(read(folder, form, strict=True)[1]["train"]) == 2


OWN_FIELDS = {
    "images": ("license", "coco_url", "flickr_url", "date_captured"),
    "annotations": ("area",),
    "categories": ("supercategory",),
}
OWN_ELEMENTS = ("folder", "path", "source", "owner", "segmented", "pose", "truncated", "occluded")


def test_the_formats_own_fields_that_change_nothing_are_ignored(tmp_path: Path) -> None:
    coco, voc = (write_samples(tmp_path / form, form, NAMES) for form in ("coco", "voc"))
    for path in coco.rglob("*.json"):
        document = json.loads(path.read_text())
        for kind, keys in OWN_FIELDS.items():
            document[kind] = [entry | dict.fromkeys(keys, "x") for entry in document[kind]]
        path.write_text(json.dumps({"info": {"year": 1}, "licenses": [1], **document}))
    for path in voc.rglob("*.xml"):
        elements = "".join(f"<{tag}>1</{tag}>" for tag in OWN_ELEMENTS)
        text = path.read_text().replace("<annotation>", f"<annotation>{elements}<filename>other.png</filename>")
        path.write_text(text.replace("<object>", f"<object>{elements}"))
    for form, folder in (("coco", coco), ("voc", voc)):
        assert names_of(read(folder, form, strict=True)[1]) == NAMES, "nor is VOC's filename read"


def test_a_rotation_among_cvats_attributes_is_refused(tmp_path: Path) -> None:
    for degrees, refused in ((12.5, True), (0.0, False)):
        folder = write_samples(tmp_path / f"coco {degrees}", "coco", NAMES, field=("attributes", {"rotation": degrees}))
        attribute = f"<attribute><name>rotation</name><value>{degrees}</value></attribute>"
        xml = write_samples(tmp_path / f"voc {degrees}", "voc", NAMES, field=("attributes", attribute))
        for where, form in ((folder, "coco"), (xml, "voc")):
            if refused:
                assert "is rotated (rotation" in refusal(where, form)
            else:
                assert len(read(where, form)[1]["train"]) == 2


@pytest.mark.parametrize("form", ["coco", "parquet"])
@pytest.mark.parametrize(("key", "value"), [("deleted", True), ("ignore", 1), ("rotation", 90), ("IsGroupOf", 1)])
def test_a_field_of_an_image_counts_like_one_of_a_box(tmp_path: Path, form: str, key: str, value: Any) -> None:
    folder = write_samples(tmp_path / "in", form, NAMES, entry=(key, [value, type(value)(0), value]))
    message = refusal(folder, form)
    assert "2 invalid samples" in message
    assert f"the image is {NO_PLAIN_BOX[key.lower()]} ({key} {value}); leave it out" in message


@pytest.mark.parametrize("form", ["coco", "parquet"])
@pytest.mark.parametrize(("key", "value"), [("split", "test"), ("is_val", True)])
def test_an_image_of_another_split_by_its_own_field_is_refused(tmp_path: Path, form: str, key: str, value: Any) -> None:
    folder = write_samples(
        tmp_path / "in", form, NAMES, entry=(key, ["train", value, value] if key == "split" else [False, value, value])
    )
    assert f"1: {key} is {value!r} in a row of train; put such" in refusal(folder, form).replace("image 2", "image 1")
    stats, _ = read(write_samples(tmp_path / "train", form, NAMES, entry=("split", ["train", "train", "test"])), form)
    assert list(stats["unread_fields"].values()) == [3]


@pytest.mark.parametrize("number", [int, float])
@pytest.mark.parametrize("form", ["coco", "voc", "parquet"])
def test_the_size_of_an_image_is_compared_where_annotations_have_it(
    tmp_path: Path, form: str, number: Callable[[int], float]
) -> None:
    folder = write_samples(tmp_path / "in", form, NAMES, entry=("width", [number(30)] * 3))
    write_size = {"coco": f'"width": {number(30)}', "voc": "<annotation>", "parquet": ""}[form]
    for path in (*folder.rglob("*.json"), *folder.rglob("*.xml")):
        more = ', "height": 40' if form == "coco" else "<size><width>30</width><height>40</height></size>"
        write(path, path.read_text().replace(write_size, write_size + more))
    for path in folder.rglob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.append_column("height", pa.array([number(40)] * len(table))), path)
    assert "the boxes may be of the image before its EXIF rotation" in refusal(folder, form)


@pytest.mark.parametrize("form", ["voc", "parquet"])  # COCO's sizes are checked with its other fields
@pytest.mark.parametrize("side", [-40, 0, None])
def test_a_size_is_unknown_if_a_side_is_0_or_missing_and_wrong_if_one_is_negative(
    tmp_path: Path, form: str, side: int | None
) -> None:
    folder = write_samples(tmp_path / "in", form, NAMES, entry=("width", [side] * 3))
    size = "" if side is None else f"<size><width>{side}</width><height>30</height></size>"
    for path in folder.rglob("*.xml"):
        write(path, path.read_text().replace("<annotation>", f"<annotation>{size}"))
    for path in folder.rglob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.append_column("height", pa.array([30] * len(table))), path)
    if side == -40:
        assert "the annotations are for -40 x 30 pixels, the upright image is 40 x 30" in refusal(folder, form)
    else:
        assert names_of(read(folder, form)[1]) == NAMES


@pytest.mark.parametrize("form", FOLDERS)
def test_an_image_that_is_too_large_or_linked_from_outside_is_invalid_and_not_unused(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_files, "MAX_BYTES", 20_000)
    folder = write_samples(tmp_path / "in", form, {"train": ["a", "b", "c"], "val": ["d"]})
    (folder / "train/b.png").write_bytes(png() + bytes(20_000))
    (folder / "train/c.png").rename(tmp_path / "c.png")
    (folder / "train/c.png").symlink_to(tmp_path / "c.png")
    reader = Reader(category=("cup",))
    stats = prepare("detection", f"folder:{folder}", out_dir=tmp_path / "out", reader=reader, skip_invalid=True)
    large, linked = (each["problem"] for each in stats["splits"]["train"]["invalid"])
    assert "train/b.png has 20," in large
    assert "leads out of" in linked
    assert stats["unused_files"] == []


@pytest.mark.parametrize("tag", ["<name>lid</name>", "<bndbox><xmin>1</xmin></bndbox>"])
def test_an_element_that_is_there_twice_in_an_object_is_refused(tmp_path: Path, tag: str) -> None:
    folder = write_samples(tmp_path / "in", "voc", NAMES)
    for path in folder.rglob("*.xml"):
        write(path, path.read_text().replace("<object>", f"<object>{tag}"))
    message = refusal(folder, "voc")
    assert " is there twice (and 2 more" not in message, "three are named"
    assert "train/a.xml: object 1: " in message
    assert "is there twice" in message


@pytest.mark.parametrize("outer", ["objects", "annotation"])
def test_a_box_of_no_object_is_refused(tmp_path: Path, outer: str) -> None:
    folder = write_samples(tmp_path / "in", "voc", NAMES)
    text = (folder / "train/a.xml").read_text()
    inner = text.removeprefix("<annotation>").removesuffix("</annotation>")
    inner = f"<objects>{inner}</objects>" if outer == "objects" else inner.replace("object>", "Object>")
    write(folder / "train/a.xml", f"<annotation>{inner}</annotation>")
    assert "train/a.xml: a bndbox is not within an <object>" in refusal(folder, "voc")
    write(folder / "train/a.xml", text.replace("</object>", "<part><bndbox><xmin>5</xmin></bndbox></part></object>"))
    assert len(read(folder, "voc")[1]["train"]) == 2, "a part of an object is none"


def test_the_boxes_of_a_yolo_image_are_not_elsewhere(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "in", "yolo", NAMES)
    write(folder / "boxes/b.txt", (folder / "train/b.txt").read_text())
    assert len(read(folder, "yolo")[1]["train"]) == 2
    (folder / "train/b.txt").unlink()
    assert "train/b.png: there is no train/b.txt, only boxes/b.txt" in refusal(folder, "yolo")


def test_darknets_lists_of_images_are_refused_with_the_setting_in_their_place(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "in", "yolo", {"obj_train_data": ["a", "b"], "obj_valid_data": ["c"]})
    write(folder / "train.txt", "data/obj_train_data/a.png\n")
    assert "train.txt may list the images of a split" in refusal(folder, "yolo")
    write(folder / "train.txt", "".join(f"data\\{name}.png\r\n" for name in "bca"))
    assert len(read(folder, "yolo")[1]["val"]) == 1, "a share is held out"
    write(folder / "valid.txt", "data/obj_valid_data/c.png\n")
    message = refusal(folder, "yolo")
    assert "valid.txt may list the images of a split, which is not read; name them in `splits`" in message
    out: dict[str, Any] = {"out_dir": tmp_path / "out", "reader": Reader(category=None)}
    named = {"val": "obj_valid_data/*.png"}
    with pytest.raises(UserError, match=r"no split: obj_train_data/a.png, .*\n.*\nName those of each split"):
        prepare("detection", f"folder:{folder}", splits=named, **out)
    prepare("detection", f"folder:{folder}", splits={"train": "obj_train_data/*.png", **named}, **out)
    assert [record.image_id for record in read_split(tmp_path / "out", "val")] == ["c"]


def test_a_list_beside_folders_that_say_the_splits_is_none_of_images(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "in", "yolo", {"train": ["a"], "val": ["b"], "more": ["c"]})
    write(folder / "val.txt", "a note\n")
    assert {split: len(rows) for split, rows in read(folder, "yolo")[1].items()} == {"train": 1, "val": 1}


def test_one_fault_of_many_files_is_one_message(tmp_path: Path) -> None:
    names = [f"{number}" for number in range(9)]
    folder = write_samples(tmp_path / "in", "voc", {"train": names, "val": ["c"]}, field=("ignore", 1))
    message = refusal(folder, "voc")
    assert message.count("is to be ignored") == 1
    assert "(and 9 more of this kind: train/1.xml, train/2.xml, train/3.xml and 6 more)" in message
    coco = write_samples(tmp_path / "coco", "coco", {"train": names, "val": ["c"]}, entry=("height", ["30"] * 10))
    files = "train/_annotations.coco.json, val/_annotations.coco.json"
    assert f"found '30' (and 9 more of this kind: {files})" in refusal(coco, "coco")


def test_yolo_has_only_keys_of_its_settings_and_what_is_no_box_is_refused(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "in", "yolo", NAMES)
    (folder / "classes.txt").unlink()
    write(folder / "data.yaml", "names: [cup]\nnc: 1\nkpt_shape: [17, 3]\n")
    assert read(folder, "yolo")[0]["unread_fields"] == {"data.yaml kpt_shape": 1}
    assert "data.yaml kpt_shape (1)" in refusal(folder, "yolo", strict=True)
    write(folder / "data.yaml", "\ufeffnames: [cup]\r\n")
    assert len(read(folder, "yolo")[1]["train"]) == 2
    write(folder / "data.yaml", "names: [1]\n")
    assert "names.0: input should be a valid string, found 1" in refusal(folder, "yolo")
    write(folder / "data.yaml", "names: [cup]\nnc: 5\n")
    assert "nc is 5, but names has 1" in refusal(folder, "yolo")
    write(folder / "data.yaml", "names: [cup]\n")
    for count, what in ((3, "3 fields"), (6, "6 fields"), (9, "9 fields of an outline or a rotated box")):
        write(folder / "train/a.txt", "0 " + "0.1 " * (count - 1))
        assert what in refusal(folder, "yolo")
    write(folder / "train/a.txt", "0.000000e+00 5.0e-01 5.0e-01 2.0e-01 2.0E-01\n")
    assert read(folder, "yolo")[1]["train"][0].boxes == ((0.4, 0.4, 0.6, 0.6),)
    (folder / "data.yaml").unlink()
    write(folder / "train/classes.txt", "cup\n")
    write(folder / "val/classes.txt", "cup\r\n")
    assert len(read(folder, "yolo")[1]["train"]) == 2, "the same names are one list"
    write(folder / "val/classes.txt", "lid\n")
    assert "there are several: train/classes.txt, val/classes.txt; leave one" in refusal(folder, "yolo")
    for split in NAMES:
        (folder / split / "classes.txt").unlink()
    write(folder / "classes.txt", "cup\n\nlid\n")
    write(folder / "train/a.txt", "2 0.5 0.5 0.2 0.2\n")
    assert read(folder, "yolo")[1]["train"][0].categories == ("lid",), "a class's number is that of its line"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("written", ["NFC", "NFD"])
@pytest.mark.parametrize("asked", ["NFC", "NFD"])
def test_a_category_is_the_same_however_unicode_composes_it(
    tmp_path: Path, form: str, written: Any, asked: Any
) -> None:
    folder = write_samples(tmp_path / "in", form, NAMES, category=unicodedata.normalize(written, "đèn ly ế "))
    _, splits = read(folder, form, category=[unicodedata.normalize(asked, "đèn ly ế")])
    assert {record.categories for record in splits["train"]} == {("đèn ly ế",)}
    assert splits["val"][0].asked == splits["val"][0].labels == (unicodedata.normalize("NFC", "đèn ly ế"),)


@pytest.mark.parametrize("form", FOLDERS)
@pytest.mark.parametrize(("on_disk", "named"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_a_file_is_the_same_however_unicode_composes_its_name(
    tmp_path: Path, form: str, on_disk: Any, named: Any
) -> None:
    names = {"train": [unicodedata.normalize(on_disk, "ảnh ế"), "b"], "val": ["c"]}
    folder = write_samples(tmp_path / "in", form, names, annotated=lambda name: unicodedata.normalize(named, name))
    _, splits = read(folder, form)
    assert names_of(splits) == {"train": sorted([unicodedata.normalize("NFC", "ảnh ế"), "b"]), "val": ["c"]}
    assert all(len(record.boxes) == 1 for records in splits.values() for record in records)
    write(folder / "train" / f"{unicodedata.normalize(named, 'ảnh ế')}.png", png())
    assert "differ only in how Unicode composes" in refusal(folder, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("train", "val"), [("train", "valid"), ("training", "validation"), ("Train", "eval")])
def test_splits_are_known_by_every_usual_word(tmp_path: Path, form: str, train: str, val: str) -> None:
    for index, word in enumerate((val, "dev", "test", "testing")):
        names = {train: ["a"], **{each: [each] for each in (val, "dev", "test")[index:]}, word: ["c"]}
        folder = write_samples(tmp_path / word, form, names)
        assert names_of(read(folder, form)[1]) == {"train": ["a"], "val": ["c"]}


@pytest.mark.parametrize("layout", ["images/{split}/{name}.png", "{split}/images/{name}.png", "{split}/{name}.png"])
def test_the_usual_layouts_of_yolo_are_read(tmp_path: Path, layout: str) -> None:
    for split, some in NAMES.items():
        for number, name in enumerate(some):
            image = tmp_path / "in" / layout.format(split=split, name=name)
            write(image, png((9, number, len(split))))
            labels = str(image.relative_to(tmp_path)).replace("images/", "labels/")
            write((tmp_path / labels).with_suffix(".txt"), "0 0.5 0.5 0.2 0.2\n")
    for file, content in {"obj.names": "cup\n", "data.yaml": "names: [cup]\npath: /elsewhere\n"}.items():
        write(tmp_path / "in" / file, content)
        _, splits = read(tmp_path / "in", "yolo", strict=True)
        assert names_of(splits) == NAMES
        assert all(len(record.boxes) == 1 for records in splits.values() for record in records)


@pytest.mark.parametrize("form", FOLDERS)
def test_a_word_in_an_images_name_is_no_split_where_folders_are(tmp_path: Path, form: str) -> None:
    names = {"train": ["bus_1", "train_3", "dev_board_1"], "val": ["bus_4", "train_5", "test"]}
    assert names_of(read(write_samples(tmp_path / "in", form, names), form)[1]) == {
        split: sorted(some) for split, some in names.items()
    }
    folder = write_samples(tmp_path / "2017", form, {"train2017": ["val_1"], "val2017": ["b"]})
    assert names_of(read(folder, form)[1]) == {"train": ["val_1"], "val": ["b"]}


@pytest.mark.parametrize("form", ["yolo", "voc"])
@pytest.mark.parametrize(
    ("paths", "val"),
    [
        (["all/bus_1", "all/train_3", "all/train_4", "all/dev_board_1", "all/tram_6"], None),
        (["all/train_1", "all/train_2", "all/val_1"], ["val_1"]),
        (["fruit_train/val_1", "fruit_train/b", "fruit_val/c"], ["c"]),
        (["train/test tubes/a", "train/lamps/b", "val/bullet train/c"], ["c"]),
    ],
)
def test_words_in_names_are_splits_only_if_all_names_have_one(
    tmp_path: Path, form: str, paths: list[str], val: list[str] | None
) -> None:
    names: dict[str, list[str]] = {}
    for path in paths:
        names.setdefault(path.rpartition("/")[0], []).append(path.rpartition("/")[2])
    stats, splits = read(write_samples(tmp_path / "in", form, names), form)
    if val is None:
        assert "20% of what the training files hold" in stats["validation"]
    else:
        assert names_of(splits)["val"] == val
    assert sum(map(len, splits.values())) == len(paths)


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        ({"test-tube_train": "ab", "test-tube_val": "c"}, {"train": ["a", "b"], "val": ["c"]}),
        ({"trainval": "ab", "test": "c"}, "test: annotations/test.json\n  no split: annotations/trainval.json"),
        ({"instances_train2017": "ab", "instances_val2017": "c"}, {"train": ["a", "b"], "val": ["c"]}),
        ({"coco_train_v2": "ab", "coco_test_v2": "c"}, {"train": ["a", "b"], "val": ["c"]}),
        ({"cupsTrain": "ab", "cups.test.final": "c", "evaluationSet": "d"}, {"train": ["a", "b"], "val": ["d"]}),
    ],
)
def test_the_name_of_an_annotation_file_says_its_split_or_the_file_is_named(
    tmp_path: Path, files: dict[str, str], splits: Any
) -> None:
    folder = tmp_path / "in"
    write_samples(folder, "coco", {f"images of {file}!": list(names) for file, names in files.items()})
    for path in folder.glob("*/*.json"):
        write(folder / f"annotations/{path.parent.name[10:-1]}.json", path.read_text())
        path.unlink()
    if isinstance(splits, str):
        assert splits in refusal(folder, "coco")
    else:
        assert names_of(read(folder, "coco")[1]) == splits


def test_imagesets_say_the_split_before_folders_and_names_may_have_spaces(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "in", "voc", {"train": ["my photo 1", "val_2"], "val": ["c"]})
    write(folder / "ImageSets/Main/train.txt", "c\nval_2  1\n")
    write(folder / "ImageSets/Main/val.txt", "my photo 1\n")
    assert names_of(read(folder, "voc")[1]) == {"train": ["c", "val_2"], "val": ["my photo 1"]}
    (folder / "ImageSets/Main/train.txt").rename(folder / "ImageSets/Main/trainval.txt")
    assert "no split: ImageSets/Main/trainval.txt" in refusal(folder, "voc")
    (folder / "ImageSets/Main/trainval.txt").rename(folder / "ImageSets/Main/cup_train.txt")
    (folder / "ImageSets/Main/val.txt").rename(folder / "ImageSets/Main/cup_val.txt")
    assert "lists in ImageSets/Main, but no train.txt: ImageSets/Main/cup_train.txt" in refusal(folder, "voc")


@pytest.mark.parametrize("root", ["..\\..\\label-studio\\media\\upload\\4\\", "/home/someone/export/images/", "./"])
def test_an_image_is_found_whatever_root_its_annotation_names(tmp_path: Path, root: str) -> None:
    names = {"train": ["a", "same"], "val": ["c", "same"]}
    folder = write_samples(tmp_path / "in", "coco", names, annotated=lambda name: root + name.rpartition("/")[2])
    assert names_of(read(folder, "coco")[1]) == names
    other = write_samples(tmp_path / "other", "coco", names, annotated=lambda name: f"{root}{name}")
    (other / "val/_annotations.coco.json").rename(other / "val.json")
    (other / "train/_annotations.coco.json").rename(other / "train.json")
    assert names_of(read(other, "coco")[1]) == names, "by the folder that they have in common"


@pytest.mark.parametrize("root", ["", "../", "/home/someone/", "C:\\data\\"])
def test_folders_of_yolos_settings_are_found_whatever_root_they_name(tmp_path: Path, root: str) -> None:
    folder = write_samples(tmp_path / "in", "yolo", {"first": ["a", "b"], "second": ["c"]})
    (folder / "classes.txt").unlink()
    write(folder / "data.yaml", f"names: [cup]\ntrain: {root}first\nval: {root}second\n")
    assert names_of(read(folder, "yolo")[1]) == {"train": ["a", "b"], "val": ["c"]}
    (folder / "first/a.png").rename(folder / "first/A.png")
    (folder / "first/b.txt").rename(folder / "labels.txt")
    (folder / "first").rename(folder / "images")
    write(folder / "labels/a.txt", (folder / "images/a.txt").read_text())
    write(folder / "data.yaml", f"names: [cup]\ntrain: {root}images\nval: {root}second\n")
    assert "labels/a.txt: there is no image with this name, only images/A.png" in refusal(folder, "yolo")


def test_an_image_of_two_names_in_other_folders_is_refused(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "in", "coco", {"train": ["a", "b"], "val": ["c"], "test": ["d"]})
    text = (folder / "val/_annotations.coco.json").read_text()
    for name in ("here/val/c.png", "c.png"):
        write(folder / "val/_annotations.coco.json", text.replace("val/c.png", name))
        assert names_of(read(folder, "coco")[1])["val"] == ["c"]
    write(folder / "val/_annotations.coco.json", text.replace("val/c.png", "other/a.png"))
    problem = "image 'train/a.png': there is only train/a.png, which was found for 'other/a.png'"
    assert problem in refusal(folder, "coco"), "what is validated on is read first"


def test_the_same_images_to_train_and_to_validate_on_are_refused(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "in", "yolo", {"images": ["a", "b"]})
    (folder / "classes.txt").unlink()
    write(folder / "data.yaml", "names: [cup]\ntrain: images\nval: images\n")
    assert "data.yaml: train has no image that val has not; name those of each, or remove val" in refusal(
        folder, "yolo"
    )
    write(folder / "data.yaml", "names: [cup]\ntrain: images\n")
    assert len(read(folder, "yolo")[1]["val"]) == 1


def test_label_studios_list_of_classes_is_no_coco_file(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "in", "yolo", NAMES)
    write(folder / "notes.json", json.dumps({"categories": [{"id": 0, "name": "cup"}], "info": {"year": 1}}, indent=2))
    assert len(read(folder, "yolo")[1]["train"]) == 2
    coco = write_samples(tmp_path / "coco", "coco", NAMES)
    document = json.loads((coco / "train/_annotations.coco.json").read_text())
    many = [{"id": number, "name": f"{number} of many"} for number in range(2, 3000)]
    document = {"categories": document["categories"] + many, **document} | {"categories": document["categories"] + many}
    write(coco / "train/_annotations.coco.json", json.dumps(document))
    assert names_of(read(coco, "coco")[1]) == NAMES, "categories may fill the beginning of a file"


@pytest.mark.parametrize("name", ["A%20b.png", "a b.PNG", "a b.jpg"])
@pytest.mark.parametrize("on_disk", ["a b.png", "a b.HEIC"])
def test_the_similar_name_of_a_missing_image_is_shown(tmp_path: Path, name: str, on_disk: str) -> None:
    folder = write_samples(tmp_path / "in", "coco", {"train": ["a b", "d"], "val": ["c"]})
    text = (folder / "train/_annotations.coco.json").read_text()
    write(folder / "train/_annotations.coco.json", text.replace("train/a b.png", f"train/{name}"))
    (folder / "train/a b.png").rename(folder / "train" / on_disk)
    assert f"image 'train/{name}': there is none, only train/{on_disk}" in refusal(folder, "coco")
    write(folder / "train/_annotations.coco.json", text.replace("a b.png", "a b.HEIC"))
    (folder / "train" / on_disk).rename(folder / "train/a b.HEIC")
    (folder / "train/a b.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    assert "none of JPEG, PNG, WEBP, the formats that are opened; convert it" in refusal(folder, "coco")


@pytest.mark.parametrize("form", FORMS)
def test_groups_are_held_out_together_and_are_refused_in_two_splits(tmp_path: Path, form: str) -> None:
    names = [f"p{number // 3}-{number}" for number in range(15)]
    patients = [f"patient {number // 3}" for number in range(15)]
    keys = [r"(p\d+)-"] if form in ("yolo", "voc") else [r"(p\d+)-", "patient"]
    folder = write_samples(tmp_path / "in", form, {"train": names}, entry=("patient", patients))
    split = write_samples(tmp_path / "split", form, {"train": names[:4], "val": names[4:]}, entry=("patient", patients))
    for key in keys:
        stats, found = read(folder, form, group=key)
        splits = names_of(found)
        assert ("unread_fields" in stats) == (key != "patient" and form in ("coco", "parquet"))
        assert len(splits["val"]) == 3
        assert len({name.partition("-")[0] for name in splits["val"]}) == 1
        assert f"image or {key} in another split" in refusal(split, form, group=key)
        assert "no group by reader.group, (x" in refusal(folder, form, group="(x+)")
    names_of(read(split, form)[1])
    if form in ("yolo", "voc"):
        assert "patient: the image has no value of it; a pattern" in refusal(folder, form, group="patient")
    else:
        nested = write_samples(tmp_path / "m", form, {"train": names}, entry=("of", [{"a": name} for name in patients]))
        assert names_of(read(nested, form, group="of.a")[1]) == names_of(read(folder, form, group="patient")[1])
    assert "it finds no name in" in refusal(folder, form, group="p(x)?")
    with pytest.raises(ValueError, match="no regular expression"):
        Reader(group="(a")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["photo-{}_jpg.rf.{}", "001111081533{}_{}", "001111081533{}_{}_jpg.rf.7"])
def test_photographs_of_a_product_or_versions_of_one_are_held_out_together(
    tmp_path: Path, form: str, name: str
) -> None:
    names = [name.format(number // 3, number) for number in range(15)]
    splits = names_of(read(write_samples(tmp_path / "in", form, {"train": names}), form)[1])
    assert [set(names[first : first + 3]) for first in range(0, 15, 3)].count(set(splits["val"])) == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_box_that_is_there_twice_is_counted_and_warned_of(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_samples(tmp_path / "in", form, NAMES, boxes=[[4, 3, 20, 15], [5, 3, 20, 15], [4, 3, 20, 15]])
    stats, splits = read(folder, form)
    assert stats["splits"]["train"]["repeated_boxes"] == 2
    assert len(splits["train"][0].boxes) == 3
    assert "train: 2 are the same box of a category as another of its image, in 2 images" in caplog.text


@pytest.mark.parametrize("form", ["coco", "voc", "parquet"])
def test_shares_in_place_of_pixels_are_refused_with_the_setting_that_reads_them(tmp_path: Path, form: str) -> None:
    folder = write_samples(tmp_path / "in", form, NAMES, boxes=[[0.25, 0.5, 0.75, 1.0]])
    message = refusal(folder, form)
    assert "3 invalid samples" in message
    assert "shares of the image: set reader: {unit: share}" in message
    assert read(folder, form, unit="share")[1]["train"][0].boxes == ((0.25, 0.5, 0.75, 1.0),)
    assert len(read(write_samples(tmp_path / "zero", form, NAMES, boxes=[[0, 0, 2, 1]]), form)[1]["train"]) == 2


def test_what_makes_a_coco_file_ambiguous_is_refused(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "in", "coco", NAMES)
    path = folder / "train/_annotations.coco.json"
    document = json.loads(path.read_text())
    two = [{"id": 1, "name": "cup"}, {"id": 2, "name": "x"}, {"id": 1, "name": "lid"}]
    path.write_text(json.dumps({**document, "categories": two}))
    problem = "train/_annotations.coco.json: the category id 1 has two names, at positions 0 and 2: 'cup' and 'lid'"
    assert problem in refusal(folder, "coco")
    path.write_text(json.dumps({**document, "categories": [two[0], two[0]]}))
    assert len(read(folder, "coco")[1]["train"]) == 2
    path.write_text(json.dumps(document).replace('"bbox": [4', '"bbox": [9, 9, 9, 9], "bbox": [4'))
    assert "the key 'bbox' is there twice" in refusal(folder, "coco")
    for key in coco_form.NO_BOX:
        path.write_text(json.dumps(document).replace('"bbox": [4, 3, 16, 12]', f'"{key}": "x"'))
        assert f"annotation 1: {key} without a bbox; export boxes" in refusal(folder, "coco")
        path.write_text(json.dumps(document).replace('"bbox": [4, 3, 16, 12]', f'"{key}": "x", "bbox": null'))
        assert f"annotation 1: {key} without a bbox; export boxes" in refusal(folder, "coco")
    for number in ('"0"', "0.0"):
        path.write_text(json.dumps(document).replace('"image_id": 0', f'"image_id": {number}'))
        message = refusal(folder, "coco")
        assert "train/_annotations.coco.json image 0: annotation 1: image_id" in message, "left out, it has no box"
    path.write_text(json.dumps(document).replace('"bbox"', '"bbox_mode": 0, "bbox"'))
    assert "annotation 1: bbox_mode: input should be 1, found 0" in refusal(folder, "coco")
    path.write_text(json.dumps(document))
    write(folder / "train/more.json", json.dumps(document))
    assert "more.json image 0: the image train/a.png is that of train/_annotations" in refusal(folder, "coco")
    (folder / "train/more.json").unlink()
    path.write_text("")
    assert "train/_annotations.coco.json: the file is empty" in refusal(folder, "coco")


def test_a_damaged_xml_file_is_named(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "in", "voc", NAMES)
    for content, problem in (("", "the file is empty"), ("<annot", "no XML")):
        write(folder / "train/a.xml", content)
        assert f"train/a.xml: {problem}" in refusal(folder, "voc")


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("label", ["cup {big}", "}{", 'a "quote" \\', "[]", "none", '{"bbox_2d": [1, 2, 3, 4]}'])
def test_a_label_comes_back_out_of_an_answer_in_every_form(tmp_path: Path, family: str, label: str) -> None:
    WRITERS["coco"](tmp_path / "in", {
        split: [Photo(name=f"{split}.png", encoded=png((9, number, 0)), boxes=[((0.1, 0.2, 0.5, 0.6), "cup")])]
        for number, split in enumerate(("train", "val"))
    })  # fmt: skip
    _, splits = read(tmp_path / "in", "coco", label={"cup": label})
    for_model = ForModel(family, lambda *size: size)
    answer = for_model.conversation(splits["train"][0], answered=True).messages[-1]["content"][0]["text"]
    assert json.dumps(label, ensure_ascii=False)[1:-1] in answer or label in answer


def test_boxes_that_do_not_come_back_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = read(write_samples(tmp_path / "in", "coco", NAMES), "coco")[1]["train"][0]
    monkeypatch.setattr("stages.tasks.detection.samples.encode_boxes", lambda *_, **__: "none")
    with pytest.raises(UserError, match="sample a: the boxes of cup do not come back out of 'none', as a qwen2_5_vl"):
        ForModel("qwen2_5_vl", lambda *size: size).conversation(record, answered=True)


def test_a_label_of_an_answer_is_the_same_however_unicode_composes_it() -> None:
    answer = encode_boxes([((0.1, 0.2, 0.5, 0.6), unicodedata.normalize("NFD", "đèn ế"))])
    assert decode_boxes(answer).labels == (unicodedata.normalize("NFC", "đèn ế"),)
