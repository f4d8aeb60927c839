"""COCO's JSON (cocodataset.org, Data format): images, annotations with bbox [x, y, width, height], categories.

pycocotools' own reader trusts a file, and ends in a KeyError if it is wrong; here each entry is checked alone, so that
every problem is named by the entry's id.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from stages.core.records import Unreadable, problems, shown
from stages.data.folder import Folder
from stages.data.sources import Place
from stages.data.texts import UnreadableText, composed, json_value
from stages.tasks.detection.sources.rows import BoxForm, NamedBox, has_value, no_plain_box
from stages.tasks.detection.sources.splits import RawSample, Splits, folder_splits, row_of

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
    bbox_mode: Literal[1] = 1
    """Detectron2's, in which 0 means corners."""
    id: Id | None = None


@dataclass(frozen=True, kw_only=True, config=_lenient)
class Category:
    id: Id
    name: Annotated[str, Field(min_length=1)]


FORMS = {"categories": Category, "images": Image, "annotations": Annotation}
SIGN = rb'(?s)"(images|annotations)"|"categories".{40000}'
"""In the beginning of a file: one of a few categories alone is Label Studio's list of classes."""
NO_BOX = ("segmentation", "keypoints", "caption", "segments_info")
"""Keys of annotations that are of something else than a box."""


Entry = tuple[str, Any, Mapping[str, Any]]
"""A valid entry of a list: its id, or its position if it has none; an Image, Annotation or Category; and all keys."""


def annotation_files(folder: Folder) -> list[str]:
    return folder.with_content(".json", SIGN)


def read(folder: Folder) -> Splits:
    files = folder.by_split(folder.with_content(".json", SIGN + rb"|^\s*$"))
    return folder_splits(folder, files, "annotation files", partial(_samples, folder))


def _samples(folder: Folder, path: str) -> Iterator[RawSample]:
    """The images of a file. Raises UserError for a file of another form."""
    document = json_value(folder.text(path))
    if not isinstance(document, dict) or not all(isinstance(document.get(kind), list) for kind in FORMS):
        found = document if isinstance(document, Unreadable) else f"holds {shown(document)}"
        raise UnreadableText(f"{found}, expected an object with lists of images, annotations, categories")
    faults: dict[Any, list[str]] = defaultdict(list)
    """Problems by image_id; None has those of no image."""
    entries = {kind: list(_entries(document, kind, form, faults, folder.unread)) for kind, form in FORMS.items()}
    categories, ids = _categories(entries["categories"]), Counter(image.id for _, image, _ in entries["images"])
    boxes: dict[Id, list[NamedBox]] = defaultdict(list)
    same = {str(image_id): image_id for image_id in ids}
    for own, each, keys in entries["annotations"]:
        name = f"annotation {own}"
        if each.image_id not in ids:
            about = same.get(str(each.image_id))
            faults[about].append(f"{name}: image_id {shown(each.image_id)} is not that of a valid image")
        elif fault := no_plain_box(keys):
            faults[each.image_id].append(f"{name} {fault}")
        elif each.category_id not in categories:
            faults[each.image_id].append(f"{name}: category_id {shown(each.category_id)} is not among the categories")
        else:
            boxes[each.image_id].append((name, each.bbox, categories[each.category_id]))
    if stray := [fault for image_id, some in faults.items() if image_id not in ids for fault in some]:
        yield Place(path), stray
    for name, image, keys in entries["images"]:
        wrong = [*faults.get(image.id, ()), *["its id is that of several images"] * (ids[image.id] > 1)]
        place, size = Place(path, name, "image"), (image.width, image.height)
        yield place, row_of(folder, image.file_name, path, boxes[image.id], wrong, size=size, entry=keys)


def _categories(entries: list[Entry]) -> dict[Id, str]:
    named: dict[Id, tuple[int, str]] = {}
    for position, (_, each, _) in enumerate(entries):
        first, name = named.setdefault(each.id, (position, each.name))
        if composed(name) != composed(each.name):
            raise UnreadableText(
                f"the category id {shown(each.id)} has two names, at positions {first} and {position}: {shown(name)} "
                f"and {shown(each.name)}"
            )
    return {number: name for number, (_, name) in named.items()}


def _entries(
    document: Mapping[str, Any], kind: str, form: Any, faults: dict[Any, list[str]], unread: Counter[str]
) -> Iterator[Entry]:
    """The valid entries of a list as `form`.

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
            if kind == "annotations" and not keys.get("bbox") and (others := [key for key in NO_BOX if keys.get(key)]):
                wrong.append(f"{' and '.join(others)} without a bbox; export boxes")
            about = image_id if kind == "annotations" and isinstance(image_id, int | float | str) else None
            faults[about] += [f"{form.__name__.lower()} {name}: {fault}" for fault in wrong]
