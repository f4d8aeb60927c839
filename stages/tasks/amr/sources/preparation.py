"""From AMR corpora to the prepared splits that training and evaluation read.

Writes train.parquet, val.parquet (records.SCHEMA) and stats.json. Nothing appears under those names unless every
check has passed: each graph well-formed, no split empty, and no sentence in both splits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from stages.core.errors import UserError, counted, listed, printable
from stages.core.given_files import given_files
from stages.core.params.schema import GenerateParams
from stages.core.publish import published
from stages.kit.data.markup import markup_problem
from stages.kit.data.parquet import write_rows
from stages.kit.data.sources import READ_ON, about_invalid, holds
from stages.kit.data.splits import leaks
from stages.tasks.amr.samples.graphs import MalformedGraph
from stages.tasks.amr.samples.records import SCHEMA, Record, parse_record, to_row
from stages.tasks.amr.samples.targets import TARGETS, encode
from stages.tasks.amr.sources import grammar
from stages.tasks.amr.sources.corpora import Block, UnreadableText, read_blocks, read_lines

log = logging.getLogger(__name__)

FORM = "train*.txt with #::snt lines, each above its graph in PENMAN"
VALIDATION_FILES = ("val*.txt", "dev*.txt", "test*.txt")
"""The first of these patterns that matches gives the validation split."""
HELD_OUT = 0.1
"""Share of the training sentences that is the validation split where there are no such files."""


class Place(NamedTuple):
    file: str
    """Relative to the dataset's folder, so that it reads the same on every machine."""
    line: int | None = None
    """Counted from 1; None for a fault of the whole file."""

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file} line {self.line}"


@dataclass
class Corpus:
    """One split as it was read."""

    files: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    invalid: list[tuple[Place, str]] = field(default_factory=list)
    """What was left out, and why; one entry a sample, or a file."""
    leaked: list[tuple[Place, Place]] = field(default_factory=list)
    """Training samples left out because their sentence is validated on, and where that is."""


def prepare(
    source: str, *, out_dir: Path, skip_invalid: bool = False, generate: GenerateParams | None = None
) -> dict[str, Any]:
    """Validate a dataset and write it, whole or not at all, to `out_dir`.

    source: `generated` (sizes and seed in `generate`), or `folder:PATH` with train*.txt and VALIDATION_FILES, in the
        form of ViSemPar or of the LDC. Without a validation file, HELD_OUT of the training sentences are held out:
        always the same ones, by a digest of the sentence.
    skip_invalid: leave out malformed samples, and training samples whose sentence is validated on, counted and listed
        in stats.json, instead of refusing them.
    Returns what stats.json holds: `source`, `revision`, `validation` (where that split comes from), `unused_files`, and
    by split `records`, `files`, `repeated_sentences`, `graphs_with_references`, `largest_graph` in nodes,
    `longest_sentence` and `longest_target` (by target) in characters, `digest` of its content, `invalid_rows` and
    `invalid`, `leaked_rows` and `leaked`.
    Raises UserError where samples are malformed, a split is empty, or a sentence is in both splits.
    """
    splits, validation, unused = _generated(generate) if source == "generated" else _from_folder(source)
    _refuse_malformed(source, splits, skip_invalid)
    if "val" not in splits:
        splits = _held_out(source, splits["train"])
    _refuse_empty(source, splits)
    _refuse_leaks(source, splits, skip_invalid)
    log.info("validation split: %s", validation)
    if unused:
        log.warning("not read: %s", ", ".join(unused))
    if leaked := splits["train"].leaked:
        log.warning("%s left out: in the validation split too", counted(len(leaked), "training sample"))
    stats = {
        "source": source,
        "revision": None,
        "validation": validation,
        "unused_files": unused,
        "splits": {split: _summary(corpus) for split, corpus in splits.items()},
    }
    with published(out_dir) as aside:
        for split, corpus in splits.items():
            write_rows((to_row(record) for record in corpus.records), aside / f"{split}.parquet", SCHEMA)
        text = json.dumps(stats, indent=2, ensure_ascii=False)
        (aside / "stats.json").write_text(text + "\n", encoding="utf-8")
    return stats


