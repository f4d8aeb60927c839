"""From samples as a task reads them to the prepared splits that training and evaluation read.

Writes train.parquet, val.parquet, stats.json and, where one is asked for, selection.parquet. Nothing appears under
those names unless every check has passed: each sample well-formed, no split empty, and nothing in two of them.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

from stages.core.errors import UserError, counted, listed
from stages.core.params.schema import LimitParams
from stages.core.publish import published
from stages.kit.data.images import ImageRecord
from stages.kit.data.parquet import write_rows
from stages.kit.data.prepared import STATS_FILE, to_row
from stages.kit.data.sources import READ_ON, Place
from stages.kit.data.texts import UnreadableText

log = logging.getLogger("stages")


class PreparedRecord(Protocol):
    """The records of every task."""

    def subject(self) -> str:
        """Equal for records that may not be in two splits."""

    def content(self) -> Sequence[Any]:
        """All that the record says, wherever it was read, as JSON can have it; what names it to people comes first."""


R = TypeVar("R", bound=PreparedRecord)
Sample = tuple[Place, R | list[str]]
"""A record, or every problem that keeps a sample or a whole file from being one; and where it was read."""


@dataclass(kw_only=True)
class Source(Generic[R]):
    """A dataset as a task reads it."""

    origin: dict[str, Any]
    """First entries of stats.json; `source` and `revision` as resolved are among them."""
    splits: Mapping[str, Iterable[Sample[R]]]
    """`train` and `val`, read as they are iterated over; without `val` where it is to be held out of `train`. And
    `selection`, where it is not to be."""
    files: dict[str, list[str]] = field(default_factory=dict)
    """Names of the files that a split was read from."""

    def files_of(self, split: str) -> list[str]:
        return self.files.get(split, self.files["train"])


def read_text_files(
    source: str,
    files: Sequence[Path],
    chosen: Mapping[str, Sequence[Path]],
    read: Callable[[Path], Iterable[Sample[R]]],
    *,
    held_out: str,
) -> Source[R]:
    """The files that are chosen for each split, read by `read`, which may raise UnreadableText at the beginning of one.

    files: all that might have been chosen. held_out: what is validated on where none are chosen for `val`.
    """
    used = {path for paths in chosen.values() for path in paths}
    names = {split: [path.name for path in paths] for split, paths in chosen.items()}
    origin = {
        "source": source,
        "revision": None,
        "validation": ", ".join(names["val"]) if "val" in names else held_out,
        "unused_files": [path.name for path in files if path not in used],
    }
    splits = {split: [sample for path in paths for sample in _readable(path, read)] for split, paths in chosen.items()}
    return Source(origin=origin, splits=splits, files=names)


def _readable(path: Path, read: Callable[[Path], Iterable[Sample[R]]]) -> Iterator[Sample[R]]:
    try:
        yield from read(path)
    except UnreadableText as error:
        yield Place(path.name), [str(error)]


@dataclass
class _Split(Generic[R]):
    """A split as far as it was read."""

    records: list[R] = field(default_factory=list)
    """Without their pictures."""
    num_valid: int = 0
    """Before any is left out for another reason."""
    invalid: list[tuple[Place, str]] = field(default_factory=list)
    """One entry a problem; a sample can have several."""
    invalid_rows: int = 0
    leaked: list[tuple[Place, Place, str]] = field(default_factory=list)
    """Samples whose subject is validated on: where they were read, where that is, and what names them."""
    beyond_limit: int | None = None
    """Valid records left out for a limit; None without one."""
    digest: Any = field(default_factory=hashlib.sha256)

    def valid(self, samples: Iterable[Sample[R]]) -> Iterator[tuple[Place, R]]:
        for place, record in samples:
            if isinstance(record, list):
                self.invalid += [(place, problem) for problem in record]
                self.invalid_rows += 1
            else:
                self.num_valid += 1
                yield place, record

    def without_leaks(self, samples: Iterable[tuple[Place, R]], validated: Mapping[str, Place]) -> Iterator[R]:
        """validated: where each subject of the validation split was read."""
        for place, record in samples:
            if seen := validated.get(record.subject()):
                self.leaked.append((place, seen, str(record.content()[0])))
            else:
                yield record

    def limited(self, records: Iterator[R], limit: int | None) -> Iterator[R]:
        """At most so many of the records, chosen by a digest of their content, in their order."""
        if limit is None:
            return records

        def digest(numbered: tuple[int, R]) -> bytes:
            return hashlib.sha256(json.dumps(numbered[1].content()).encode()).digest()

        numbers = count()
        kept = heapq.nsmallest(limit, ((next(numbers), record) for record in records), key=digest)
        self.beyond_limit = next(numbers) - len(kept)
        return (record for _, record in sorted(kept, key=itemgetter(0)))

    def rows(self, records: Iterable[R], schema: pa.Schema) -> Iterator[dict[str, Any]]:
        for record in records:
            self.digest.update(json.dumps(record.content()).encode())
            self.records.append(replace(record, image=b"") if isinstance(record, ImageRecord) else record)
            yield to_row(record, schema)

    def faults(self, *, with_leaks: bool) -> dict[str, Any]:
        faults: dict[str, Any] = {
            "invalid_rows": self.invalid_rows,
            "invalid": [{"file": at.file, at.unit: at.number, "problem": problem} for at, problem in self.invalid],
        }
        if self.beyond_limit is not None:
            faults["beyond_limit"] = self.beyond_limit
        leaked = [{"train": str(place), "val": str(seen)} for place, seen, _ in self.leaked]
        return faults | ({"leaked_rows": len(leaked), "leaked": leaked} if with_leaks else {})


def write_prepared(
    source: Source[R],
    out_dir: Path,
    *,
    schema: pa.Schema,
    summary: Callable[[str, Sequence[R]], Mapping[str, Any]],
    form: str,
    subject: str,
    skip_invalid: bool,
    skip_leaks: bool = True,
    held_out: float = 0.0,
    selection: float = 0.0,
    limit: LimitParams | None = None,
    adapt: Callable[[str, R], R] | None = None,
) -> dict[str, Any]:
    """Check a dataset and write it, whole or not at all, to `out_dir`. Samples are held in memory without pictures.

    summary: figures of a split for stats.json, from its name and its records, at least one.
    form: what a source of this task is, and subject: what may not be in two splits, both for messages.
    skip_invalid: leave out invalid samples, and with `skip_leaks` training samples whose subject is validated on,
        counted and listed in stats.json, instead of refusing them.
    held_out: share of the subjects that is the validation split where the source has none: always the same ones.
    selection: about this share of the training subjects is the selection split instead: always the same ones.
    limit: at most so many valid records of a split, chosen by a digest of their content, in their order.
    adapt: changes a record of a split, given its name, before it is written.
    Returns what stats.json holds: the origin, and by split `records`, its summary, `digest` of its content,
    `invalid_rows` and `invalid`, with `skip_leaks` also `leaked_rows` and `leaked`, and where it has a limit
    `beyond_limit`, the number of records left out for it.
    Raises UserError where samples are invalid, a split is empty, or a subject is in both splits.
    """
    name = source.origin["source"]
    splits: dict[str, _Split[R]] = {"train": _Split(), "val": _Split()}
    if selection or "selection" in source.splits:
        splits["selection"] = _Split()
    read = {split: splits[split].valid(samples) for split, samples in source.splits.items()}
    with published(out_dir) as folder:
        if "val" not in read:
            valid = list(read["train"])
            _refuse_invalid(name, {"train": splits["train"]}, form, skip_invalid)
            read = _hold_out(name, valid, held_out, subject)
        validated: dict[str, Place] = {}
        aside: list[R] = []
        checked = {  # in this order
            "val": _noted(read["val"], validated),
            "train": _set_aside(splits["train"].without_leaks(read["train"], validated), selection, aside),
        }
        if "selection" in read:
            checked["selection"] = splits["selection"].without_leaks(read["selection"], validated)
        elif selection:
            checked["selection"] = iter(aside)
        for split, records in checked.items():
            records = splits[split].limited(records, getattr(limit, split, None))
            records = map(partial(adapt, split), records) if adapt else records
            write_rows(splits[split].rows(records, schema), folder / f"{split}.parquet", schema)
        _refuse_invalid(name, splits, form, skip_invalid)
        leaked = [leak for split in splits.values() for leak in split.leaked]
        _refuse_leaks(name, leaked, subject, skip_invalid=skip_invalid, skip_leaks=skip_leaks)
        _refuse_empty(name, splits)
        stats = {
            **source.origin,
            "splits": {
                split: {
                    "records": len(found.records),
                    **summary(split, found.records),
                    "digest": f"sha256:{found.digest.hexdigest()}",
                    **found.faults(with_leaks=skip_leaks),
                }
                for split, found in splits.items()
            },
        }
        text = json.dumps(stats, indent=2, ensure_ascii=False)
        (folder / STATS_FILE).write_text(text + "\n", encoding="utf-8")
    if validation := source.origin.get("validation"):
        log.info("validation split: %s", validation)
    if unused := source.origin.get("unused_files"):
        log.warning("not read: %s", ", ".join(unused))
    if leaked := splits["train"].leaked:
        log.warning("%s left out: in the validation split too", counted(len(leaked), "training sample"))
    return stats


def _noted(samples: Iterable[tuple[Place, R]], validated: dict[str, Place]) -> Iterator[R]:
    for place, record in samples:
        validated.setdefault(record.subject(), place)
        yield record


def _set_aside(records: Iterable[R], share: float, aside: list[R]) -> Iterator[R]:
    """The records without those of a share of the subjects, which go into `aside`."""
    for record in records:
        digest = hashlib.sha256(f"selection {record.subject()}".encode()).digest()
        if int.from_bytes(digest[:4], "big") < share * 2**32:
            aside.append(record)
        else:
            yield record


def _hold_out(
    name: str, valid: Sequence[tuple[Place, R]], share: float, subject: str
) -> dict[str, Iterator[tuple[Place, R]]]:
    """The records in two. What has one subject is on one side; the order within a side stays."""
    subjects = sorted({record.subject() for _, record in valid})  # digests, so in an order of chance
    if len(subjects) < 2:
        raise UserError(
            f"{name} has only {counted(len(subjects), subject)} to train on, and no validation files; expected at "
            "least 2, to hold one out"
        )
    held = set(subjects[: max(1, round(len(subjects) * share))])
    return {
        "train": (sample for sample in valid if sample[1].subject() not in held),
        "val": (sample for sample in valid if sample[1].subject() in held),
    }


def _refuse_invalid(name: str, splits: Mapping[str, _Split[R]], form: str, skip_invalid: bool) -> None:
    invalid = [f"{place}: {problem}" for split in splits.values() for place, problem in split.invalid]
    if not invalid or skip_invalid:
        return
    found = counted(sum(split.invalid_rows for split in splits.values()), "invalid sample")
    if empty := " and ".join(name for name, split in splits.items() if not split.num_valid):
        advice = f"Nothing of {empty} is valid, so data.skip_invalid is no help. Expected: {form}; {READ_ON}"
    else:
        advice = "Correct them, or leave them out with data.skip_invalid: true in params.yaml"
    raise UserError(f"{name} has {found} (rows count from 0, lines from 1):\n{listed(invalid)}\n{advice}")


def _refuse_leaks(
    name: str, leaked: Sequence[tuple[Place, Place, str]], subject: str, *, skip_invalid: bool, skip_leaks: bool
) -> None:
    if not leaked or (skip_invalid and skip_leaks):
        return
    pairs = [f"{place} and {seen}: {label}" for place, seen, label in leaked]
    from_copy = " (from a copy on disk, with source: folder:PATH)" if name.startswith("hub:") else ""
    leaving_out = ", or leave the training ones out with data.skip_invalid: true in params.yaml" if skip_leaks else ""
    raise UserError(
        f"{name} has {counted(len(leaked), 'training sample')} whose {subject} is in the validation split too, which "
        f"makes scores worthless:\n{listed(pairs)}\n"
        f"Remove each from one of them{from_copy}{leaving_out}"
    )


def _refuse_empty(name: str, splits: Mapping[str, _Split[R]]) -> None:
    for split, found in splits.items():
        if not found.records:
            left_out = found.invalid_rows + len(found.leaked)
            why = f"; {counted(left_out, 'sample')} left out" if left_out else ""
            raise UserError(f"{name} has no valid sample in the split {split}{why}; expected at least one")
