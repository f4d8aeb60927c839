"""From a domain's files to the prepared splits that training and evaluation read, or from prepared domains to a mix.

Writes train.parquet, val.parquet (records.SCHEMA) and stats.json. Nothing appears under those names unless every
check has passed: each row well-formed, no split empty, and no question or transcript in both splits.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.core.errors import UserError, counted, listed
from stages.core.given_files import given_files
from stages.core.params.schema import GenerateParams, LimitParams
from stages.core.publish import published
from stages.kit.data.origin import read_origin
from stages.kit.data.parquet import write_rows
from stages.kit.data.sources import READ_ON, about_invalid, holds
from stages.kit.data.splits import leaks
from stages.tasks.moe.samples.records import DOMAINS, SCHEMA, Record, read_split, to_row
from stages.tasks.moe.sources.corpora import SUFFIXES, Corpus, Place, domain_of, read_corpus, unknown_form

FORM = (
    "TruthfulQA, a CSV with the columns Question, Best Answer, Correct Answers and Incorrect Answers, or QMSum, JSONL "
    "files of its authors or of LongBench"
)
VALIDATION_FILES = ("val", "dev", "test")
"""Beginnings of file names; the first that any file has gives the validation split, where there are train files too."""
HELD_OUT = 0.2
"""Share of the questions, or of the meetings, that is the validation split where no files make one."""

Splits = dict[str, Corpus]

log = logging.getLogger("stages")


def prepare(
    source: str,
    *,
    out_dir: Path,
    skip_invalid: bool = False,
    generate: GenerateParams | None = None,
    limit: LimitParams | None = None,
    mix: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """Validate a dataset of one domain, or mix some, and write it, whole or not at all, to `out_dir`.

    source: `folder:PATH` with TruthfulQA's CSV or QMSum's JSONL files; `generated:DOMAIN` (sizes and seed in
        `generate`); or `mix`, of datasets prepared beside `out_dir`. Files train* and VALIDATION_FILES are the two
        splits. Without train files HELD_OUT of all questions are held out, of QMSum whole meetings with all that is
        asked about them: always the same ones, by a digest of the text.
    skip_invalid: leave out malformed rows, and training samples about what is validated on, counted and listed in
        stats.json, instead of refusing them.
    limit: at most so many samples of a split; which ones, their content alone decides.
    mix: datasets, and how many training samples of each to take at most, all where None; of the validation samples it
        takes all. Ordered by a digest of the text, so that the domains are mixed evenly.
    Returns what stats.json holds: `source`, `revision`, `validation` (where that split comes from), `unused_files`,
    `parts` (of a mix, by dataset: its `source`, and of its training samples how many were `asked` for, null for all,
    `available` and `taken`), and by split `records`, `domains` (records of each), `files`, `repeated_questions`,
    `beyond_limit` (samples not taken), `longest_question`, `longest_context`, `longest_answer` in characters, `digest`
    of its content, `invalid_rows` and `invalid`, `leaked_rows` and `leaked`.
    Raises UserError where rows are malformed, the folder holds no known file or those of two domains, a split is empty,
    or a question or a meeting is in both splits.
    """
    validation, unused, parts = "mixed" if source == "mix" else "generated", list[str](), dict[str, dict[str, Any]]()
    if source == "mix":
        splits, parts = _mixed(mix or {}, out_dir.parent)
    elif source.startswith("generated"):
        splits = _generated(source, generate)
    else:
        splits, validation, unused = _from_folder(source)
    _refuse_malformed(source, splits, skip_invalid)
    if "val" not in splits:
        splits = _held_out(source, splits["train"])
    _refuse_empty(source, splits)
    _refuse_leaks(source, splits, skip_invalid)
    beyond = {split: _limit(corpus, getattr(limit, split, None)) for split, corpus in splits.items()}
    beyond["train"] += sum(part["available"] - part["taken"] for part in parts.values())
    _log_left_out(unused, parts, len(splits["train"].leaked))
    stats = {
        "source": source,
        "revision": None,
        "validation": validation,
        "unused_files": unused,
        "parts": parts,
        "splits": {split: _summary(corpus, beyond[split]) for split, corpus in splits.items()},
    }
    with published(out_dir) as aside:
        for split, corpus in splits.items():
            write_rows((to_row(record) for record in corpus.records), aside / f"{split}.parquet", SCHEMA)
        text = json.dumps(stats, indent=2, ensure_ascii=False)
        (aside / "stats.json").write_text(text + "\n", encoding="utf-8")
    return stats


def _generated(source: str, generate: GenerateParams | None) -> Splits:
    if generate is None:
        raise UserError(f"the source is `{source}`, but `generate` (train, val, seed) is not set in params.yaml")
    from stages.tasks.moe.sources.generated import generate as generate_records

    # One series cut in two: all of its questions differ, so none is in both splits.
    domain = source.partition(":")[2]
    records = generate_records(domain, generate.train + generate.val, generate.seed)
    files = [f"generated {domain}"]
    return {"train": Corpus(files, records[: generate.train]), "val": Corpus(files, records[generate.train :])}


def _mixed(mix: Mapping[str, int | None], prepared_dir: Path) -> tuple[Splits, dict[str, dict[str, Any]]]:
    """(splits, parts): the datasets' names before ids and files, so that both stay unique."""
    splits, parts = {"train": Corpus(), "val": Corpus()}, {}
    for name, count in mix.items():
        for split, corpus in splits.items():
            records = [
                replace(record, id=f"{name}/{record.id}", file=f"{name}/{record.file}")
                for record in read_split(prepared_dir / name, split)
            ]
            taken = Corpus([f"{name}/{split}.parquet"], records)
            if split == "train":
                gone = _limit(taken, count)
                parts[name] = {
                    "source": read_origin(prepared_dir / name, stage=f"prepare@{name}").source,
                    "asked": count,
                    "available": len(records),
                    "taken": len(records) - gone,
                }
            corpus.add(taken)
    for corpus in splits.values():
        corpus.records.sort(key=lambda record: (record.key(), record.id))
    return splits, parts


