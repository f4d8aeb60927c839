"""From samples as a task reads them to the splits of a prepared dataset (stages/data/splits.py reads these).

The folder appears only once every check has passed: each sample well-formed, no split empty, and no subject in two.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import pyarrow as pa

from stages.core.atomic import atomic_folder
from stages.core.errors import UserError, join_truncated, listed, pluralize
from stages.core.params.schema import DataParams, DatasetParams, LimitParams
from stages.core.tasks import reader_of
from stages.data.groups import Record, connected, groups_of
from stages.data.near import Description, near_duplicates
from stages.data.parquet import write_rows
from stages.data.sources import READ_ON, Place, WrongSplit, files_by_split
from stages.data.splits import STATS_FILE, to_rows
from stages.data.texts import UnreadableText

SPLITS = ("train", "val", "test", "selection")
MAX_ALIKE = 3
"""Problems of one kind and file that have a line each; more of them have one line."""
MAX_UNUSED = 20
"""Unused files named in stats.json and in the log; the rest are counted."""

log = logging.getLogger("stages")


R = TypeVar("R", bound=Record)
Sample = tuple[Place, R | list[str]]
"""The place of a sample, and its record, or every problem that keeps the sample or a whole file from being one."""


@dataclass(frozen=True, kw_only=True)
class Rules(Generic[R]):
    """Properties of a task's datasets."""

    schema: pa.Schema
    """Columns of the prepared splits: attributes of the records."""
    summary: Callable[[str, Sequence[R]], Mapping[str, Any]]
    """Figures for stats.json from a split's name and its records, at least one."""
    expected: str
    """The files that the task reads, for messages."""
    subject: str
    """A word for what may not be in two splits."""
    describe: Callable[[R], Description]
    """The description of a record that finds near-duplicates (`near`)."""
    held_out: float
    """Share of the subjects that becomes the validation split of a dataset that has none: always the same ones."""
    separate_groups: bool = False
    """Whether a group may not be in two splits that the dataset itself has, or is only counted there."""
    adapt: Callable[[str, R], R] = lambda _, record: record
    """Changes a record of the split of that name before it is written."""


@dataclass(kw_only=True)
class RawDataset(Generic[R]):
    """A dataset as a task reads it."""

    rules: Rules[R]
    source: str
    """With the full commit of a hub dataset."""
    splits: Mapping[str, Iterable[Sample[R]]]
    """`train`, and `val` and `test` if the dataset has them; read while they are iterated over. `selection` only if the
    samples were set aside already."""
    validation: str | None = None
    """A description of the validation split; None if files named after splits say enough, or there is none yet."""
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The files of each split, by name; the others' are the training split's."""
    unused_files: Callable[[], Sequence[str]] = tuple
    """Names of files that no split took, called once all are read."""
    unread_fields: Counter[str] = field(default_factory=Counter)
    """Counts of fields that are not read, as they only describe. Counted while the splits are read."""
    strict: bool = False
    """Whether such fields are refused."""
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The datasets that a mix consists of, by name: `source`, `asked` (training samples to take at most; None: all),
    `available` and `taken`."""
    repeat: Mapping[str, int] = field(default_factory=dict)
    """Copies of a sample in the training split that is written, by pattern of its file; of others one."""

    def records(self) -> Iterator[R]:
        for samples in self.splits.values():
            yield from (record for _, record in samples if not isinstance(record, list))

    def mapped(self, change: Callable[[R], R | list[str]]) -> RawDataset[R]:
        """The dataset with every record changed, or its problems in its place. It is read for it."""

        def changed(samples: Iterable[Sample[R]]) -> list[Sample[R]]:
            return [(place, each if isinstance(each, list) else change(each)) for place, each in samples]

        return replace(self, splits={split: changed(samples) for split, samples in self.splits.items()})


