"""YOLO's text files, one an image (docs.ultralytics.com): a line a box, with the number of its class, centre, width and
height in 0..1 of the image.

The text file of images/7.jpg is labels/7.txt, else 7.txt beside it. The names of classes are those of `names` in a
YAML file, or lines of classes.txt or obj.names. `train` and `val` of the YAML file say where images are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import PurePosixPath
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from stages.core.errors import UserError, pluralize
from stages.core.records import read_settings
from stages.data.folder import Folder
from stages.data.sources import READ_ON, SPLIT_WORDS, VALIDATION, Place
from stages.data.texts import EmptyText, composed
from stages.tasks.detection.sources.rows import BoxForm, NamedBox
from stages.tasks.detection.sources.splits import RawSample, Splits, folder_splits, row_of

FORM = BoxForm(order="cxcywh", unit="share")
EXPECTED = (
    "YOLO: images in images/train and images/val, text files with the same names in labels/train and labels/val, and "
    "the names of the classes in data.yaml"
)
NAMES = ("classes.txt", "obj.names")
_NUMBER = re.compile(r"-?(?=\.?[0-9])[0-9]{0,9}\.?[0-9]{0,25}(e[+-]?[0-9]{1,3})?")


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="ignore"))
class DataFile:
    """Settings of Ultralytics' YAML file. `path` is of another machine more often than not, and is not read; other
    keys are counted."""

    names: list[str] | dict[int, str]
    nc: int | None = None
    """Number of classes."""
    train: str | list[str] | None = None
    val: str | list[str] | None = None
    test: Any = None
    path: Any = None
    download: Any = None


def annotation_files(folder: Folder) -> list[str]:
    """The files that have the names of classes."""
    names = rb"(?m)^(\xef\xbb\xbf)?names\s*:"
    yaml = [path for suffix in (".yaml", ".yml") for path in folder.with_content(suffix, names)]
    return yaml or [path for path in folder.files if PurePosixPath(path).name in NAMES]


def read(folder: Folder) -> Splits:
    """Every image of the folder, with its text file.

    Raises UserError if the names of the classes are missing, or in several files that differ.
    """
    found = annotation_files(folder)
    settings = [_data_file(folder, path) for path in found]
    if not settings or any(each != settings[0] for each in settings):
        which = f"there are several: {', '.join(found)}; leave one" if found else "there is none"
        raise UserError(
            f"{folder.root}: the names of the classes are in data.yaml, classes.txt or obj.names, and {which}"
        )
    data = settings[0]
    splits: dict[str | None, list[str]] = {}
    own = {path for image in folder.images for path in label_paths(image)}.union(found)
    texts = {PurePosixPath(path).stem: path for path in folder.with_suffix(".txt") if path not in own}
    if data.train and data.val and not folder.named_splits:
        for split, entries in (("train", data.train), ("val", data.val)):
            entries = [entries] if isinstance(entries, str) else entries
            splits[split] = [path for entry in entries for path in _below(folder, entry, found[0])]
        if set(splits["train"]) <= set(splits["val"]):
            same = "train has no image that val has not; name those of each, or remove val, and a share is held out"
            raise UserError(f"{folder.root / found[0]}: {same}")
    else:
        splits = folder.by_split(folder.images, of_samples=True)
        trained = {PurePosixPath(path).name for path in splits.get(None, [])}
        said = ((path, SPLIT_WORDS.get(stem)) for stem, path in texts.items())
        lists = [path for path, split in said if split and (split != "train" or _listed(folder, path) != trained)]
        if lists and splits.get(None) and not any(splits.get(split) for split in VALIDATION):
            raise UserError(
                f"{folder.root}: {', '.join(lists)} may list the images of a split, which is not read; name them in "
                f"`splits` of the dataset in params.yaml, as {{train: PATTERN, val: PATTERN}}; {READ_ON}"
            )
    names = dict(enumerate(data.names)) if isinstance(data.names, list) else data.names

    def read_file(path: str) -> Iterator[RawSample]:
        """path: of an image, or of a text file without one."""
        if PurePosixPath(path).suffix.lower() == ".txt":
            similar = folder.similar(path)
            yield Place(path), [f"there is no image with this name{similar}"]
            return
        places = label_paths(path)
        place = next((each for each in places if each in folder.on_disk), None)
        boxes, faults = _boxes(folder, place, names) if place else ([], [])
        if not place and (other := texts.get(PurePosixPath(path).stem)):
            faults = [f"there is no {places[0]}, only {other}"]
        why = "" if place else f"there is no {places[0]}"
        yield Place(place or path), row_of(folder, path, path, boxes, faults, none_because=why)

    splits = {split: [*some, *_stray(folder, some)] for split, some in splits.items()}
    return folder_splits(folder, splits, "images", read_file)


def _listed(folder: Folder, path: str) -> set[str]:
    """The names in a list of paths."""
    lines = composed(folder.path(path).read_bytes().decode(errors="replace")).split("\n")
    return {PurePosixPath(line.strip().replace("\\", "/")).name for line in lines} - {""}


def _stray(folder: Folder, images: Sequence[str]) -> list[str]:
    """The text files in the folders of boxes of these images that have no image."""
    taken = {path for image in images for path in label_paths(image)}
    label_folders = {PurePosixPath(path).parent for path in taken} - {PurePosixPath(path).parent for path in images}
    texts = ((path, PurePosixPath(path)) for path in folder.with_suffix(".txt") if path not in taken)
    return [path for path, pure in texts if pure.parent in label_folders and pure.name not in NAMES]


def _data_file(folder: Folder, path: str) -> DataFile:
    """The settings. Raises UserError if they are no such settings."""
    file = folder.path(path)
    if PurePosixPath(path).name in NAMES:
        try:
            lines = enumerate(folder.text(path).splitlines())
        except UserError as error:
            raise UserError(f"{file} cannot be read: {error}") from None
        return DataFile(names={number: line.strip() for number, line in lines if line.strip()})
    data, keys = read_settings(DataFile, file), re.findall(r"(?m)^(\w+)[ \t]*:", folder.text(path))
    if data.nc is not None and data.nc != len(data.names):
        raise UserError(f"{file}: nc is {data.nc}, but names has {len(data.names)}")
    folder.unread.update(f"{path} {key}" for key in set(keys) - {each.name for each in fields(DataFile)})
    return data


def _below(folder: Folder, entry: str, data_file: str) -> list[str]:
    """The images of a folder that is an entry of `train` or `val`, whatever its root: as in Ultralytics, `../` at
    its beginning counts as nothing. Raises UserError if there are none.
    """
    parts = PurePosixPath(re.sub(r"^(\.{0,2}/)+", "", composed(entry).strip().replace("\\", "/"))).parts
    tails = [PurePosixPath(*parts[start:]) for start in range(max(1, len(parts)))]
    for place in (root / tail for tail in tails for root in (PurePosixPath(data_file).parent, PurePosixPath())):
        if inside := [path for path in folder.images if place in PurePosixPath(path).parents]:
            return inside
    raise UserError(
        f"{folder.root / data_file} names {entry!r}, and {folder.root} has no folder of images there; a text file that "
        f"lists images is not read: name those of each split, `splits` of the dataset in params.yaml; {READ_ON}"
    )


def label_paths(image: str) -> tuple[str, str]:
    """The places of an image's boxes: with `labels` for the last `images` of its path, and beside it."""
    beside = str(PurePosixPath(image).with_suffix(".txt"))
    return re.sub("^(.*/)?images/", r"\1labels/", beside), beside


def _boxes(folder: Folder, path: str, names: dict[int, str]) -> tuple[list[NamedBox], list[str]]:
    """The boxes of a text file, and its problems."""
    boxes: list[NamedBox] = []
    faults = []
    try:
        lines = folder.text(path).splitlines()
    except EmptyText:
        lines = []
    except UserError as error:
        return [], [error.message]
    for number, line in enumerate(lines, start=1):
        numbers = line.split()
        if not numbers:
            continue
        if len(numbers) != 5 or not all(_NUMBER.fullmatch(each.lower()) for each in numbers):
            outline = " of an outline or a rotated box; export boxes" if len(numbers) > 6 and len(numbers) % 2 else ""
            faults.append(
                f"line {number} is {line.strip()[:60]!r}, {pluralize(len(numbers), 'field')}{outline}; expected five "
                "numbers: class x_center y_center width height"
            )
        elif (kind := float(numbers[0])) not in names:  # 3.0 and 3 are equal, also as keys
            faults.append(f"line {number}: no class has the number {kind:g}; there are {len(names)}")
        else:
            boxes.append((f"line {number}: box", [float(each) for each in numbers[1:]], names[int(kind)]))
    return boxes, faults