def _from_folder(source: str) -> tuple[Splits, str, list[str]]:
    kind, _, rest = source.partition(":")
    if kind != "folder" or not rest:
        raise UserError(
            f"unknown source {source!r}; expected folder:PATH, mix, or one of "
            f"{', '.join(f'generated:{domain}' for domain in DOMAINS)}"
        )
    folder = Path(rest)
    if not folder.is_dir():
        raise UserError(f"no dataset folder {folder}; point the dataset's `source` in params.yaml at one that exists")
    files = _files_of_one_domain(folder)
    train = [path for path in files if path.name.startswith("train")]
    if not train:
        validation = f"{HELD_OUT:.0%} of what is asked about, by a digest of each"
        return {"train": _read_files(files)}, validation, _others(folder, files)
    beginnings = ((path for path in files if path.name.startswith(begin)) for begin in VALIDATION_FILES)
    val = next((found for paths in beginnings if (found := list(paths))), [])
    splits = {"train": _read_files(train)}
    if not val:
        validation = f"{HELD_OUT:.0%} of what train files ask about, by a digest of each"
        return splits, validation, _others(folder, train)
    return {**splits, "val": _read_files(val)}, ", ".join(path.name for path in val), _others(folder, [*train, *val])


def _files_of_one_domain(folder: Path) -> list[Path]:
    """Raises UserError where no file is known, or files are of several domains."""
    files = sorted(given_files(folder, *(f"*{suffix}" for suffix in SUFFIXES)))
    domains = {path: domain_of(path) for path in files}
    for path in files:
        if domains[path] is None and path.name.startswith(("train", *VALIDATION_FILES)):
            raise UserError(f"{path} is named as a split is, but {unknown_form(path)}; mend it, or take it away")
    found = {domain: [path for path in files if domains[path] == domain] for domain in DOMAINS}
    known = [paths for paths in found.values() if paths]
    if not known:
        raise UserError(f"{folder} has no file of a known form: {holds(folder)}. Expected: {FORM}; {READ_ON}")
    if len(known) > 1:
        names = "; ".join(f"{domain}: {', '.join(path.name for path in paths)}" for domain, paths in found.items())
        raise UserError(f"{folder} holds two domains, but a dataset is of one; make a folder of each ({names})")
    return known[0]


def _others(folder: Path, used: Sequence[Path]) -> list[str]:
    return [path.name for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES and path not in used]


def _read_files(paths: Iterable[Path]) -> Corpus:
    corpus = Corpus()
    for path in paths:
        corpus.add(read_corpus(path))
    return corpus


def _held_out(source: str, corpus: Corpus) -> Splits:
    """The corpus in two. What is about one subject is on one side; the order within a side stays."""
    subjects = sorted({record.subject() for record in corpus.records})  # digests, so in an order of chance
    if len(subjects) < 2:
        raise UserError(
            f"{source} asks about {counted(len(subjects), 'question or meeting')}; expected at least two, so that "
            "there is one to train on and another to validate on"
        )
    held_out = set(subjects[: max(1, round(len(subjects) * HELD_OUT))])
    val = [record for record in corpus.records if record.subject() in held_out]
    train = [record for record in corpus.records if record.subject() not in held_out]
    return {"train": replace(corpus, records=train), "val": Corpus(corpus.files, val)}