def read_text_files(
    dataset: DatasetParams,
    folder: Path,
    files: Sequence[Path],
    read: Callable[[Path, str, str, Counter[str]], Iterable[Sample[R]]],
    rules: Rules[R],
    *,
    named_train: bool = True,
    others: Iterable[Path] | None = None,
) -> RawDataset[R]:
    """The files of each split.

    files, named_train: as of `files_by_split`. others: further files that are named as unused; None for all those
        directly in the folder with a suffix, except .md and .dvc.
    read: gives the samples of a file, called by its path below the folder, of this split, and counts the fields that it
    does not read. It may raise UnreadableText before the first sample.
    """
    unread = Counter[str]()
    chosen = files_by_split(folder, files, dataset.splits, expected=rules.expected, named_train=named_train)

    def name_of(path: Path) -> str:
        return path.relative_to(folder).as_posix()

    def samples(split: str, paths: Iterable[Path]) -> Iterator[Sample[R]]:
        for path in paths:
            try:
                yield from read(path, name_of(path), split, unread)
            except UnreadableText as error:
                yield Place(name_of(path)), [str(error)]

    if others is None:
        beside = (path for path in sorted(folder.glob("[!.]*.*")) if path.suffix not in (".md", ".dvc"))
        others = [path for path in beside if path.is_file()]
    names = {split: [*map(name_of, paths)] for split, paths in chosen.items()}
    return RawDataset(
        rules=rules,
        source=dataset.source,
        splits={split: [*samples(split, paths)] for split, paths in chosen.items()},
        validation=", ".join(names["val"]) if "val" in names else None,
        files=names,
        unused_files=lambda: [*map(name_of, {*files, *others}.difference(*chosen.values()))],
        unread_fields=unread,
    )


def prepare(
    sources: ModuleType, dataset: DatasetParams, data: DataParams, out_dir: Path, *, path: str, trained: bool = True
) -> dict[str, Any]:
    """Read and check a dataset and write it, whole or not at all, to `out_dir`. Returns the content of stats.json.

    sources: the task's module of that name. path: the dataset's own in params.yaml, for messages. trained: whether it
    has samples to train on; else all are of the validation split.
    """
    reader = reader_of(sources, dataset, path)
    try:
        if dataset.mix:
            raw = sources.mix(dataset.mix, out_dir.parent, with_selection=data.selection > 0)
        else:
            raw = sources.read(dataset, reader)
        if not trained:
            raw, data = replace(raw, splits={"val": raw.splits["train"]}), replace(data, selection=0.0)
        raw = replace(raw, repeat=dataset.repeat, strict=reader.strict)
        return write_prepared(raw, out_dir, data, dataset.limit)
    except WrongSplit as error:
        raise UserError(f"params.yaml: {path}.{error.message}") from None
    except UserError as error:
        raise error if trained else UserError(f"params.yaml: {path}.source: {error.message}") from None


def write_prepared(
    dataset: RawDataset[R], out_dir: Path, data: DataParams, limit: LimitParams | None = None
) -> dict[str, Any]:
    """Check a dataset and write it, whole or not at all, to `out_dir`. Samples are held in memory without images.

    Returns the content of stats.json. Raises UserError if a split is empty, if samples that `data` does not skip are
    invalid, have a subject of another split or, where `data` refuses them, resemble one of another split, or if there
    are fields that a strict reader does not read; and WrongSplit.
    """
    preparation = _Preparation(dataset, data)
    with atomic_folder(out_dir) as folder:
        for split, records in preparation.records():
            taken = preparation.splits[split].taken(records, getattr(limit, split, None), split, dataset.rules)
            rows = to_rows(taken, dataset.rules.schema)
            write_rows(rows, folder / f"{split}.parquet", dataset.rules.schema)
        preparation.check()
        stats = preparation.stats()
        text = json.dumps(stats, indent=2, ensure_ascii=False)
        (folder / STATS_FILE).write_text(text + "\n", encoding="utf-8")
    for pattern, times in dataset.repeat.items():
        log.info("%s of %s, %d times each", pluralize(preparation.matched[pattern], "sample"), pattern, times)
    if stats["validation"]:
        log.info("validation split: %s", stats["validation"])
    if fields := dataset.unread_fields:
        log.info("fields that are not read, and how often they are there: %s", counted(fields))
    if unused := stats["unused_files"]:
        log.warning("not read: %s", ", ".join(unused))
    if near := stats.get("near_duplicates"):
        samples, words = pluralize(len(near), "sample"), join_truncated(near, 1)
        log.warning("%s may make scores too good, near-duplicates of another split: %s", samples, words)
    for name, read in preparation.splits.items():
        for other, count in read.in_groups.items():
            samples = pluralize(count, "sample")
            log.warning("%s of %s may make scores too good: their groups are in %s too", samples, name, other)
        if read.leaked:
            others = " and ".join(sorted({other for _, other, _, _ in read.leaked}))
            log.warning("%s of %s left out: in %s too", pluralize(len(read.leaked), "sample"), name, others)
    return stats