def same_sentence(sentence: str) -> str:
    """Equal for sentences that differ only in how Unicode composes their letters, in white space or in case."""
    return " ".join(unicodedata.normalize("NFC", sentence).casefold().split())


def _generated(generate: GenerateParams | None) -> tuple[dict[str, Corpus], str, list[str]]:
    if generate is None:
        raise UserError("the source is `generated`, but `generate` (train, val, seed) is not set in params.yaml")
    # One series cut in two: all of its sentences differ, so none is in both splits.
    pairs = grammar.generate(generate.train + generate.val, generate.seed)
    splits = {}
    for split, part in (("train", pairs[: generate.train]), ("val", pairs[generate.train :])):
        file = f"generated {split}"
        records = [
            parse_record(f"{split}-{number}", sentence, graph, file=file, line=number)
            for number, (sentence, graph) in enumerate(part, start=1)
        ]
        splits[split] = Corpus([file], records)
    return splits, "generated", []


def _from_folder(source: str) -> tuple[dict[str, Corpus], str, list[str]]:
    kind, _, rest = source.partition(":")
    if kind == "hub":
        raise UserError(
            f"AMR parsing has no source on the hub, found {source!r}: the corpora are not published there; "
            "put their text files into a folder and set source: folder:PATH"
        )
    if kind != "folder" or not rest:
        raise UserError(f"unknown source {source!r}; expected generated or folder:PATH")
    folder = Path(rest)
    if not folder.is_dir():
        raise UserError(f"no dataset folder {folder}; point the dataset's `source` in params.yaml at one that exists")
    train = given_files(folder, "train*.txt")
    if not train:
        raise UserError(f"{folder} has no training files: {holds(folder)}. Expected: {FORM}; {READ_ON}")
    val = next((found for pattern in VALIDATION_FILES if (found := given_files(folder, pattern))), [])
    used = {*train, *val}
    unused = [printable(path.name) for path in sorted(folder.glob("*.txt")) if path not in used]
    splits = {"train": _read_files(train)}
    validation = f"{HELD_OUT:.0%} of the training sentences, by a digest of each"
    if val:
        splits["val"] = _read_files(val)
        validation = ", ".join(path.name for path in val)
    _make_ids_distinct(splits.values())
    return splits, validation, unused


def _read_files(paths: Sequence[Path]) -> Corpus:
    corpus = Corpus([path.name for path in paths])
    for path in paths:
        try:
            lines = read_lines(path)
        except UnreadableText as error:
            corpus.invalid.append((Place(path.name), str(error)))
            continue
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        blocks = list(read_blocks(lines))
        if not any(block.sentence is not None for block in blocks):
            corpus.invalid.append((Place(path.name), "no sentence; expected #::snt lines, each above its graph"))
            continue
        for block in blocks:
            record = _record(block, path.name)
            if isinstance(record, Record):
                corpus.records.append(record)
            else:
                corpus.invalid.append(record)
    return corpus


def _make_ids_distinct(corpora: Collection[Corpus]) -> None:
    """A sample whose id another one has too takes FILE:LINE for it."""
    counts = Counter(record.id for corpus in corpora for record in corpus.records)
    for corpus in corpora:
        corpus.records = [
            record if counts[record.id] == 1 else replace(record, id=f"{record.file}:{record.line}")
            for record in corpus.records
        ]


def _record(block: Block, file: str) -> Record | tuple[Place, str]:
    """A block as a record, or what keeps it from being one, and where."""
    here, graph = Place(file, block.line), block.graph_text()
    if block.sentence is None:
        what = "a graph" if graph else f"an id, {block.id},"
        return here, f"{what} without a sentence; expected a line #::snt above it"
    if not block.sentence:
        return here, "an empty sentence"
    if not graph:
        return here, f"a sentence without a graph: {block.sentence}"
    try:
        record = parse_record(block.id or f"{file}:{block.line}", block.sentence, graph, file=file, line=block.line)
    except MalformedGraph as malformed:
        return Place(file, block.graph_line + (malformed.line or 0)), f"{malformed}; the sentence is: {block.sentence}"
    # The canonical graph too: it joins the words of a concept, and so may make a token of two halves.
    if problem := markup_problem(record.sentence, record.graph, record.canonical):
        return here, f"{problem}; the sentence is: {record.sentence}"
    return record


