"""Pascal VOC's XML files, one an image, with the image's name (host.robots.ox.ac.uk/pascal/VOC, the development kit).

Corners are taken as they are: xmin is where a box begins, counted from 0, as LabelImg, CVAT and Roboflow write it. In
the data of 2007 to 2012 itself a box begins up to one pixel earlier. A `difficult` object is one like any other.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath
from xml.etree import ElementTree as ET

from stages.core.errors import UserError, join_truncated
from stages.core.records import shown
from stages.data.folder import Folder
from stages.data.sources import READ_ON, SPLIT_WORDS, Place
from stages.data.texts import UnreadableText, composed
from stages.tasks.detection.sources.rows import BoxForm, NamedBox, has_value, no_plain_box
from stages.tasks.detection.sources.splits import RawSample, Splits, folder_splits, row_of, samples

FORM = BoxForm(order="xyxy", unit="pixels")
EXPECTED = "Pascal VOC: an XML file with the name of each image; train and val by their folders, or by ImageSets/Main"

READ = ("name", "bndbox", "filename", "size", "object")
DESCRIBING = ("folder", "path", "source", "owner", "segmented", "pose", "truncated", "occluded")
"""Elements that are read, and those of the form's own that change nothing here."""
CORNERS = tuple(f"bndbox/{corner}" for corner in ("xmin", "ymin", "xmax", "ymax"))
_NUMBER = re.compile(r"-?[0-9]{1,9}(\.[0-9]{0,20})?")


def annotation_files(folder: Folder) -> list[str]:
    return folder.with_content(".xml", rb"<annotation")


def read(folder: Folder) -> Splits:
    annotated = set(annotation_files(folder))
    stems = {PurePosixPath(path).stem for path in folder.images}
    # One with an image's name is damaged if it is none.
    files = [path for path in folder.with_suffix(".xml") if path in annotated or PurePosixPath(path).stem in stems]
    read_file = partial(_sample, folder)
    if not (lists := _lists(folder)):
        return folder_splits(folder, folder.by_split(files, of_samples=True), "XML files", read_file)
    by_stem: dict[str, list[str]] = defaultdict(list)
    for path in files:
        by_stem[PurePosixPath(path).stem].append(path)

    def read_list(path: str) -> Iterator[RawSample]:
        for number, line in enumerate(folder.text(path).splitlines(), start=1):
            name = composed(line.strip())
            if name not in by_stem:
                name = re.sub(r"\s+-?[01]$", "", name)  # of a category's list, whether the image has it
            found = by_stem.get(name, [])
            if len(found) == 1:
                yield from samples(found, read_file)
            elif name:
                which = f": {', '.join(found[:3])}" if found else ""
                wrong = f"{len(found)} XML files have the name {name[:200]!r}{which}; expected one, without its suffix"
                yield Place(path, number), [wrong]

    return folder_splits(folder, lists, "lists in ImageSets/Main", read_list)


def _lists(folder: Folder) -> dict[str | None, list[str]]:
    """The lists in ImageSets/Main by split. Raises UserError if there are only those of categories, and none named."""
    lists: dict[str | None, list[str]] = defaultdict(list)
    there = [path for path in folder.with_suffix(".txt") if PurePosixPath(path).parts[-3:-1] == ("ImageSets", "Main")]
    for path in there:
        split = folder.split_named.get(path) or {**SPLIT_WORDS, "trainval": None}.get(PurePosixPath(path).stem, "")
        if split != "":
            lists["unused" if split in folder.named_splits and path not in folder.split_named else split].append(path)
    of_categories = [path for path in there if PurePosixPath(path).stem.rpartition("_")[2] in SPLIT_WORDS]
    if of_categories and not lists:
        raise UserError(
            f"{folder.root} has lists in ImageSets/Main, but no train.txt: {join_truncated(of_categories, 3)}. Name "
            f"those of each split: `splits` of the dataset in params.yaml, as {{train: ImageSets/Main/NAME.txt}}; "
            f"{READ_ON}"
        )
    return lists


class _TreeBuilder(ET.TreeBuilder):
    def doctype(self, *_: object) -> None:
        """Called before entities are declared, which a document type can nest into gigabytes."""
        raise UnreadableText("a document type (<!DOCTYPE) is never read; remove it")


def _content(element: ET.Element, unread: Counter[str]) -> dict[str, str]:
    """The elements within, and CVAT's attributes, which are pairs of name and value; with their texts.

    unread: counts those that are not read.
    """
    content = {each.tag: (each.text or "").strip() or "there" * bool(len(each)) for each in element}
    pairs = element.findall("attributes/attribute")
    content |= {each.findtext("name") or "": (each.findtext("value") or "").strip() for each in pairs}
    there = (tag for tag, value in content.items() if has_value(value))
    unread.update(f"{element.tag}.{tag}" for tag in there if tag not in (*READ, *DESCRIBING))
    return content


def _text_of(element: ET.Element, name: str, path: str, problems: list[str]) -> str:
    """The text of the only element at a path. Appends to `problems` if there are several, or it is empty. name: of
    `element`."""
    text = (element.findtext(path) or "").strip()
    if len(element.findall(path)) > 1:
        problems.append(f"{name}: {path} is there twice")
    if not text:
        problems.append(f"{name}: {path} is missing")
    return text


def _numbers(element: ET.Element, name: str, paths: Sequence[str], problems: list[str]) -> tuple[float, ...] | None:
    """The numbers at these paths; None if one is missing or wrong."""
    numbers = []
    for path in paths:
        text = _text_of(element, name, path, problems)
        if _NUMBER.fullmatch(text):
            numbers.append(float(text))
        elif text:
            problems.append(f"{name}: {path} is {shown(text)}, expected a number")
    return tuple(numbers) if len(numbers) == len(paths) else None


def _sample(folder: Folder, path: str) -> Iterator[RawSample]:
    """The image of a file. Raises UnreadableText unless it is XML of an annotation without a document type."""
    parser = ET.XMLParser(target=_TreeBuilder(), encoding="utf-8")
    try:
        parser.feed(folder.text(path).encode("utf-8"))
        root = parser.close()
    except ET.ParseError as error:
        raise UnreadableText(f"no XML: {error}") from None
    if root.tag != "annotation":
        raise UnreadableText(f"<{root.tag[:80]}>, expected <annotation>")
    boxes, problems = list[NamedBox](), list[str]()
    _content(root, folder.unread)
    objects = root.findall("object")
    within = {each for element in objects for each in element.iter()}
    if any(each.tag.lower() == "bndbox" and each not in within for each in root.iter()):
        problems.append("a bndbox is not within an <object> of <annotation>")
    for position, element in enumerate(objects, start=1):
        name, content = f"object {position}", _content(element, folder.unread)
        if fault := no_plain_box(content):
            problems.append(f"{name} {fault}")
            continue
        corners = _numbers(element, name, CORNERS, problems)
        category = _text_of(element, name, "name", problems)
        if category and corners:
            boxes.append((f"{name}: box", corners, category))
    size = None if (sides := root.find("size")) is None else _numbers(sides, "size", ("width", "height"), problems)
    yield Place(path), row_of(folder, PurePosixPath(path).stem, path, boxes, problems, size=size)