@dataclass
class _Split(Generic[R]):
    """A split as far as it was read."""

    records: list[R] = field(default_factory=list)
    """The records that were written, without images."""
    num_valid: int = 0
    """Valid samples, before any is left out for another reason."""
    invalid: list[tuple[Place, list[str]]] = field(default_factory=list)
    """The place and the problems of each invalid sample."""
    leaked: list[tuple[Place, str, Place, str]] = field(default_factory=list)
    """Samples with a subject of another split: their place, that split, its place there, and a name."""
    in_groups: Counter[str] = field(default_factory=Counter)
    """Counts of other samples with a group of another split, by that split."""
    times: list[int] = field(default_factory=list)
    """Copies of each sample to write; empty for one of each."""
    contents: Counter[bytes] = field(default_factory=Counter)
    """Digests of the contents of samples, before copies are made of them."""
    digest: Any = field(default_factory=hashlib.sha256)

    def valid(self, samples: Iterable[Sample[R]]) -> Iterator[tuple[Place, R]]:
        for place, record in samples:
            if isinstance(record, list):
                self.invalid.append((place, record))
            else:
                self.num_valid += 1
                yield place, record

    def taken(self, records: Iterable[R], limit: int | None, name: str, rules: Rules[R]) -> Iterator[R]:
        for number, record in self._limited(enumerate(records), limit):
            adapted = rules.adapt(name, record)
            kept: Any = adapted
            content = json.dumps(adapted.content()).encode()
            self.contents[hashlib.sha256(content).digest()] += 1
            for _ in range(self.times[number] if self.times else 1):
                self.digest.update(content)
                self.records.append(replace(kept, image=b"") if hasattr(kept, "image") else kept)
                yield adapted

    def _limited(self, numbered: Iterable[tuple[int, R]], limit: int | None) -> Iterable[tuple[int, R]]:
        """At most this many of the numbered records, chosen by a digest of their content, in their order."""
        if limit is None:
            return numbered

        def digest(each: tuple[int, R]) -> bytes:
            return hashlib.sha256(json.dumps(each[1].content()).encode()).digest()

        return sorted(heapq.nsmallest(limit, numbered, key=digest))


