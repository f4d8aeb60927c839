"""YOLO's text files, one a picture (docs.ultralytics.com): a line a box, with the number of its class, centre, width
and height in 0..1 of the picture.

The text file of images/7.jpg is labels/7.txt, else 7.txt beside it. The names of classes are those of `names` in a
YAML file, or lines of classes.txt or obj.names. `train` and `val` of the YAML file say where pictures are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from stages.core.documents import Unreadable, problems, read_yaml, refusal
from stages.core.errors import UserError, counted
from stages.kit.data.sources import VALIDATION, Place
from stages.kit.data.texts import EmptyText, UnreadableText
from stages.tasks.detection.sources.folders.files import (
    PICTURES,
    Folder,
    RawSample,
    Splits,
    chosen_splits,
    grouped,
    objects,
)
from stages.tasks.detection.sources.rows import BoxForm

FORM = BoxForm(order="cxcywh", unit="share")
EXPECTED = (
    "YOLO: pictures in images/train and images/val, text files called alike in labels/train and labels/val, and the "
    "names of the classes in data.yaml"
)
NAMES = ("classes.txt", "obj.names")
_NUMBER = re.compile(r"-?[0-9]{0,9}\.?[0-9]{0,25}(e-?[0-9]{1,3})?")


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="ignore"))
class DataFile:
    """What is read of Ultralytics' YAML file. `path` is of another machine more often than not, and is not."""

    names: list[str] | dict[int, str]
    train: str | list[str] | None = None
    val: str | list[str] | None = None
    test: str | list[str] | None = None

    def class_names(self) -> dict[int, str]:
        return dict(enumerate(self.names)) if isinstance(self.names, list) else self.names

    def folders(self, split: str) -> list[str]:
        given = getattr(self, split)
        return [given] if isinstance(given, str) else given or []


def data_files(folder: Folder) -> list[str]:
    """The files that have the names of classes."""
    yaml = [path for path in folder.with_suffix(".yaml", ".yml") if re.search(rb"(?m)^names\s*:", folder.head(path))]
    return yaml or [path for path in folder.files if PurePosixPath(path).name in NAMES]


def read_yolo(folder: Folder) -> Splits:
    """Every picture of the folder, with the text file called as it is.

    Raises UserError where the names of the classes are missing, or in several files.
    """
    found = data_files(folder)
    if len(found) != 1:
        which = f"there are several: {', '.join(found)}; leave one" if found else "there is none"
        raise UserError(
            f"{folder.root}: the names of the classes are in data.yaml, classes.txt or obj.names, and {which}"
        )
    data = _data_file(folder, found[0])
    pictures = folder.with_suffix(*PICTURES)
    named = {split: data.folders(split) for split in ("train", *VALIDATION) if split != "dev"}
    if named["train"] and named["val"]:
        by_split: dict[str | None, list[str]] = {
            split: [path for entry in named[split] for path in _below(folder, entry, found[0], pictures)]
            for split in ("train", "val")
        }
    else:
        by_split = grouped(str(PurePosixPath(path).parent / "-") for path in pictures)
        folders = {split: {str(PurePosixPath(path).parent) for path in paths} for split, paths in by_split.items()}
        by_split = {
            split: [path for path in pictures if str(PurePosixPath(path).parent) in some]
            for split, some in folders.items()
        }
    names = data.class_names()
    return chosen_splits(by_split, "images", lambda paths: _samples(folder, paths, names))


def _data_file(folder: Folder, path: str) -> DataFile:
    try:
        text = folder.text(path)
        if PurePosixPath(path).name in NAMES:
            return DataFile(names=[line.strip() for line in text.splitlines() if line.strip()])
        return read_yaml(DataFile, folder.root / path)
    except (UnreadableText, Unreadable) as error:
        raise UserError(f"{folder.root / path} cannot be read: {error}") from None
    except ValidationError as error:
        raise refusal(folder.root / path, problems(error, DataFile)) from None


