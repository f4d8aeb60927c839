"""COCO's JSON (cocodataset.org, Data format): images, annotations with bbox [x, y, width, height], categories.

pycocotools' own reader trusts a file, and ends in a KeyError if it is wrong; here each entry is checked alone, so that
every problem is named by the entry's id.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from stages.core.records import distinct, problems, shown
from stages.data.names import composed
from stages.data.sources import Place
from stages.data.texts import UnreadableText
from stages.tasks.detection.sources.folder import Folder, RawSample, Splits
from stages.tasks.detection.sources.rows import BoxForm, has_value, no_plain_box

FORM = BoxForm(order="xywh", unit="pixels")
EXPECTED = (
    "COCO: JSON files with images, annotations and categories, called or in folders called train and val, and images"
)

DESCRIBING = {
    "images": ("license", "coco_url", "flickr_url", "date_captured"),
    "annotations": ("area", "iscrowd"),
    "categories": ("supercategory",),
}
"""Keys of COCO's own that change nothing here."""

Id = Annotated[int, Strict()] | Annotated[str, Strict()]
Number = Annotated[float, Strict()]
_lenient = ConfigDict(extra="ignore", allow_inf_nan=False)


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


@dataclass(frozen=True, kw_only=True, config=_lenient)
class Category:
    id: Id
    name: Annotated[str, Field(min_length=1)]


FORMS = {"categories": Category, "images": Image, "annotations": Annotation}
NO_BOX = ("segmentation", "keypoints", "caption", "segments_info")
"""Keys of annotations that are of something else than a box."""
Entry = Mapping[str, Any]
"""All keys of an image or annotation."""


def annotation_files(folder: Folder) -> list[str]:
    return folder.with_content(".json", rb'"(images|annotations|categories)"')


def read(folder: Folder) -> Splits:
    files = folder.by_split(folder.with_content(".json", rb'^\s*$|"(images|annotations|categories)"'))
    return folder.splits(files, "annotation files", lambda paths: _samples(folder, paths))


def _samples(folder: Folder, paths: Sequence[str]) -> Iterator[RawSample]:
    named_by: dict[str, Place] = {}
    """The place of each image of the dataset so far, by its file."""
    for path in paths:
        try:
            images, stray = _images(path, _load(folder.text(path)), folder.fields)
        except UnreadableText as error:
            yield Place(path), [str(error)]
            continue
        if stray:
            yield Place(path), stray
        for place, image, entry, boxes, wrong in images:
            try:
                file = folder.image(image.file_name, near=path)
            except UnreadableText as error:
                yield place, [*wrong, str(error)]
                continue
            if (other := named_by.setdefault(file, place)) != place:
                wrong.append(f"the image {file} is that of {other} too; leave one annotation file of it in the folder")
            size = (image.width, image.height) if image.width and image.height else None
            yield place, folder.row(file, boxes, wrong, size, entry=entry)


def _load(text: str) -> Mapping[str, Any]:
    """Raises UnreadableText unless it is a JSON object with lists of images, annotations and categories."""
    try:
        document = json.loads(text, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and lists without end
        raise UnreadableText(f"no JSON that can be read: {error}") from None
    kinds = ("images", "annotations", "categories")
    if not isinstance(document, dict) or not all(isinstance(document.get(kind), list) for kind in kinds):
        raise UnreadableText(f"holds {shown(document)}, expected an object with lists of {', '.join(kinds)}")
    return document


def _images(
    path: str, document: Mapping[str, Any], unread: Counter[str]
) -> tuple[list[tuple[Place, Image, Entry, list[tuple[str, Any, Any]], list[str]]], list[str]]:
    """The images of one file, each with its place, boxes and problems; and the problems that belong to no image.

    unread: counts the keys that are not read. Raises UnreadableText for an id of several categories.
    """
    faults: dict[Any, list[str]] = defaultdict(list)
    """Problems by image_id; None has those of no image."""
    entries = {kind: list(_entries(document, kind, form, faults, unread)) for kind, form in FORMS.items()}
    categories = _categories([each for _, each, _ in entries["categories"]])
    images = entries["images"]
    boxes: dict[Id, list[tuple[str, Any, Any]]] = {image.id: [] for _, image, _ in images}
    for own, each, entry in entries["annotations"]:
        name = f"annotation {own}"
        if each.image_id not in boxes:
            faults[None].append(f"{name}: image_id {shown(each.image_id)} is not that of a valid image")
        elif fault := no_plain_box(entry):
            faults[each.image_id].append(f"{name} {fault}")
        elif each.category_id not in categories:
            faults[each.image_id].append(f"{name}: category_id {shown(each.category_id)} is not among the categories")
        else:
            boxes[each.image_id].append((name, each.bbox, categories[each.category_id]))
    counts = Counter(image.id for _, image, _ in images)
    found = []
    for name, image, entry in images:
        wrong = [*faults.get(image.id, ()), *["its id is that of several images"] * (counts[image.id] > 1)]
        found.append((Place(path, name, "image"), image, entry, boxes[image.id], wrong))
    return found, [fault for image_id, some in faults.items() if image_id not in boxes for fault in some]


def _categories(entries: Sequence[Category]) -> dict[Id, str]:
    names: dict[Id, str] = {}
    for position, each in enumerate(entries):
        if composed(names.setdefault(each.id, each.name)) != composed(each.name):
            first = next(place for place, other in enumerate(entries) if other.id == each.id)
            raise UnreadableText(
                f"the category id {shown(each.id)} has two names, at positions {first} and {position}: "
                f"{shown(names[each.id])} and {shown(each.name)}"
            )
    return names


def _entries(
    document: Mapping[str, Any], kind: str, form: Any, faults: dict[Any, list[str]], unread: Counter[str]
) -> Iterator[tuple[str, Any, Entry]]:
    """The valid entries of a list as `form`, each after its id, or its position if it has none, and before all its
    keys.

    faults: takes the problems of the others, by the image that they are about. unread: counts the keys not read.
    """
    adapter, known = TypeAdapter(form), {field.name for field in fields(form)}.union(DESCRIBING[kind])
    for index, entry in enumerate(document[kind]):
        keys = entry if isinstance(entry, dict) else {}
        own, image_id = keys.get("id"), keys.get("image_id")
        unread.update(f"{kind}.{key}" for key, value in keys.items() if key not in known and has_value(value))
        name = shown(own).strip("'") if isinstance(own, int | str) else f"at position {index}"
        try:
            yield name, adapter.validate_python(entry), keys
        except ValidationError as error:
            wrong = [f"{where}: {problem}" for where, problem in problems(error, form).items()]
            if kind == "annotations" and "bbox" not in keys and (others := [key for key in NO_BOX if keys.get(key)]):
                wrong.append(f"{' and '.join(others)} without a bbox; export boxes")
            about = image_id if kind == "annotations" and isinstance(image_id, int | str) else None
            faults[about] += [f"{form.__name__.lower()} {name}: {fault}" for fault in wrong]
