"""COCO's JSON (cocodataset.org, Data format): images, annotations with bbox [x, y, width, height], categories.

pycocotools' own reader trusts a file, and ends in a KeyError if it is wrong; here each entry is checked alone, so that
every problem is named by the entry's id.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from stages.core.records import problems, shown
from stages.kit.data.sources import Place
from stages.kit.data.texts import UnreadableText
from stages.tasks.detection.sources.folder import Folder, RawSample, Splits, by_split, chosen_splits
from stages.tasks.detection.sources.rows import BoxForm

FORM = BoxForm(order="xywh", unit="pixels")
EXPECTED = (
    "COCO: JSON files with images, annotations and categories, called or in folders called train and val, and images"
)

Id = Annotated[int, Strict()] | Annotated[str, Strict()]
Number = Annotated[float, Strict()]
_lenient = ConfigDict(extra="ignore", allow_inf_nan=False)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, config=_lenient)
class Image:
    id: Id
    file_name: Annotated[str, Field(min_length=1, max_length=4096)]
    width: Annotated[Number, Field(gt=0)] | None = None
    height: Annotated[Number, Field(gt=0)] | None = None


@dataclass(frozen=True, kw_only=True, config=_lenient)
class Annotation:
    image_id: Id
    category_id: Id
    bbox: Annotated[list[Number], Field(min_length=4, max_length=4)]
    id: Id | None = None
    iscrowd: int = 0


@dataclass(frozen=True, kw_only=True, config=_lenient)
class Category:
    id: Id
    name: Annotated[str, Field(min_length=1)]


def annotation_files(folder: Folder) -> list[str]:
    return folder.with_content(".json", rb'"(images|annotations|categories)"')


def read(folder: Folder) -> Splits:
    return chosen_splits(by_split(annotation_files(folder)), "annotation files", lambda paths: _samples(folder, paths))


def _samples(folder: Folder, paths: Sequence[str]) -> Iterator[RawSample]:
    named_by: dict[str, Place] = {}
    for path in paths:
        try:
            document = _load(folder.text(path))
        except UnreadableText as error:
            yield Place(path), [str(error)]
            continue
        for place, row in _File(path, document).samples(folder):
            name = "" if isinstance(row, list) else row.pop("name")
            if name and (other := named_by.setdefault(name, place)) != place:
                yield place, [f"the image {name} is that of {other} too; leave one annotation file of it in the folder"]
            else:
                yield place, row


def _load(text: str) -> Mapping[str, Any]:
    """Raises UnreadableText unless it is a JSON object with lists of images, annotations and categories."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableText(f"no JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; lists without end
        raise UnreadableText(f"no JSON that can be read: {error}") from None
    if not isinstance(document, dict):
        raise UnreadableText(f"holds {shown(document)}, expected a JSON object")
    if lacking := [
        name for name in ("images", "annotations", "categories") if not isinstance(document.get(name), list)
    ]:
        raise UnreadableText(f"has no list of {' and '.join(lacking)}")
    return document


class _File:
    """The entries of one annotation file, and their problems, by image."""

    def __init__(self, path: str, document: Mapping[str, Any]) -> None:
        self.path, self.document = path, document
        self.stray: list[RawSample] = []
        """Problems that belong to no image."""
        self.found: dict[Id, list[tuple[str, Annotation]]] = defaultdict(list)
        self.faults: dict[Id, list[str]] = defaultdict(list)

    def samples(self, folder: Folder) -> Iterator[RawSample]:
        categories = {each.id: each.name for _, each in self._entries("categories", Category)}
        images = list(self._entries("images", Image))
        counts = Counter(image.id for _, image in images)
        for name, annotation in self._entries("annotations", Annotation):
            if annotation.image_id not in counts:
                problem = f"image_id {shown(annotation.image_id)} is not that of a valid image"
                self.stray.append((Place(self.path, name, "annotation"), [problem]))
            elif annotation.iscrowd:
                self.faults[annotation.image_id].append(
                    f"annotation {name} is a crowd (iscrowd): no box of one object; leave it out"
                )
            else:
                self.found[annotation.image_id].append((name, annotation))
        yield from self.stray
        for name, image in images:
            if counts[image.id] > 1:
                self.faults[image.id].append("its id is that of several images")
            yield Place(self.path, name, "image"), self._row(folder, image, categories)

    def _row(self, folder: Folder, image: Image, categories: Mapping[Id, str]) -> dict[str, Any] | list[str]:
        found = self.found[image.id]
        faults = self.faults.pop(image.id, []) + [
            f"annotation {name}: category_id {shown(each.category_id)} is not among the categories"
            for name, each in found
            if each.category_id not in categories
        ]
        try:
            path = folder.image(image.file_name, near=self.path)
        except UnreadableText as error:
            return [*faults, str(error)]
        names = [categories.get(each.category_id) or "?" for _, each in found]
        return folder.row(
            path,
            name=path,
            objects={"bbox": [each.bbox for _, each in found], "category_name": names},
            named=[f"annotation {name}" for name, _ in found],
            size=None if image.width is None or image.height is None else (image.width, image.height),
            problems=faults,
        )

    def _entries(self, kind: str, form: type[T]) -> Iterator[tuple[str, T]]:
        """The valid entries of a list, each with its id, or its position if it has none."""
        adapter, unit = TypeAdapter(form), {"categories": "category"}.get(kind, kind.removesuffix("s"))
        for index, entry in enumerate(self.document[kind]):
            own = entry.get("id") if isinstance(entry, dict) else None
            name = shown(own).strip("'") if isinstance(own, int | str) else f"at position {index}"
            try:
                yield name, adapter.validate_python(entry)
            except ValidationError as error:
                faults = [f"{where}: {problem}" for where, problem in problems(error, form).items()]
                image_id = entry.get("image_id") if isinstance(entry, dict) else None
                if kind == "annotations" and isinstance(image_id, int | str):
                    self.faults[image_id] += [f"annotation {name}: {fault}" for fault in faults]
                else:
                    self.stray.append((Place(self.path, name, unit), faults))