def _below(folder: Folder, entry: str, data_file: str, pictures: Sequence[str]) -> list[str]:
    """The pictures of an entry of `train` or `val`: of a folder, or of a text file that lists them. As Ultralytics does
    it, `../` at its beginning counts as nothing.

    Raises UserError where there are none in the folder.
    """
    where = re.sub(r"^(\.{0,2}/)+", "", entry.strip().replace("\\", "/")).rstrip("/")
    beside = str(PurePosixPath(data_file).parent / where)
    known = set(pictures)
    for place in dict.fromkeys((beside, where)):
        if place in folder.files and place.endswith(".txt"):
            try:
                lines = [line.strip().removeprefix("./") for line in folder.text(place).splitlines() if line.strip()]
            except UnreadableText as error:
                raise UserError(f"{folder.root / place} cannot be read: {error}") from None
            listed = [str(PurePosixPath(place).parent / line) for line in lines]
            if lost := [line for line, path in zip(lines, listed, strict=True) if path not in known]:
                missing = counted(len(lost), "picture")
                raise UserError(f"{folder.root / place} lists {missing} that the folder has not: {', '.join(lost[:3])}")
            return listed
        inside = [path for path in pictures if place == "." or PurePosixPath(place) in PurePosixPath(path).parents]
        if inside:
            return inside
    raise UserError(f"{folder.root / data_file} names {entry!r}, and there are no pictures of that in {folder.root}")


def _samples(folder: Folder, pictures: Sequence[str], names: dict[int, str]) -> Iterator[RawSample]:
    known, labels = set(folder.files), [label_path(path) for path in pictures]
    for picture, at in zip(pictures, labels, strict=True):
        place = next((path for path in at if path in known), at[0])
        if place not in known:
            yield Place(picture), folder.row(picture, objects=objects([], []), none_because=f"there is no {place}")
            continue
        try:
            lines = folder.text(place).splitlines()
        except EmptyText:
            lines = []
        except UnreadableText as error:
            yield Place(place), [str(error)]
            continue
        yield Place(place), folder.row(picture, **_boxes(lines, names))
    yield from _orphans(folder, pictures, {path for at in labels for path in at})


def _orphans(folder: Folder, pictures: Sequence[str], taken: set[str]) -> Iterator[RawSample]:
    """Text files in the folders of labels without a picture."""
    places = {PurePosixPath(path).parent for path in taken} - {PurePosixPath(path).parent for path in pictures}
    for path in folder.with_suffix(".txt"):
        if PurePosixPath(path).parent in places and path not in taken and PurePosixPath(path).name not in NAMES:
            yield Place(path), ["there is no picture called so"]


def label_path(picture: str) -> tuple[str, ...]:
    """Where the boxes of a picture may be: `labels` for the last `images` of its path, and beside it."""
    pure = PurePosixPath(picture).with_suffix(".txt")
    parts = list(pure.parts)
    if "images" not in parts[:-1]:
        return (str(pure),)
    last = len(parts) - 2 - parts[:-1][::-1].index("images")
    return str(PurePosixPath(*parts[:last], "labels", *parts[last + 1 :])), str(pure)


def _boxes(lines: Sequence[str], names: dict[int, str]) -> dict[str, Any]:
    bboxes, categories, named, faults = [], [], [], []
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 5 or not all(_is_number(each) for each in fields):
            outline = " of an outline; export boxes" if len(fields) > 6 and len(fields) % 2 else ""
            faults.append(
                f"line {number} is {line.strip()[:60]!r}, {counted(len(fields), 'field')}{outline}; expected five "
                "numbers: class x_center y_center width height"
            )
        elif not fields[0].isdecimal() or int(fields[0]) not in names:
            faults.append(f"line {number}: no class has the number {fields[0]}; there are {len(names)}")
        else:
            bboxes.append([float(each) for each in fields[1:]])
            categories.append(names[int(fields[0])])
            named.append(f"line {number}: box")
    return {"objects": objects(bboxes, categories), "named": named, "problems": faults}


def _is_number(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text.lower())) and any(char.isdigit() for char in text)
