"""From a source of raw rows to the prepared splits that training and evaluation read.

Writes train.parquet, val.parquet (records.SCHEMA) and stats.json. Nothing appears under those names unless
every check has passed: each row of its own, no split empty, and no image in both splits.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from stages.core.errors import UserError, counted, listed
from stages.core.params.schema import GenerateParams
from stages.core.publish import published
from stages.kit.data.hub import fetch_snapshot
from stages.kit.data.markup import markup_problem
from stages.kit.data.parquet import RowAt, count_rows, missing_columns, read_rows, write_rows
from stages.kit.data.sources import about_invalid, split_files
from stages.kit.data.splits import leaks
from stages.tasks.detection.samples.records import (
    COLUMNS,
    MAX_IMAGE_PIXELS,
    PROMPT,
    REQUIRED,
    SCHEMA,
    TARGET,
    DetectionRecord,
    parse_row,
    to_row,
)
from stages.tasks.detection.sources.scenes import Split, generate_rows

FORM = f"parquet files with the columns {', '.join(REQUIRED)}"

SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass
class SplitReport:
    """What has been seen of one split so far."""

    places: list[tuple[str, RowAt]] = field(default_factory=list)
    """(content digest, place) of each valid row."""
    boxes_per_image: Counter[int] = field(default_factory=Counter)
    categories: Counter[str] = field(default_factory=Counter)
    largest: tuple[int, int] = (0, 0)
    """Width and height in pixels of the image with the most of them."""
    digest: Any = field(default_factory=hashlib.sha256)
    invalid: list[tuple[RowAt, str]] = field(default_factory=list)
    """One entry a problem; a row can have several."""
    invalid_rows: int = 0


def prepare(
    source: str,
    *,
    out_dir: Path,
    skip_invalid: bool = False,
    generate: GenerateParams | None = None,
    category: str = TARGET,
    prompt: str = PROMPT,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> dict[str, Any]:
    """Validate a dataset and write it, whole or not at all, to `out_dir`.

    source: `generated` (sizes and seed in `generate`), `folder:PATH`, or `hub:OWNER/NAME@REVISION`.
    skip_invalid: leave invalid rows out, counted and listed in stats.json, instead of refusing them.
    category: of the boxes that are asked for, and prompt: how; both are kept with each record.
    max_image_pixels: a row with a larger picture is invalid.
    Returns what stats.json holds: `source` and `revision` as resolved, and by split `records`, `boxes`,
    `boxes_per_image`, `categories`, `largest_image` [width, height], `digest` of its content, `invalid_rows`
    and `invalid`, every problem with its place.
    Raises UserError where rows are invalid, a split is empty, or an image is in both splits.
    """
    if problem := markup_problem(category, prompt):
        raise UserError(f"the dataset's category and prompt in params.yaml: {problem}")
    folder, resolved, revision = _locate(source)
    parse = partial(parse_row, category=category, prompt=prompt, max_image_pixels=max_image_pixels)
    with published(out_dir) as aside:
        reports: dict[str, SplitReport] = {}
        for split in SPLITS:
            report = reports[split] = SplitReport()
            rows = _generated_rows(split, generate) if folder is None else _folder_rows(folder, split, report)
            records = _valid_records(rows, report, parse)
            write_rows((to_row(record) for record in records), aside / f"{split}.parquet", SCHEMA)
        _refuse_faults(source, reports, skip_invalid)
        stats = {
            "source": resolved,
            "revision": revision,
            "splits": {split: _summary(report) for split, report in reports.items()},
        }
        text = json.dumps(stats, indent=2, ensure_ascii=False)
        (aside / "stats.json").write_text(text + "\n", encoding="utf-8")
    return stats


def _locate(source: str) -> tuple[Path | None, str, str | None]:
    """The folder that holds a source (none where it is generated), its resolved name, and its full commit."""
    kind, _, rest = source.partition(":")
    if source == "generated":
        return None, source, None
    if kind == "folder":
        return Path(rest), source, None
    if kind == "hub" and "@" in rest:
        repo_id, _, revision = rest.partition("@")
        folder, commit = fetch_snapshot("dataset", repo_id, revision, patterns=["data/*.parquet"])
        return folder, f"hub:{repo_id}@{commit}", commit
    raise UserError(f"unknown source {source!r}; expected generated, folder:PATH or hub:OWNER/NAME@REVISION")


def _generated_rows(split: Split, generate: GenerateParams | None) -> Iterator[tuple[RowAt, dict[str, Any]]]:
    if generate is None:
        raise UserError("the source is `generated`, but `generate` (train, val, seed) is not set in params.yaml")
    count = {"train": generate.train, "val": generate.val}[split]
    rows = generate_rows(split, count, generate.seed)
    for index, row in enumerate(_progress(rows, split, count)):
        yield RowAt(f"generated {split}", index), row


def _folder_rows(folder: Path, split: Split, report: SplitReport) -> Iterator[tuple[RowAt, dict[str, Any]]]:
    """The rows of the split's files; a file that lacks a column is reported in full and gives none."""
    for path in split_files(folder, split, form=FORM):
        name = path.relative_to(folder).as_posix()
        count = count_rows(path)
        if missing := missing_columns(path, REQUIRED):
            report.invalid += [(RowAt(name), f"column {column} is missing, for all {count} rows") for column in missing]
            report.invalid_rows += count
            continue
        for index, row in enumerate(_progress(read_rows(path, COLUMNS), name, count)):
            yield RowAt(name, index), row


