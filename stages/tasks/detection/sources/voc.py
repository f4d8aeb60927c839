"""Pascal VOC's XML files, one an image, with the image's name (host.robots.ox.ac.uk/pascal/VOC, the development kit).

Corners are taken as they are: xmin is where a box begins, counted from 0, as LabelImg, CVAT and Roboflow write it. In
the data of 2007 to 2012 itself a box begins up to one pixel earlier.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any
from xml.etree import ElementTree as ET

from stages.core.records import shown
from stages.data.sources import Place
from stages.data.texts import UnreadableText
from stages.tasks.detection.sources.folder import Folder, RawSample, Splits
from stages.tasks.detection.sources.rows import BoxForm

FORM = BoxForm(order="xyxy", unit="pixels")
EXPECTED = "Pascal VOC: an XML file with the name of each image; train and val by their folders, or by ImageSets/Main"

_NUMBER = re.compile(r"-?[0-9]{1,9}(\.[0-9]{0,20})?")


def annotation_files(folder: Folder) -> list[str]:
    return folder.with_content(".xml", rb"<annotation")


def read(folder: Folder) -> Splits:
    files = annotation_files(folder)
    lists = folder.by_split(path for path in folder.with_suffix(".txt") if _is_list(folder, path))
    if not lists:
        return folder.splits(folder.by_split(files), "XML files", lambda paths: _samples(folder, paths))
    by_stem: dict[str, list[str]] = defaultdict(list)
    for path in files:
        by_stem[PurePosixPath(path).stem].append(path)
    return folder.splits(lists, "lists in ImageSets/Main", lambda paths: _listed(folder, paths, by_stem))


def _is_list(folder: Folder, path: str) -> bool:
    """Whether a file is train.txt or the like in ImageSets/Main, or one there that `splits` names."""
    pure, split = PurePosixPath(path), folder.split_of(path)
    return pure.parts[-3:-1] == ("ImageSets", "Main") and (split == pure.stem or split in folder.named)


def _listed(folder: Folder, paths: Sequence[str], by_stem: dict[str, list[str]]) -> Iterator[RawSample]:
    for path in paths:
        try:
            lines = folder.text(path).splitlines()
        except UnreadableText as error:
            yield Place(path), [str(error)]
            continue
        for number, line in enumerate(lines, start=1):
            name = (line.split() or [""])[0]
            found = by_stem.get(name, [])
            if len(found) == 1:
                yield from _samples(folder, found)
            elif name:
                which = f": {', '.join(found[:3])}" if found else ""
                yield Place(path, number), [f"{len(found)} XML files have the name {name[:200]!r}{which}; expected one"]


def _samples(folder: Folder, paths: Sequence[str]) -> Iterator[RawSample]:
    for path in paths:
        try:
            annotations = parse(folder.text(path))
            image = folder.image(PurePosixPath(path).stem, near=path)
        except UnreadableText as error:
            yield Place(path), [str(error)]
            continue
        yield Place(path), folder.row(image, *annotations)


class _TreeBuilder(ET.TreeBuilder):
    def doctype(self, *_: object) -> None:
        """Called before entities are declared, which a document type can nest into gigabytes."""
        raise UnreadableText("a document type (<!DOCTYPE) is never read; remove it")


def parse(text: str) -> tuple[list[tuple[str, Any, Any]], list[str], tuple[float, ...] | None]:
    """The fields `boxes`, `problems` and `size` of a row.

    Raises UnreadableText unless it is XML of an annotation without a document type.
    """
    parser = ET.XMLParser(target=_TreeBuilder(), encoding="utf-8")
    try:
        parser.feed(text.encode("utf-8"))
        root = parser.close()
    except ET.ParseError as error:
        raise UnreadableText(f"no XML: {error}") from None
    if root.tag != "annotation":
        raise UnreadableText(f"<{root.tag[:80]}>, expected <annotation>")
    problems: list[str] = []

    def numbers(element: ET.Element, name: str, *paths: str) -> tuple[float, ...] | None:
        texts = [(element.findtext(path) or "").strip() for path in paths]
        wrong = [each for each in zip(paths, texts, strict=True) if not _NUMBER.fullmatch(each[1])]
        for path, found in wrong:
            problems.append(f"{name}: {path} {f'is {shown(found)}, expected a number' if found else 'is missing'}")
        return None if wrong else tuple(map(float, texts))

    boxes: list[tuple[str, Any, Any]] = []
    for position, element in enumerate(root.findall("object"), start=1):
        name, category = f"object {position}", (element.findtext("name") or "").strip()
        corners = numbers(element, name, *(f"bndbox/{corner}" for corner in ("xmin", "ymin", "xmax", "ymax")))
        if not category:
            problems.append(f"{name}: name is missing")
        elif corners:
            boxes.append((f"{name}: box", corners, category))
    size = None if (sides := root.find("size")) is None else numbers(sides, "size", "width", "height")
    return boxes, problems, size if size and all(size) else None  # 0 is some tools' word for unknown
