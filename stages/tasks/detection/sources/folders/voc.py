"""Pascal VOC's XML files, one a picture, called as it is (host.robots.ox.ac.uk/pascal/VOC, the development kit).

Corners are taken as they are: xmin is where a box begins, counted from 0, as LabelImg, CVAT and Roboflow write it. In
the data of 2007 to 2012 itself a box begins up to one pixel earlier.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any
from xml.parsers import expat

from stages.core.documents import shown
from stages.kit.data.sources import Place
from stages.kit.data.texts import UnreadableText
from stages.tasks.detection.sources.folders.files import (
    Folder,
    RawSample,
    Splits,
    chosen_splits,
    grouped,
    objects,
    split_of,
)
from stages.tasks.detection.sources.rows import BoxForm

FORM = BoxForm(order="xyxy", unit="pixels")
EXPECTED = "Pascal VOC: an XML file a picture, called as it is; train and val by their folders, or by ImageSets/Main"

MAX_DEPTH = 50
"""Of elements within each other; VOC's own are four deep."""
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_NUMBER = re.compile(r"-?[0-9]{1,9}(\.[0-9]{0,20})?")


def is_voc(head: bytes) -> bool:
    return b"<annotation" in head


def read_voc(folder: Folder) -> Splits:
    """Every XML file of the folder that begins like VOC's."""
    files = [path for path in folder.with_suffix(".xml") if is_voc(folder.head(path))]
    lists = {
        split: path
        for path in folder.with_suffix(".txt")
        if (pure := PurePosixPath(path)).parts[-3:-1] == ("ImageSets", "Main")
        and (split := split_of(path)) == pure.stem
    }
    if not lists:
        return chosen_splits(grouped(files), "XML files", lambda paths: _samples(folder, paths))
    by_stem: dict[str, list[str]] = {}
    for path in files:
        by_stem.setdefault(PurePosixPath(path).stem, []).append(path)
    by_split: dict[str | None, list[str]] = {split: [path] for split, path in lists.items()}
    return chosen_splits(by_split, "lists in ImageSets/Main", lambda paths: _listed(folder, paths, by_stem))


def _listed(folder: Folder, paths: Sequence[str], by_stem: dict[str, list[str]]) -> Iterator[RawSample]:
    for path in paths:
        try:
            lines = folder.text(path).splitlines()
        except UnreadableText as error:
            yield Place(path), [str(error)]
            continue
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            name = line.split()[0]
            if len(found := by_stem.get(name, [])) == 1:
                yield from _samples(folder, found)
            else:
                several = f"{len(found)} XML files are called {name[:200]!r}: {', '.join(found[:3])}"
                none = f"there is no XML file called {name[:200]!r}"
                yield Place(path, number), [several if found else none]


def _samples(folder: Folder, paths: Sequence[str]) -> Iterator[RawSample]:
    for path in paths:
        try:
            annotations = parse_voc(folder.text(path))
            picture = folder.picture(PurePosixPath(path).stem, near=path)
        except UnreadableText as error:
            yield Place(path), [str(error)]
            continue
        yield Place(path), folder.row(picture, **annotations)


@dataclass
class _File:
    """What an XML file says, as far as it was read. Elements that nobody needs are not kept."""

    bboxes: list[list[float]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    size: list[float | None] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    """The names of the elements that are open."""
    texts: dict[str, str] = field(default_factory=dict)
    """Of the elements that are kept within the object or the size that is open."""
    opened: int = 0
    """The line of that."""

    def row(self) -> dict[str, Any]:
        return {
            "objects": objects(self.bboxes, self.names),
            "named": [f"line {line}: box" for line in self.lines],
            "problems": self.problems,
            "size": self.size if all(self.size) and len(self.size) == 2 else None,  # 0 is some tools' word for unknown
        }

    def start(self, name: str, line: int) -> None:
        self.path.append(name)
        if self.path[0] != "annotation":
            raise UnreadableText(f"line {line}: <{name[:80]}>, expected <annotation>")
        if len(self.path) > MAX_DEPTH:
            raise UnreadableText(f"line {line}: elements are nested more than {MAX_DEPTH} deep")
        if self.path[1:] in (["object"], ["size"]):
            self.opened = line
            self.texts.clear()

    def characters(self, text: str) -> None:
        match self.path[1:]:
            case ["object", "name" as key] | ["object", "bndbox", key] | ["size", ("width" | "height") as key]:
                self.texts[key] = self.texts.get(key, "") + text

    def end(self) -> None:
        if self.path[1:] == ["object"]:
            self._add_object()
        elif self.path[1:] == ["size"]:
            self.size = [self._number(f"size.{key}", self.texts.get(key)) for key in ("width", "height")]
        self.path.pop()

    def _number(self, name: str, text: str | None) -> float | None:
        if text is not None and _NUMBER.fullmatch(text.strip()):
            return float(text)
        found = "is missing" if text is None else f"is {shown(text.strip())}, expected a number"
        self.problems.append(f"line {self.opened}: {name} {found}")
        return None

    def _add_object(self) -> None:
        corners = [self._number(name, self.texts.get(name)) for name in _CORNERS]
        if not (name := self.texts.get("name", "").strip()):
            self.problems.append(f"line {self.opened}: name is missing")
        elif None not in corners:
            self.bboxes.append([corner for corner in corners if corner is not None])
            self.names.append(name)
            self.lines.append(self.opened)


def parse_voc(text: str) -> dict[str, Any]:
    """The entries of a raw row.

    Raises UnreadableText for what is no XML, and for XML with a document type, which is where entities are declared.
    """
    found, parser = _File(), expat.ParserCreate("utf-8")
    parser.buffer_text = True

    def refuse(*_: Any) -> None:
        raise UnreadableText(f"line {parser.CurrentLineNumber}: a document type (<!DOCTYPE) is never read; remove it")

    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    parser.StartElementHandler = lambda name, _: found.start(name, parser.CurrentLineNumber)
    parser.EndElementHandler = lambda _: found.end()
    parser.CharacterDataHandler = found.characters
    try:
        parser.Parse(text.encode("utf-8"), True)
    except expat.ExpatError as error:
        what = expat.ErrorString(error.code)
        raise UnreadableText(f"no XML: line {error.lineno}, column {error.offset}: {what}") from None
    return found.row()