def _held_out(source: str, corpus: Corpus) -> dict[str, Corpus]:
    """The corpus in two. A sentence that is there twice is on one side; the order within a side stays."""
    by_digest = sorted({same_sentence(record.sentence) for record in corpus.records}, key=_digest)
    if len(by_digest) < 2:
        raise UserError(
            f"{source} has {counted(len(by_digest), 'valid sentence')} to train on, and no validation file; expected "
            f"{' or '.join(VALIDATION_FILES)}, or at least 2 sentences to hold one out"
        )
    chosen = set(by_digest[: max(1, round(HELD_OUT * len(by_digest)))])
    held = [same_sentence(record.sentence) in chosen for record in corpus.records]
    return {
        split: Corpus(
            corpus.files,
            [record for record, is_held in zip(corpus.records, held, strict=True) if is_held == (split == "val")],
            corpus.invalid if split == "train" else [],
        )
        for split in ("train", "val")
    }


def _refuse_malformed(source: str, splits: dict[str, Corpus], skip_invalid: bool) -> None:
    invalid = [f"{place}: {problem}" for corpus in splits.values() for place, problem in corpus.invalid]
    if invalid and not skip_invalid:
        raise UserError(
            f"{source} has {counted(len(invalid), 'malformed sample')}:\n{listed(invalid)}\n"
            f"{about_invalid({split: len(corpus.records) for split, corpus in splits.items()}, FORM)}"
        )


def _refuse_empty(source: str, splits: dict[str, Corpus]) -> None:
    for split, corpus in splits.items():
        if not corpus.records:
            left_out = len(corpus.invalid) + len(corpus.leaked)
            said = f"; {counted(left_out, 'sample')} left out" if left_out else ""
            raise UserError(f"{source} has no valid sample in the split {split}{said}; expected at least one")


def _refuse_leaks(source: str, splits: dict[str, Corpus], skip_invalid: bool) -> None:
    """Raise where a sentence is in both splits, or take it from the training split."""
    sentences = {
        # Validation first, so that each training sample with one of its sentences is named, and named once.
        split: [(same_sentence(record.sentence), _place(record)) for record in splits[split].records]
        for split in ("val", "train")
    }
    leaked = [(place, seen) for seen, place in leaks(sentences)]
    if leaked and not skip_invalid:
        texts = {_place(record): record.sentence for record in splits["train"].records}
        pairs = [f"{place} and {seen}: {texts[place]}" for place, seen in leaked]
        raise UserError(
            f"{source} has {counted(len(leaked), 'training sample')} whose sentence is in the validation split too, "
            f"which makes scores worthless:\n{listed(pairs)}\n"
            "Remove each from one of them, or leave the training ones out with data.skip_invalid: true in params.yaml"
        )
    train, gone = splits["train"], {place for place, _ in leaked}
    train.leaked = leaked
    train.records = [record for record in train.records if _place(record) not in gone]
    _refuse_empty(source, splits)


def _place(record: Record) -> Place:
    return Place(record.file, record.line)


def _summary(corpus: Corpus) -> dict[str, Any]:
    graphs = [record.parsed() for record in corpus.records]
    repeats = Counter(same_sentence(record.sentence) for record in corpus.records)
    return {
        "records": len(corpus.records),
        "files": corpus.files,
        "repeated_sentences": repeats.total() - len(repeats),
        "graphs_with_references": sum(bool(graph.referred()) for graph in graphs),
        "largest_graph": max(sum(1 for _ in graph.walk()) for graph in graphs),
        "longest_sentence": max(len(record.sentence) for record in corpus.records),
        "longest_target": {target: max(len(encode(graph, target)) for graph in graphs) for target in TARGETS},
        "digest": f"sha256:{_content(corpus.records)}",
        "invalid_rows": len(corpus.invalid),
        "invalid": [{"file": place.file, "line": place.line, "problem": problem} for place, problem in corpus.invalid],
        "leaked_rows": len(corpus.leaked),
        "leaked": [{"train": str(place), "val": str(seen)} for place, seen in corpus.leaked],
    }


def _content(records: Iterable[Record]) -> str:
    """Digest of what a split says, wherever it was read, in a form that no file format changes."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps([record.sentence, record.graph, record.canonical]).encode())
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