def _progress(rows: Iterator[dict[str, Any]], name: str, count: int) -> Iterator[dict[str, Any]]:
    # disable=None shows it on a terminal only.
    yield from tqdm(rows, desc=name, total=count, unit=" rows", leave=False, disable=None)


def _valid_records(
    rows: Iterator[tuple[RowAt, dict[str, Any]]],
    report: SplitReport,
    parse: Callable[[dict[str, Any]], DetectionRecord | list[str]],
) -> Iterator[DetectionRecord]:
    """The rows that are valid, as records; what is seen on the way goes to the report."""
    for place, row in rows:
        record = parse(row)
        if isinstance(record, list):
            report.invalid += [(place, problem) for problem in record]
            report.invalid_rows += 1
            continue
        report.places.append((record.sha256, place))
        report.boxes_per_image[len(record.boxes)] += 1
        report.categories.update(record.categories)
        report.largest = max(report.largest, (record.width, record.height), key=math.prod)
        report.digest.update(_content(record))
        yield record


def _content(record: DetectionRecord) -> bytes:
    """What the digest of a split is taken over: all of a record, in a form that no file format changes."""
    image = hashlib.sha256(record.image).hexdigest()
    return json.dumps([record.image_id, image, record.sha256, record.boxes, record.categories]).encode()


def _refuse_faults(source: str, reports: dict[str, SplitReport], skip_invalid: bool) -> None:
    invalid = [f"{place}: {problem}" for report in reports.values() for place, problem in report.invalid]
    if invalid and not skip_invalid:
        count = sum(report.invalid_rows for report in reports.values())
        raise UserError(
            f"{source} has {counted(count, 'invalid row')} (rows count from 0):\n{listed(invalid)}\n"
            f"{about_invalid({split: len(report.places) for split, report in reports.items()}, FORM)}"
        )
    for split, report in reports.items():
        if not report.places:
            left_out = f"; {counted(report.invalid_rows, 'invalid row')} left out" if report.invalid_rows else ""
            raise UserError(f"{source} has no valid row in the split {split}{left_out}; expected at least one")
    if found := leaks({split: report.places for split, report in reports.items()}):
        pairs = [f"{first} and {second}" for first, second in found]
        raise UserError(
            f"{source} has {counted(len(found), 'image')} in both splits, which makes scores worthless:\n"
            f"{listed(pairs)}\nRemove each from one of them (from a copy of a hub dataset, as folder:PATH)"
        )


def _summary(report: SplitReport) -> dict[str, Any]:
    return {
        "records": len(report.places),
        "boxes": sum(count * images for count, images in report.boxes_per_image.items()),
        "boxes_per_image": {str(count): images for count, images in sorted(report.boxes_per_image.items())},
        "categories": dict(sorted(report.categories.items())),
        "largest_image": list(report.largest),
        "digest": f"sha256:{report.digest.hexdigest()}",
        "invalid_rows": report.invalid_rows,
        "invalid": [{"file": place.file, "row": place.row, "problem": problem} for place, problem in report.invalid],
    }
