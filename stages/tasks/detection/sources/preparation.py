"""Raw rows of packages and their nutrition tables as prepared splits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from stages.core.documents import cut, nearest
from stages.core.errors import UserError
from stages.kit.data.prepared import RawDataset, Rules, Sample
from stages.kit.data.sources import parquet_folder
from stages.kit.data.texts import markup_problem
from stages.tasks.detection.samples.boxes import codec_of, decode_boxes, encode_boxes
from stages.tasks.detection.samples.records import SCHEMA, DetectionRecord
from stages.tasks.detection.sources.folders.files import HELD_OUT, RawSample
from stages.tasks.detection.sources.folders.forms import understand
from stages.tasks.detection.sources.rows import Reader, parse_row


def read(source: str, reader: Reader) -> RawDataset[DetectionRecord]:
    """Images with boxes of `folder:PATH`, in any form that is read here, or of `hub:OWNER/NAME@REVISION`."""
    _require_answerable(reader)
    folder, resolved, revision = parquet_folder(source)
    understood = understand(folder, "parquet" if revision else reader.format, reader.columns)

    def parsed(rows: Iterable[RawSample]) -> Iterator[Sample[DetectionRecord]]:
        for place, row in rows:
            if isinstance(row, list):
                yield place, row
            else:
                yield (
                    place,
                    parse_row(row, reader=reader, form=understood.boxes),
                )

    def unused_files() -> Sequence[str]:
        return [*understood.splits.unused, *(understood.folder.unread() if understood.folder else ())]

    return RawDataset(
        rules=Rules(schema=SCHEMA, summary=_summary, expected=understood.expected, subject="image", held_out=HELD_OUT),
        source=resolved,
        revision=revision,
        splits={split: parsed(rows) for split, rows in understood.splits.samples.items()},
        validation=understood.splits.validation,
        unused_files=unused_files,
    )


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
