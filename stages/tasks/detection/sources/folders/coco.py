"""COCO's JSON (cocodataset.org, Data format): images, annotations with bbox [x, y, width, height], categories.

pycocotools' own reader takes a file at its word, and ends in a KeyError where one is wrong; here each entry is checked
alone, so that all that is wrong is named by its id.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from stages.core.documents import problems, shown
from stages.kit.data.sources import Place
from stages.kit.data.texts import UnreadableText
from stages.tasks.detection.sources.folders.files import Folder, RawSample, Splits, chosen_splits, grouped, objects
from stages.tasks.detection.sources.rows import BoxForm

FORM = BoxForm(order="xywh", unit="pixels")
EXPECTED = (
    "COCO: JSON files with images, annotations and categories, called or in folders called train and val, and pictures"
)

Id = Annotated[int, Strict()] | Annotated[str, Strict()]
Number = Annotated[float, Strict()]
_lenient = ConfigDict(extra="ignore", allow_inf_nan=False)

T = TypeVar("T")


@checked_dataclass(frozen=True, kw_only=True, config=_lenient)
class Image:
    id: Id
    file_name: Annotated[str, Field(min_length=1, max_length=4096)]
    width: Annotated[Number, Field(gt=0)] | None = None
    height: Annotated[Number, Field(gt=0)] | None = None


@checked_dataclass(frozen=True, kw_only=True, config=_lenient)
class Annotation:
    image_id: Id
    category_id: Id
    bbox: Annotated[list[Number], Field(min_length=4, max_length=4)]
    id: Id | None = None
    iscrowd: int = 0


@checked_dataclass(frozen=True, kw_only=True, config=_lenient)
class Category:
    id: Id
    name: Annotated[str, Field(min_length=1)]


def is_coco(head: bytes) -> bool:
    return any(key in head for key in (b'"images"', b'"annotations"', b'"categories"'))


def read_coco(folder: Folder) -> Splits:
    """Every JSON file of the folder that begins like COCO's."""
    files = [path for path in folder.with_suffix(".json") if is_coco(folder.head(path))]
    return chosen_splits(grouped(files), "annotation files", lambda paths: _samples(folder, paths))


def _samples(folder: Folder, paths: Sequence[str]) -> Iterator[RawSample]:
    named_by: dict[str, str] = {}
    for path in paths:
        try:
            document = _loaded(folder.text(path))
        except UnreadableText as error:
            yield Place(path), [str(error)]
            continue
        for place, row in _File(path, document).samples(folder):
            name = "" if isinstance(row, list) else row.pop("picture")
            if name and (other := named_by.setdefault(name, str(place))) != str(place):
                yield (
                    place,
                    [f"the picture {name} is that of {other} too; leave one annotation file of it in the folder"],
                )
            else:
                yield place, row


def _loaded(text: str) -> Mapping[str, Any]:
    """Raises UnreadableText for what is no JSON object with lists of images, annotations and categories."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableText(f"no JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; lists without end
        raise UnreadableText(f"no JSON that can be read: {error}") from None
    if not isinstance(document, dict):
        raise UnreadableText(f"holds {shown(document)}, expected a JSON object")
    lacking = [name for name in ("images", "annotations", "categories") if not isinstance(document.get(name), list)]
    if lacking:
        raise UnreadableText(f"has no list of {' and '.join(lacking)}")
    return document


@dataclass
class _File:
    """One annotation file, sorted by picture."""

    path: str
    document: Mapping[str, Any]
    stray: list[RawSample] = field(default_factory=list)
    """Problems that belong to no picture."""
    found: dict[Id, list[tuple[str, Annotation]]] = field(default_factory=lambda: defaultdict(list))
    faults: dict[Id, list[str]] = field(default_factory=lambda: defaultdict(list))

    def samples(self, folder: Folder) -> Iterator[RawSample]:
        categories = {each.id: each.name for _, each in self._entries("categories", Category)}
        images = list(self._entries("images", Image))
        known = {image.id for _, image in images}
        for name, annotation in self._entries("annotations", Annotation):
            if annotation.image_id not in known:
                problem = f"image_id {shown(annotation.image_id)} is not that of a valid image"
                self.stray.append((Place(self.path, name, "annotation"), [problem]))
            elif annotation.iscrowd:
                self.faults[annotation.image_id].append(
                    f"annotation {name} is a crowd (iscrowd): no box of one object; leave it out"
                )
            else:
                self.found[annotation.image_id].append((name, annotation))
        yield from self.stray
        doubled = {each for each, count in Counter(image.id for _, image in images).items() if count > 1}
        for name, image in images:
            faults = [*self.faults[image.id], *(["its id is that of several images"] if image.id in doubled else [])]
            yield Place(self.path, name, "image"), self._row(folder, image, categories, faults)

    def _row(
        self, folder: Folder, image: Image, categories: Mapping[Id, str], faults: list[str]
    ) -> dict[str, Any] | list[str]:
        found = self.found[image.id]
        faults += [
            f"annotation {name}: category_id {shown(each.category_id)} is not among the categories"
            for name, each in found
            if each.category_id not in categories
        ]
        try:
            picture = folder.picture(image.file_name, near=self.path)
        except UnreadableText as error:
            return [*faults, str(error)]
        return folder.row(
            picture,
            picture=picture,
            objects=objects(
                [each.bbox for _, each in found], [categories.get(each.category_id) or "?" for _, each in found]
            ),
            named=[f"annotation {name}" for name, _ in found],
            size=None if image.width is None or image.height is None else (image.width, image.height),
            problems=faults,
        )

    def _entries(self, kind: str, form: type[T]) -> Iterator[tuple[str, T]]:
        """The entries of a list that are valid, each with its id, or its position where it has none."""
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
