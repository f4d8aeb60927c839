"""A domain's files as prepared splits, or prepared domains as a mix."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.core.errors import UserError, pluralize
from stages.core.given_files import given_files
from stages.kit.data.prepared import RawDataset, Rules, read_origin, read_text_files
from stages.kit.data.sources import READ_ON, VALIDATION, Place, describe_folder, files_by_split, source_folder
from stages.tasks import NoSettings
from stages.tasks.moe.samples.records import DOMAINS, SCHEMA, Record, read_split
from stages.tasks.moe.sources.corpora import SUFFIXES, domain_of, read_corpus, unknown_form

FORM = (
    "TruthfulQA, a CSV with the columns Question, Best Answer, Correct Answers and Incorrect Answers, or QMSum, JSONL "
    "files of its authors or of LongBench"
)
log = logging.getLogger("stages")


def _summary(_: str, records: Sequence[Record]) -> dict[str, Any]:
    return {
        "domains": dict(Counter(record.domain for record in records)),
        "repeated_questions": len(records) - len({record.key() for record in records}),
        "longest_question": max(len(record.question) for record in records),
        "longest_context": max(len(record.context or "") for record in records),
        "longest_answer": max(len(record.best) for record in records),
    }


RULES = Rules(schema=SCHEMA, summary=_summary, expected=FORM, subject="question or transcript", held_out=0.2)


def mix(parts: Mapping[str, int | None], prepared_dir: Path, *, with_selection: bool) -> RawDataset[Record]:
    """Prepared datasets as one, in the order of a digest of the text, so that the domains are mixed evenly.

    parts: by dataset, the number of training samples to take at most, None for all. All validation samples are taken,
    and with_selection all that the datasets have set aside. Ids and files begin with the dataset's name.
    """
    records: dict[str, list[Record]] = {split: [] for split in ("train", "val", *(["selection"] * with_selection))}
    found = {}
    for name, count in parts.items():
        available = {split: read_split(prepared_dir / name, split) for split in records}
        taken = _limited(available["train"], count)
        found[name] = {
            "source": read_origin(prepared_dir / name).source,
            "asked": count,
            "available": len(available["train"]),
            "taken": len(taken),
        }
        log.info("%s: %d of %s taken", name, len(taken), pluralize(len(available["train"]), "training sample"))
        if count is not None and count > len(available["train"]):
            log.warning("%s: %s asked for, there are %d", name, count, len(available["train"]))
        for split, chosen in (available | {"train": taken}).items():
            records[split] += [
                replace(record, id=f"{name}/{record.id}", file=f"{name}/{record.file}") for record in chosen
            ]
    for mixed in records.values():
        mixed.sort(key=_order)
    return RawDataset(
        rules=RULES,
        source="mix",
        splits={
            split: [(Place(record.file, record.line), record) for record in mixed] for split, mixed in records.items()
        },
        validation="mixed",
        files={split: [f"{name}/{split}.parquet" for name in parts] for split in records},
        parts=found,
    )


def read(source: str, _: NoSettings) -> RawDataset[Record]:
    """The files of one domain in `folder:PATH`: TruthfulQA's CSV or QMSum's JSONL.

    Files train* and val*, dev* or test* are the two splits. Without train files a share of all questions is held out,
    of QMSum whole meetings with all questions about them. Raises UserError if the folder holds no known file or those
    of two domains.
    """
    folder = source_folder(source, known="folder:PATH or mix")
    files = sorted(given_files(folder, *(f"*{suffix}" for suffix in SUFFIXES)))
    of_domain = _files_of_one_domain(folder, files)
    chosen = files_by_split(of_domain)
    held_out = f"{RULES.held_out:.0%} of what train files ask about, by a digest of each"
    if not chosen["train"]:
        chosen = {"train": of_domain}
        held_out = f"{RULES.held_out:.0%} of what is asked about, by a digest of each"
    return read_text_files(source, files, chosen, read_corpus, RULES, held_out=held_out)


def _files_of_one_domain(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Raises UserError where no file is known, or files are of several domains."""
    domains = {path: domain_of(path) for path in files}
    for path in files:
        if domains[path] is None and path.name.startswith(("train", *VALIDATION)):
            raise UserError(f"{path} is named as a split is, but {unknown_form(path)}; fix it, or take it away")
    found = {domain: [path for path in files if domains[path] == domain] for domain in DOMAINS}
    known = [paths for paths in found.values() if paths]
    if not known:
        raise UserError(f"{folder} has no file of a known form: {describe_folder(folder)}. Expected: {FORM}; {READ_ON}")
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