class _Preparation(Generic[R]):
    """The samples of a dataset on their way to its splits."""

    def __init__(self, dataset: RawDataset[R], data: DataParams) -> None:
        self.dataset, self.rules, self.data = dataset, dataset.rules, data
        self.matched = Counter[str]()
        """Training samples by the pattern of `repeat` that their file matches."""
        names = {"val", *dataset.splits, *(["selection"] if data.selection else [])}
        self.splits: dict[str, _Split[R]] = {name: _Split() for name in SPLITS if name in names}
        self.described: dict[str, list[tuple[Place, Description]]] = {}
        """The place and description of each sample of a split, in the order in which splits are read."""
        self.near: list[str] = []
        """A line for each sample that resembles one of another split, once all are read."""

    def records(self) -> Iterator[tuple[str, Iterator[R]]]:
        """Each split with its records, to be consumed in this order: of a subject in two splits, the first keeps it."""
        samples = {split: self.splits[split].valid(given) for split, given in self.dataset.splits.items()}
        if "val" not in samples:
            samples |= self._hold_out(list(samples["train"]))
        seen: dict[str, tuple[str, Place]] = {}
        self.described = {split: [] for split in ("test", "val", "selection", "train")}
        aside: list[R] = []
        share = 0.0 if "selection" in samples else self.data.selection

        def without_leaks(split: str) -> Iterator[R]:
            for place, record in samples[split]:
                here = split, place
                subject_at = seen.setdefault(record.subject(), here)
                group_at = seen.setdefault(f"group {record.group}", here) if record.group else here
                refused = [subject_at, *([group_at] if self.rules.separate_groups else [])]
                if leak := next((each for each in refused if each[0] != split), None):
                    self.splits[split].leaked.append((place, *leak, str(record.content()[0])))
                    continue
                if group_at[0] != split:
                    self.splits[split].in_groups[group_at[0]] += 1
                digest = hashlib.sha256(f"selection {record.group or record.subject()}".encode()).digest()
                set_aside = split == "train" and int.from_bytes(digest[:4], "big") < share * 2**32
                self.described["selection" if set_aside else split].append((place, self.rules.describe(record)))
                if set_aside:
                    aside.append(record)
                else:
                    self.splits[split].times += [self._times(place)] if split == "train" else []
                    yield record

        yield from ((split, without_leaks(split)) for split in self.described if split in samples)
        if "selection" not in samples and "selection" in self.splits:
            yield "selection", iter(aside)

    def _times(self, place: Place) -> int:
        """Copies of the sample of that place in the training split."""
        pattern = next((each for each in self.dataset.repeat if fnmatchcase(place.file, each)), "")
        self.matched[pattern] += 1
        return self.dataset.repeat.get(pattern, 1)

    def _hold_out(self, valid: Sequence[tuple[Place, R]]) -> dict[str, Iterator[tuple[Place, R]]]:
        """The training samples in two. All samples of a subject or a group are on one side; the order within a side
        stays."""
        self._refuse_invalid()
        # Joined subjects go by the smallest of them: all are digests, so their order is random.
        joined = connected((record.subject(), record.group) for _, record in valid)
        subjects = sorted(set(joined))
        if len(subjects) < 2:
            found = pluralize(len(subjects), self.rules.subject)
            raise UserError(
                f"{self.dataset.source} has only {found} to train on, and no validation files; expected at least 2, to "
                "hold one out"
            )
        held = set(subjects[: max(1, round(len(subjects) * self.rules.held_out))])
        return {
            "train": (sample for sample, subject in zip(valid, joined, strict=True) if subject not in held),
            "val": (sample for sample, subject in zip(valid, joined, strict=True) if subject in held),
        }

    def check(self) -> None:
        """Raises UserError if samples are invalid or leaked and not to be skipped, or a split is empty."""
        self._refuse_invalid()
        if self.dataset.strict and self.dataset.unread_fields:
            fields = counted(self.dataset.unread_fields)
            raise UserError(
                f"{self.dataset.source} has fields that are not read: {fields}. Its reader is strict: remove them, or "
                "set strict: false in params.yaml"
            )
        for pattern in self.dataset.repeat.keys() - self.matched.keys():
            raise WrongSplit(f"repeat: {pattern!r} matches no file of a training sample")
        leaked = [
            f"{name} and {other}: {place} and {there}: {subject}"
            for name, split in self.splits.items()
            for place, other, there, subject in split.leaked
        ]
        if leaked and not self.data.skip_invalid:
            raise UserError(
                f"{self.dataset.source} has {pluralize(len(leaked), 'sample')} with the same {self.rules.subject} in "
                f"another split, which makes scores worthless:\n{listed(leaked)}\n"
                "Remove each from one of them, or set data.skip_invalid: true in params.yaml, which keeps it in test "
                "rather than val, and in val rather than train"
            )
        near = near_duplicates(self.described)
        self.near = [f"{split} {place} resembles {other} {there}" for split, place, other, there in near]
        if self.near and self.data.near_duplicates == "refuse":
            raise UserError(
                f"{self.dataset.source} has {pluralize(len(self.near), 'near-duplicate')} in two splits:\n"
                f"{listed(self.near)}\n"
                "Remove each from one of them, or set data.near_duplicates: count in params.yaml"
            )
        for name, split in self.splits.items():
            if not split.records:
                left_out = len(split.invalid), len(split.leaked)
                why = "; left out: {} invalid, {} in another split too".format(*left_out) if any(left_out) else ""
                raise UserError(
                    f"{self.dataset.source} has no valid sample in the split {name}{why}; expected at least one"
                )

    def _refuse_invalid(self) -> None:
        """Raises UserError if the splits that were read so far have invalid samples that are not to be skipped."""
        invalid = [each for split in self.splits.values() for each in split.invalid]
        empty = " and ".join(name for name, split in self.splits.items() if split.invalid and not split.num_valid)
        if not invalid or (self.data.skip_invalid and not empty):
            return
        found = pluralize(len(invalid), "invalid sample")
        lines = folded((place, problem) for place, some in invalid for problem in some)
        if empty:
            expected = f"Expected: {self.rules.expected}; {READ_ON}"
            advice = f"Nothing of {empty} is valid, so data.skip_invalid is no help. {expected}"
        else:
            advice = "Correct them, or leave them out with data.skip_invalid: true in params.yaml"
        raise UserError(
            f"{self.dataset.source} has {found} (rows count from 0, lines from 1):\n{listed(lines)}\n{advice}"
        )

    def stats(self) -> dict[str, Any]:
        """The content of stats.json."""
        unused = sorted(self.dataset.unused_files())
        share, subject = self.rules.held_out, self.rules.subject
        held_out = f"{share:.0%} of what the training files hold, by a digest of each {subject}"
        more = [f"{len(unused) - MAX_UNUSED:,} more"] if len(unused) > MAX_UNUSED else []
        return {
            "source": self.dataset.source,
            "validation": self.dataset.validation if "val" in self.dataset.splits else held_out,
            "unused_files": unused[:MAX_UNUSED] + more,
            **({"parts": self.dataset.parts} if self.dataset.parts else {}),
            **({"repeat": self.dataset.repeat} if self.dataset.repeat else {}),
            **({"unread_fields": dict(fields)} if (fields := sorted(self.dataset.unread_fields.items())) else {}),
            **({"near_duplicates": self.near} if self.near else {}),
            "splits": {name: self._split_stats(name, split) for name, split in self.splits.items()},
        }

    def _split_stats(self, name: str, split: _Split[R]) -> dict[str, Any]:
        files = self.dataset.files.get(name, self.dataset.files.get("train"))
        if repeated := split.contents.total() - len(split.contents):
            log.warning("%s of %s kept, though the same as another", pluralize(repeated, "sample"), name)
        return {
            "records": len(split.records),
            **({"files": list(files)} if files is not None else {}),
            **({"groups": int(groups.max()) + 1} if (groups := groups_of(split.records)) is not None else {}),
            **({"repeated_samples": repeated} if repeated else {}),
            **({"in_groups_of": dict(split.in_groups)} if split.in_groups else {}),
            **self.rules.summary(name, split.records),
            "digest": f"sha256:{split.digest.hexdigest()}",
            "invalid_rows": len(split.invalid),
            "invalid": [
                {"file": at.file, at.unit: at.number, "problem": problem}
                for at, some in split.invalid
                for problem in some
            ],
            "leaked_rows": len(split.leaked),
            "leaked": [{name: str(place), other: str(there)} for place, other, there, _ in split.leaked],
        }


def folded(problems: Iterable[tuple[Place, str]]) -> list[str]:
    """A line for each problem; one for all of a file, or of whole files, that differ only in numbers and quoted texts,
    if they are many."""
    alike: dict[tuple[str, str], list[tuple[Place, str]]] = defaultdict(list)
    for place, problem in problems:
        file = "" if place.number is None else place.file
        alike[file, re.sub(r"'[^']*'|[0-9.]+", "#", problem)].append((place, problem))
    lines = []
    for (file, _), some in alike.items():
        shown = [f"{place}: {problem}" for place, problem in some]
        if len(some) > MAX_ALIKE:
            where = " in the file" if file else ""
            named = dict.fromkeys(str(place.number) if file else place.file for place, _ in some[1:])
            others = join_truncated(list(named), MAX_ALIKE)
            shown = [f"{shown[0]} (and {len(some) - 1:,} more of this kind{where}: {others})"]
        lines += shown
    return lines


def counted(fields: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count:,})" for name, count in sorted(fields.items()))
