"""Sources of detection data: the hub, or a folder in one of the forms that annotation tools write."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.core.errors import UserError, join_truncated, listed, pluralize
from stages.core.given_files import given_files
from stages.core.params.schema import DatasetParams, SplitParams
from stages.core.records import cut, nearest, shown
from stages.data.folder import Folder
from stages.data.parquet import column_names, count_rows, read_schema
from stages.data.prepared import RawDataset, Rules, Sample
from stages.data.sources import READ_ON, SPLIT_FIELDS, describe_folder, files_by_split, parquet_folder, table_rows
from stages.data.texts import markup_problem
from stages.tasks.detection.samples import SCHEMA, DetectionRecord
from stages.tasks.detection.sources import coco, voc, yolo
from stages.tasks.detection.sources.rows import (
    NO_PLAIN_BOX,
    OPEN_FOOD_FACTS,
    Columns,
    DataForm,
    Reader,
    Row,
    no_plain_box,
    parse_row,
    value_at,
)
from stages.tasks.detection.sources.splits import RawSample, Splits

SIZE = ("width", "height")
"""Columns of a table that have the size of each image in pixels, if it has them."""

FORMS = {"coco": coco, "yolo": yolo, "voc": voc}
"""Forms of folders in which images are files of their own, and their readers."""

log = logging.getLogger("stages")


def read(dataset: DatasetParams, reader: Reader) -> RawDataset[DetectionRecord]:
    """Images with boxes of `folder:PATH`, in any form that is read here, or of `hub:OWNER/NAME@REVISION`."""
    _require_answerable(reader)
    root, resolved = parquet_folder(dataset.source)
    folder = Folder(root, dataset.splits)
    name = "parquet" if resolved.startswith("hub:") else _form_of(folder, reader.format)
    if name == "parquet":
        form = columns = reader.columns or OPEN_FOOD_FACTS
        expected = _parquet(columns)
        splits = _read_parquet(folder, columns, dataset.splits, reader.group)
    elif reader.columns is not None:
        raise UserError(f"the dataset's `columns` in params.yaml are of parquet files, and {root} is read as {name}")
    else:
        form, expected = FORMS[name].FORM, FORMS[name].EXPECTED
        splits = FORMS[name].read(folder)
    form = replace(form, unit=reader.unit or form.unit)

    def parsed(rows: Iterable[RawSample], split: str) -> Iterator[Sample[DetectionRecord]]:
        for place, row in rows:
            yield place, row if isinstance(row, list) else parse_row(row, reader, form, split)
        folder.unread.pop(f"images.{reader.group}", None)  # which is read

    return RawDataset(
        rules=Rules(
            schema=SCHEMA,
            summary=_summary,
            expected=expected,
            subject=f"image or {reader.group}" if reader.group else "image",
            describe=lambda record: record.look,
            held_out=0.2,
            separate_groups=reader.group is not None,
        ),
        source=resolved,
        splits={split: parsed(rows, split) for split, rows in splits.samples.items()},
        validation=splits.validation,
        unread_fields=folder.unread,
        unused_files=splits.unused_files,
    )


def _require_answerable(reader: Reader) -> None:
    """Raises UserError if a label or the prompt cannot be asked for. The plan reads all labels back out of answers."""
    if problem := markup_problem(*reader.labels(), reader.question()):
        raise UserError(f"the dataset's category and prompt in params.yaml: {problem}")
    known = reader.categories()
    if strange := [name for name in reader.label if known and name not in known]:
        raise UserError(
            f"the dataset's label in params.yaml: {strange[0]!r} is not asked for{nearest(strange[0], known)}"
        )


def _form_of(folder: Folder, wanted: DataForm | None) -> str:
    """The form that params.yaml names, or else the only one that the folder has signs of. The log says which.

    Raises UserError if it has signs of none, or of several.
    """
    signs = {name: found for name, form in FORMS.items() if (found := form.annotation_files(folder))}
    if found := folder.with_suffix(".parquet"):
        signs["parquet"] = found
    name: str | None = wanted or next(iter(signs), None)
    if name is None:
        known = listed([_parquet(OPEN_FOOD_FACTS), *(form.EXPECTED for form in FORMS.values())])
        raise UserError(
            f"{folder.root} has no annotations of a known form: {describe_folder(folder.root)}. Expected one of:\n"
            f"{known}\n{READ_ON}"
        )
    if wanted is None and len(signs) > 1:
        found_forms = listed([f"{form}: {', '.join(files[:3])}" for form, files in signs.items()])
        raise UserError(
            f"{folder.root} has files of several forms:\n{found_forms}\nSay which is meant: `format` of the dataset's "
            f"`reader` in params.yaml (make data: FORMAT=), {' or '.join(signs)}"
        )
    log.info("%s is read as %s, by %s", folder.root, name, "params.yaml" if wanted else join_truncated(signs[name], 1))
    return name


def _required(columns: Columns) -> list[str]:
    named = (columns.image_id, columns.image, columns.boxes, columns.category)
    return [name for name in named if name is not None]


def _parquet(columns: Columns) -> str:
    names = ", ".join(_required(columns))
    return f"parquet files with the columns {names} (or reader.columns), named train*.parquet, in the folder or data/"


def _read_parquet(folder: Folder, columns: Columns, named: SplitParams, group: str | None) -> Splits:
    """The files of the splits. Raises UserError if there are none to train on, or one of their columns is missing."""
    required, expected, root = _required(columns), _parquet(columns), folder.root
    required += [group] if group and "(" not in group else []
    image, at_box = columns.image.partition(".")[0], columns.boxes.rpartition(".")[0]

    def samples(paths: Sequence[Path]) -> Iterator[RawSample]:
        names = {path: dict.fromkeys(column_names(read_schema(path))) for path in paths}
        lacking = [(path, ", ".join(name for name in required if name not in names[path])) for path in paths]
        if lines := [f"{at} lacks {some}; it has {join_truncated([*names[at]], 20)}" for at, some in lacking if some]:
            raise UserError(f"columns are missing:\n{listed(lines)}\nExpected: {expected}; {READ_ON}")
        for path in paths:
            parts = {name: name.rpartition(".") for name in names[path]}
            checked = [
                name for name, (at, _, key) in parts.items() if at in ("", at_box) and key.lower() in NO_PLAIN_BOX
            ]
            of_split = [name for name in names[path] if name.lower() in SPLIT_FIELDS]
            outer = {at for at, _, _ in parts.values()}
            others = [name for name in names[path] if name not in {*required, *SIZE, *outer, *checked}]
            num_rows = count_rows(path)
            folder.unread.update({name: num_rows for name in others if name.partition(".")[0] != image})
            read_columns = dict.fromkeys(name.partition(".")[0] for name in (*required, *SIZE, *checked, *of_split))
            class_names = _class_names(path, columns.category)
            for place, row in table_rows(root, path, list(read_columns)):
                yield place, row_of(row, str(place), columns, class_names)

    files = given_files(root, "data/*.parquet", any_case=True) or given_files(root, "*.parquet", any_case=True)
    chosen = files_by_split(root, files, named, expected=expected)
    return Splits(samples={split: samples(paths) for split, paths in chosen.items()})


def row_of(row: Mapping[str, Any], place: str, columns: Columns, names: Sequence[str]) -> Row:
    """names: of numbered categories."""
    image, image_id = value_at(row, columns.image), value_at(row, columns.image_id) if columns.image_id else place
    bboxes, categories = (value_at(row, column) for column in (columns.boxes, columns.category))
    outer = value_at(row, columns.boxes.rpartition(".")[0]) if "." in columns.boxes else row
    boxes, problems = [], []
    if isinstance(bboxes, list) and isinstance(categories, list) and len(bboxes) == len(categories):
        for index, (bbox, category) in enumerate(zip(bboxes, categories, strict=True)):
            numbered = isinstance(category, int) and 0 <= category < len(names)
            boxes.append((name := f"box {index}", bbox, names[category] if numbered else category))
            if fault := no_plain_box(_item(outer, index)):
                problems.append(f"{name} {fault}")
    elif bboxes is not None or categories is not None:
        found = f"{columns.boxes} is {shown(bboxes)}, and {columns.category} {shown(categories)}"
        problems = [f"{found}; expected two lists of the same length"]
    return Row(
        str(image_id) if isinstance(image_id, int) else image_id,
        image.get("bytes") if isinstance(image, Mapping) else image,
        boxes,
        problems,
        [*map(row.get, SIZE)],
        entry=row,
    )


def _item(columns: Any, index: int) -> Mapping[str, Any]:
    """The fields of one box, of a struct of lists or a list of structs."""
    if isinstance(columns, list):
        return columns[index] if isinstance(columns[index], Mapping) else {}
    return {name: each[index] for name, each in columns.items() if isinstance(each, list) and len(each) > index}


def _class_names(path: Path, column: str) -> list[str]:
    """The names behind the numbers of a column, from the description that the library `datasets` writes into the file
    (ClassLabel); empty without one. Raises UserError if that is no JSON of this form.
    """
    metadata = read_schema(path).metadata or {}
    if b"huggingface" not in metadata:
        return []

    def inner(feature: Any) -> Any:
        """The items of a list: datasets writes {"feature": ..., "_type": "List"}, or [...]."""
        if isinstance(feature, list):
            return inner(feature[0])
        is_list = isinstance(feature, dict) and feature.get("_type") in ("List", "LargeList", "Sequence")
        return inner(feature["feature"]) if is_list else feature

    try:
        here: Any = json.loads(metadata[b"huggingface"])["info"]["features"]
        for step in column.split("."):
            here = inner(inner(here)[step])
        names = here.get("names") if here.get("_type") == "ClassLabel" else []
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: the description of its columns (huggingface) cannot be read: {shown(error)}"
        ) from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: the names of {column} are {shown(names)}, expected a list of names")
    return names


def _summary(split: str, records: Sequence[DetectionRecord]) -> dict[str, Any]:
    if not any(record.annotated() for record in records):
        raise UserError(f"no image of the split {split} has a box of {', '.join(records[0].asked) or 'anything'}")
    labels = {label for record in records for label in record.labels}
    categories = Counter(name for record in records for name in record.categories)
    if split == "train" and (lacking := [label for label in records[0].asked if label not in labels]):
        found = cut(", ".join(sorted(categories)))
        raise UserError(f"no image to train on has a box of {', '.join(lacking)}, which is asked for; found {found}")
    boxes_per_image = Counter(len(record.boxes) for record in records)
    targets = [list(zip(record.boxes, record.categories, strict=True)) for record in records]
    if repeated := sum(len(some) - len(set(some)) for some in targets):
        images = sum(len(some) > len(set(some)) for some in targets)
        log.warning(
            "%s: %s the same box of a category as another of its image, in %s; an answer is to name it each time",
            *(split, f"{repeated:,} {'is' if repeated == 1 else 'are'}", pluralize(images, "image")),
        )
    return {
        "boxes": sum(len(record.boxes) for record in records),
        "boxes_per_image": {str(count): images for count, images in sorted(boxes_per_image.items())},
        "empty_images": sum(not record.annotated() for record in records),
        **({"repeated_boxes": repeated} if repeated else {}),
        "categories": dict(sorted(categories.items())),
        "largest_image": list(max(((record.width, record.height) for record in records), key=math.prod)),
    }
