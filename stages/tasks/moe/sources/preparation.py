"""A domain's files as prepared splits, or prepared domains as a mix."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.core.errors import UserError, counted
from stages.core.given_files import given_files
from stages.core.params.schema import LimitParams
from stages.kit.data.preparation import Source, read_text_files, write_prepared
from stages.kit.data.prepared import read_origin
from stages.kit.data.sources import READ_ON, VALIDATION, Place, files_by_split, holds, source_folder
from stages.tasks.moe.samples.records import DOMAINS, SCHEMA, Record, read_split
from stages.tasks.moe.sources.corpora import SUFFIXES, domain_of, read_corpus, unknown_form

FORM = (
    "TruthfulQA, a CSV with the columns Question, Best Answer, Correct Answers and Incorrect Answers, or QMSum, JSONL "
    "files of its authors or of LongBench"
)
HELD_OUT = 0.2
"""Share of the questions, or of the meetings, that is the validation split where no files make one."""

log = logging.getLogger("stages")


def prepare(
    source: str,
    *,
    out_dir: Path,
    skip_invalid: bool = False,
    selection: float = 0.0,
    limit: LimitParams | None = None,
    mix: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """Validate a dataset of one domain, or mix some, and write it, whole or not at all, to `out_dir`.

    source: `folder:PATH` with TruthfulQA's CSV or QMSum's JSONL files, or `mix`, of datasets prepared beside `out_dir`.
        Files train* and val*, dev* or test* are the two splits. Without train files HELD_OUT of all questions are held
        out, of QMSum whole meetings with all that is asked about them.
    skip_invalid: leave out malformed rows, and training samples about what is validated on.
    selection: share of what is asked about to set aside of the training samples; a mix takes all that its parts have
        set aside.
    limit: at most so many samples of a split; which ones, their content alone decides.
    mix: datasets, and how many training samples of each to take at most, all where None; of the validation samples it
        takes all. Ordered by a digest of the text, so that the domains are mixed evenly.
    Returns what stats.json holds: `source`, `revision`, `validation` (where that split comes from), `unused_files`,
    `parts` (of a mix, by dataset: its `source`, and of its training samples how many were `asked` for, null for all,
    `available` and `taken`), and by split, beside what write_prepared says, `domains` (records of each), `files`,
    `repeated_questions`, `longest_question`, `longest_context`, `longest_answer` in
    characters.
    Raises UserError also where the folder holds no known file or those of two domains.
    """
    found = _mixed(mix or {}, out_dir.parent, with_selection=selection > 0) if source == "mix" else _from_folder(source)
    parts: dict[str, dict[str, Any]] = found.origin.setdefault("parts", {})

    def summary(split: str, records: Sequence[Record]) -> dict[str, Any]:
        return {
            "domains": dict(Counter(record.domain for record in records)),
            "files": found.files_of(split),
            "repeated_questions": len(records) - len({record.key() for record in records}),
            "longest_question": max(len(record.question) for record in records),
            "longest_context": max(len(record.context or "") for record in records),
            "longest_answer": max(len(record.best) for record in records),
        }

    stats = write_prepared(
        found,
        out_dir,
        schema=SCHEMA,
        summary=summary,
        form=FORM,
        subject="question or transcript",
        skip_invalid=skip_invalid,
        held_out=HELD_OUT,
        selection=0 if source == "mix" else selection,
        limit=limit,
    )
    for name, part in parts.items():
        log.info("%s: %d of %s taken", name, part["taken"], counted(part["available"], "training sample"))
        if part["asked"] is not None and part["asked"] > part["available"]:
            log.warning("%s: %s asked for, there are %d", name, part["asked"], part["available"])
    return stats


def _mixed(mix: Mapping[str, int | None], prepared_dir: Path, *, with_selection: bool) -> Source[Record]:
    """The datasets' names stand before ids and files, so that both stay unique."""
    records: dict[str, list[Record]] = {split: [] for split in ("train", "val", *(["selection"] * with_selection))}
    parts = {}
    for name, count in mix.items():
        available = {split: read_split(prepared_dir / name, split) for split in records}
        taken = _limited(available["train"], count)
        parts[name] = {
            "source": read_origin(prepared_dir / name).source,
            "asked": count,
            "available": len(available["train"]),
            "taken": len(taken),
        }
        for split, chosen in (available | {"train": taken}).items():
            records[split] += [
                replace(record, id=f"{name}/{record.id}", file=f"{name}/{record.file}") for record in chosen
            ]
    for mixed in records.values():
        mixed.sort(key=_order)
    return Source(
        origin={"source": "mix", "revision": None, "validation": "mixed", "unused_files": [], "parts": parts},
        splits={
            split: [(Place(record.file, record.line), record) for record in mixed] for split, mixed in records.items()
        },
        files={split: [f"{name}/{split}.parquet" for name in mix] for split in records},
    )


def _from_folder(source: str) -> Source[Record]:
    folder = source_folder(source, known="folder:PATH or mix")
    files = sorted(given_files(folder, *(f"*{suffix}" for suffix in SUFFIXES)))
    of_domain = _files_of_one_domain(folder, files)
    chosen = files_by_split(of_domain)
    held_out = f"{HELD_OUT:.0%} of what train files ask about, by a digest of each"
    if not chosen["train"]:
        chosen = {"train": of_domain}
        held_out = f"{HELD_OUT:.0%} of what is asked about, by a digest of each"
    return read_text_files(source, files, chosen, read_corpus, held_out=held_out)


def _files_of_one_domain(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Raises UserError where no file is known, or files are of several domains."""
    domains = {path: domain_of(path) for path in files}
    for path in files:
        if domains[path] is None and path.name.startswith(("train", *VALIDATION)):
            raise UserError(f"{path} is named as a split is, but {unknown_form(path)}; fix it, or take it away")
    found = {domain: [path for path in files if domains[path] == domain] for domain in DOMAINS}
    known = [paths for paths in found.values() if paths]
    if not known:
        raise UserError(f"{folder} has no file of a known form: {holds(folder)}. Expected: {FORM}; {READ_ON}")
    if len(known) > 1:
        names = "; ".join(f"{domain}: {', '.join(path.name for path in paths)}" for domain, paths in found.items())
        raise UserError(f"{folder} holds two domains, but a dataset is of one; make a folder of each ({names})")
    return known[0]


def _limited(records: Sequence[Record], count: int | None) -> list[Record]:
    """At most so many records, chosen by a digest of what they ask, in their order."""
    kept = {record.id for record in sorted(records, key=_order)[:count]}
    return [record for record in records if record.id in kept]


def _order(record: Record) -> tuple[str, str]:
    return record.key(), record.id
