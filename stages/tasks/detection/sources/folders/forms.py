"""Which form a folder has, and its rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import UserError, listed, some
from stages.kit.data.sources import READ_ON, describe_folder
from stages.tasks.detection.sources.folders import coco, tables, voc, yolo
from stages.tasks.detection.sources.folders.files import Folder, Splits
from stages.tasks.detection.sources.rows import OPEN_FOOD_FACTS, BoxForm, Columns, DataForm

log = logging.getLogger("stages")


@dataclass(frozen=True)
class _Form:
    name: str
    boxes: BoxForm
    expected: str
    read: Callable[[Folder], Splits]
    found: Callable[[Folder], list[str]]
    """The files by which the form is known."""


_FORMS: dict[DataForm, _Form] = {
    "coco": _Form(
        "COCO",
        coco.FORM,
        coco.EXPECTED,
        coco.read_coco,
        lambda folder: [path for path in folder.with_suffix(".json") if coco.is_coco(folder.head(path))],
    ),
    "yolo": _Form("YOLO", yolo.FORM, yolo.EXPECTED, yolo.read_yolo, yolo.data_files),
    "voc": _Form(
        "Pascal VOC",
        voc.FORM,
        voc.EXPECTED,
        voc.read_voc,
        lambda folder: [path for path in folder.with_suffix(".xml") if voc.is_voc(folder.head(path))],
    ),
}


@dataclass(frozen=True, kw_only=True)
class Understood:
    """A folder as it is read."""

    form: DataForm
    boxes: BoxForm
    expected: str
    """Of a folder of this form, for messages."""
    splits: Splits
    folder: Folder | None = None
    """Where pictures are files of their own."""


def understand(root: Path, asked: DataForm | None, columns: Columns | None) -> Understood:
    """The folder, by the form that is asked for, or by the only one that it has signs of. The log says which.

    Raises UserError where it has signs of none, or of several.
    """
    folder = Folder(root)
    signs: dict[DataForm, list[str]] = {name: found for name, form in _FORMS.items() if (found := form.found(folder))}
    if found := folder.with_suffix(".parquet"):
        signs["parquet"] = found
    form = asked or _only(root, signs)
    by = "params.yaml" if asked else some(signs[form], 1)
    log.info("%s is read as %s, by %s", root, "parquet" if form == "parquet" else _FORMS[form].name, by)
    if form == "parquet":
        boxes = OPEN_FOOD_FACTS if columns is None else BoxForm(order=columns.order, unit=columns.unit)
        return Understood(form=form, boxes=boxes, expected=tables.EXPECTED, splits=tables.read_tables(root, columns))
    if columns is not None:
        raise UserError(f"the dataset's `columns` in params.yaml are of parquet files, and {root} is read as {form}")
    chosen = _FORMS[form]
    return Understood(
        form=form, boxes=chosen.boxes, expected=chosen.expected, splits=chosen.read(folder), folder=folder
    )


def _only(root: Path, signs: dict[DataForm, list[str]]) -> DataForm:
    if len(signs) == 1:
        return next(iter(signs))
    if signs:
        found = listed([f"{form}: {', '.join(files[:3])}" for form, files in signs.items()])
        raise UserError(
            f"{root} has files of several forms:\n{found}\nSay which is meant: `format` of the dataset in params.yaml, "
            f"{' or '.join(signs)}"
        )
    known = listed([tables.EXPECTED, *(form.expected for form in _FORMS.values())])
    raise UserError(
        f"{root} has no annotations of a known form: {describe_folder(root)}. Expected one of:\n{known}\n{READ_ON}"
    )
