"""Raw rows of packages and their nutrition tables as prepared splits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from stages.core.errors import UserError
from stages.core.params.schema import GenerateParams
from stages.kit.data.images import MAX_IMAGE_PIXELS
from stages.kit.data.preparation import Sample, Source, write_prepared
from stages.kit.data.sources import Place, parquet_folder, read_parquet_split, with_progress
from stages.kit.data.texts import markup_problem
from stages.tasks.detection.samples.records import PROMPT, REQUIRED, SCHEMA, TARGET, DetectionRecord, parse_row
from stages.tasks.detection.sources.scenes import Split, generate_rows

FORM = f"parquet files with the columns {', '.join(REQUIRED)}"


def prepare(
    source: str,
    *,
    out_dir: Path,
    skip_invalid: bool = False,
    selection: float = 0.0,
    generate: GenerateParams | None = None,
    category: str = TARGET,
    prompt: str = PROMPT,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> dict[str, Any]:
    """Validate a dataset and write it, whole or not at all, to `out_dir`.

    source: `generated` (sizes and seed in `generate`), `folder:PATH`, or `hub:OWNER/NAME@REVISION`.
    skip_invalid: leave invalid rows out, counted and listed in stats.json. An image in both splits is always refused.
    selection: share of the training images to set aside.
    category: of the boxes that are asked for, and prompt: how; both are kept with each record.
    max_image_pixels: a row with a larger picture is invalid.
    Returns what stats.json holds: `source` and `revision` as resolved, and by split, beside what write_prepared says,
    `boxes`, `boxes_per_image`, `categories` and `largest_image` [width, height].
    """
    if problem := markup_problem(category, prompt):
        raise UserError(f"the dataset's category and prompt in params.yaml: {problem}")
    folder, resolved, revision = (None, source, None) if source == "generated" else parquet_folder(source)

    def samples(split: Split) -> Iterator[Sample[DetectionRecord]]:
        if folder is None:
            rows = _generated_rows(split, generate)
        else:
            rows = read_parquet_split(folder, split, required=REQUIRED, form=FORM)
        for place, row in rows:
            yield place, parse_row(row, category=category, prompt=prompt, max_image_pixels=max_image_pixels)

    return write_prepared(
        Source(
            origin={"source": resolved, "revision": revision},
            splits={split: samples(split) for split in get_args(Split)},
        ),
        out_dir,
        schema=SCHEMA,
        summary=_summary,
        form=FORM,
        subject="image",
        skip_invalid=skip_invalid,
        skip_leaks=False,
        selection=selection,
    )


def _generated_rows(split: Split, generate: GenerateParams | None) -> Iterator[tuple[Place, dict[str, Any]]]:
    assert generate is not None, "params.yaml is refused where it is missing"
    count = {"train": generate.train, "val": generate.val}[split]
    rows = generate_rows(split, count, generate.seed)
    for number, row in enumerate(with_progress(rows, split, count)):
        yield Place(f"generated {split}", number, "row"), row


def _summary(_: str, records: Sequence[DetectionRecord]) -> dict[str, Any]:
    boxes_per_image = Counter(len(record.boxes) for record in records)
    return {
        "boxes": sum(len(record.boxes) for record in records),
        "boxes_per_image": {str(count): images for count, images in sorted(boxes_per_image.items())},
        "categories": dict(sorted(Counter(name for record in records for name in record.categories).items())),
        "largest_image": list(max(((record.width, record.height) for record in records), key=math.prod)),
    }
