"""Raw rows of packages and their nutrition tables as prepared splits."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stages.core.documents import cut, nearest
from stages.core.errors import UserError, counted
from stages.core.params.schema import LimitParams
from stages.kit.data.preparation import Sample, Source, write_prepared
from stages.kit.data.sources import parquet_folder
from stages.kit.data.texts import markup_problem
from stages.tasks.detection.samples.boxes import codec_of, decode_boxes, encode_boxes
from stages.tasks.detection.samples.records import SCHEMA, DetectionRecord
from stages.tasks.detection.sources.folders.files import HELD_OUT, RawSample
from stages.tasks.detection.sources.folders.forms import understand
from stages.tasks.detection.sources.rows import Reader, parse_row

log = logging.getLogger("stages")


def prepare(
    source: str,
    *,
    out_dir: Path,
    skip_invalid: bool = False,
    selection: float = 0.0,
    limit: LimitParams | None = None,
    reader: Reader | None = None,
) -> dict[str, Any]:
    """Validate a dataset and write it, whole or not at all, to `out_dir`.

    source: `folder:PATH`, or `hub:OWNER/NAME@REVISION`.
    skip_invalid: leave invalid rows out, counted and listed in stats.json. An image in both splits is always refused.
    selection: share of the training images to set aside.
    limit: at most so many samples of a split; which ones, their content alone decides.
    reader: settings of the dataset. What it asks for, and how, is kept with each record.
    Returns what stats.json holds: `source` and `revision` as resolved, and by split, beside what write_prepared says,
    `boxes`, `boxes_per_image`, `categories` and `largest_image` [width, height].
    """
    reader = reader or Reader()
    _require_answerable(reader)
    folder, resolved, revision = parquet_folder(source)
    understood = understand(folder, "parquet" if revision else reader.format, reader.columns)

    def parsed(rows: Iterable[RawSample]) -> Iterator[Sample[DetectionRecord]]:
        for place, row in rows:
            if isinstance(row, list):
                yield place, row
            else:
                yield place, parse_row(row, reader=reader, form=understood.boxes)

    stats = write_prepared(
        Source(
            origin={"source": resolved, "revision": revision, **understood.splits.origin},
            splits={split: parsed(rows) for split, rows in understood.splits.samples.items()},
        ),
        out_dir,
        schema=SCHEMA,
        summary=_summary,
        form=understood.expected,
        subject="image",
        skip_invalid=skip_invalid,
        skip_leaks=False,
        held_out=HELD_OUT,
        selection=selection,
        limit=limit,
    )
    if understood.folder and (unread := understood.folder.unread()):
        log.warning("not read, as no annotation names them: %s, such as %s", counted(len(unread), "picture"), unread[0])
    return stats


def _require_answerable(reader: Reader) -> None:
    """Raises UserError where a label or the prompt cannot be asked for, or could not be told from the answer's form."""
    if problem := markup_problem(*reader.labels(), reader.question()):
        raise UserError(f"the dataset's category and prompt in params.yaml: {problem}")
    known = (reader.category,) if isinstance(reader.category, str) else reader.category or ()
    if strange := [name for name in reader.label if name not in known]:
        raise UserError(
            f"the dataset's label in params.yaml: {strange[0]!r} is not asked for{nearest(strange[0], known)}"
        )
    family = codec_of(reader.answer, "qwen2_vl")
    for label in reader.labels():
        answer = encode_boxes([(0.25, 0.25, 0.75, 0.75)], family=family, label=label)
        if decode_boxes(answer, family=family).labels != (label,):
            raise UserError(f"the label {label!r} does not come back out of an answer that names it; take another")


def _summary(split: str, records: Sequence[DetectionRecord]) -> dict[str, Any]:
    if not any(record.target_boxes() for record in records):
        raise UserError(f"no picture of the split {split} has a box of {', '.join(records[0].asked) or 'anything'}")
    answered = {label for record in records for label in record.labels}
    if split == "train" and (lacking := [label for label in records[0].asked if label not in answered]):
        found = cut(", ".join(sorted({name for record in records for name in record.categories})))
        raise UserError(f"no picture to train on has a box of {', '.join(lacking)}, which is asked for; found {found}")
    boxes_per_image = Counter(len(record.boxes) for record in records)
    return {
        "boxes": sum(len(record.boxes) for record in records),
        "boxes_per_image": {str(count): images for count, images in sorted(boxes_per_image.items())},
        "empty_images": sum(not record.target_boxes() for record in records),
        "categories": dict(sorted(Counter(name for record in records for name in record.categories).items())),
        "largest_image": list(max(((record.width, record.height) for record in records), key=math.prod)),
    }