def _refuse_malformed(source: str, splits: Mapping[str, Corpus], skip_invalid: bool) -> None:
    invalid = [f"{place}: {problem}" for corpus in splits.values() for place, problem in corpus.invalid]
    if invalid and not skip_invalid:
        raise UserError(
            f"{source} has {counted(len(invalid), 'malformed row')}:\n{listed(invalid)}\n"
            f"{about_invalid({split: len(corpus.records) for split, corpus in splits.items()}, FORM)}"
        )


def _refuse_empty(source: str, splits: Mapping[str, Corpus]) -> None:
    for split, corpus in splits.items():
        if not corpus.records:
            left_out = len(corpus.invalid) + len(corpus.leaked)
            said = f"; {counted(left_out, 'row')} left out" if left_out else ""
            raise UserError(f"{source} has no valid sample in the split {split}{said}; expected at least one")


def _refuse_leaks(source: str, splits: Mapping[str, Corpus], skip_invalid: bool) -> None:
    """Raise where a question or a meeting is in both splits, or take it from the training split."""
    subjects = {
        # Validation first, so that each training sample about one of its subjects is named, and named once.
        split: [(record.subject(), record) for record in splits[split].records]
        for split in ("val", "train")
    }
    leaked = [(record, seen) for seen, record in leaks(subjects)]
    if leaked and not skip_invalid:
        pairs = [f"{_place(record)} and {_place(seen)}: {record.question}" for record, seen in leaked]
        raise UserError(
            f"{source} has {counted(len(leaked), 'training sample')} whose question or transcript is in the validation "
            f"split too, which makes scores worthless:\n{listed(pairs)}\n"
            "Remove each from one of them, or leave the training ones out with data.skip_invalid: true in params.yaml"
        )
    train, gone = splits["train"], {record.id for record, _ in leaked}
    train.leaked = [(_place(record), _place(seen)) for record, seen in leaked]
    train.records = [record for record in train.records if record.id not in gone]
    _refuse_empty(source, splits)


def _limit(corpus: Corpus, count: int | None) -> int:
    """Keep at most so many records, chosen by a digest of what they ask, in their order; how many are gone."""
    chosen = sorted(corpus.records, key=lambda record: (record.key(), record.id))[:count]
    kept = {record.id for record in chosen}
    gone = len(corpus.records) - len(kept)
    corpus.records = [record for record in corpus.records if record.id in kept]
    return gone


def _log_left_out(unused: Sequence[str], parts: Mapping[str, Mapping[str, Any]], leaked: int) -> None:
    if unused:
        log.warning("not read: %s", ", ".join(unused))
    for name, part in parts.items():
        log.info("%s: %d of %s taken", name, part["taken"], counted(part["available"], "training sample"))
        if part["asked"] is not None and part["asked"] > part["available"]:
            log.warning("%s: %s asked for, there are %d", name, part["asked"], part["available"])
    if leaked:
        log.warning("%s left out: in the validation split too", counted(leaked, "training sample"))


def _place(record: Record) -> Place:
    return Place(record.file, record.line)


def _summary(corpus: Corpus, beyond_limit: int) -> dict[str, Any]:
    records = corpus.records
    return {
        "records": len(records),
        "domains": dict(Counter(record.domain for record in records)),
        "files": corpus.files,
        "repeated_questions": len(records) - len({record.key() for record in records}),
        "beyond_limit": beyond_limit,
        "longest_question": max(len(record.question) for record in records),
        "longest_context": max(len(record.context or "") for record in records),
        "longest_answer": max(len(record.best) for record in records),
        "digest": f"sha256:{_content(records)}",
        "invalid_rows": len(corpus.invalid),
        "invalid": [{"file": place.file, "line": place.line, "problem": problem} for place, problem in corpus.invalid],
        "leaked_rows": len(corpus.leaked),
        "leaked": [{"train": str(place), "val": str(seen)} for place, seen in corpus.leaked],
    }


def _content(records: Iterable[Record]) -> str:
    """Digest of what a split says, wherever it was read, in a form that no file format changes."""
    digest = hashlib.sha256()
    for record in records:
        texts = [record.question, record.context, record.best, record.correct, record.incorrect]
        digest.update(json.dumps(texts).encode())
    return digest.hexdigest()
