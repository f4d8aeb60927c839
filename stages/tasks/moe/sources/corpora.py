"""TruthfulQA's table and QMSum's meetings as records, or what keeps them from being any.

TruthfulQA is the CSV of its authors, one question a row, lists of answers split by semicolons. QMSum is JSONL: of its
authors, one meeting a line with all the queries about it, or of LongBench, one query a line.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stages.core.documents import SURROGATE, dotted, shown
from stages.core.errors import UserError
from stages.kit.data.markup import markup_problem
from stages.tasks.moe.samples.records import Domain, Record

COLUMNS = ("Question", "Best Answer", "Correct Answers", "Incorrect Answers")
"""Of TruthfulQA's table; others are not read."""
MEETING = ("meeting_transcripts", "general_query_list", "specific_query_list")
"""Keys of a meeting of QMSum; a meeting needs but one of the lists."""
LONGBENCH = ("input", "context", "answers")
"""Keys of a query in LongBench."""
SUFFIXES = (".csv", ".jsonl")


class Place(NamedTuple):
    file: str
    """Relative to the dataset's folder, so that it reads the same on every machine."""
    line: int | None = None
    """Counted from 1; None for a fault of the whole file."""

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file} line {self.line}"


class UnreadableText(ValueError):
    """A file or a line of it that cannot be read, and why."""


@dataclass
class Corpus:
    """What was read of one split."""

    files: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    invalid: list[tuple[Place, str]] = field(default_factory=list)
    """What was left out, and why; one entry a sample, a line or a file."""
    leaked: list[tuple[Place, Place]] = field(default_factory=list)
    """Training samples left out because what they are about is validated on, and where that is."""

    def add(self, other: Corpus) -> None:
        for name, content in vars(self).items():
            content += getattr(other, name)


def domain_of(path: Path) -> Domain | None:
    """What a file holds, by the columns or keys at its beginning; None for something else.

    A file that cannot be read counts as what its suffix promises, so that reading it says why.
    """
    if path.suffix == ".csv":
        try:
            columns = next(csv.reader(io.StringIO(_read(path), newline="")), [])
        except (UnreadableText, csv.Error):
            return "truthfulqa"
        return "truthfulqa" if set(COLUMNS) <= set(columns) else None
    try:
        first = next(_objects(_read(path)), (1, UnreadableText()))[1]
    except UnreadableText:
        return "qmsum"
    return "qmsum" if isinstance(first, UnreadableText) or _reader(first) else None


def unknown_form(path: Path) -> str:
    """What a file of no known domain lacks of the domains that its suffix promises."""
    if path.suffix == ".csv":
        columns = next(csv.reader(io.StringIO(_read(path), newline="")), [])
        return f"lacks the columns {_keys(name for name in COLUMNS if name not in columns)} of TruthfulQA"
    _, found = next(_objects(_read(path)))
    assert isinstance(found, dict), found
    return f"begins with neither {_keys(MEETING)} nor {_keys(LONGBENCH)}, but {_keys(found)}"


def read_corpus(path: Path) -> Corpus:
    """A file of a known domain. Raises UserError where it cannot be opened."""
    corpus = Corpus([path.name])
    try:
        text = _read(path)
    except UnreadableText as error:
        corpus.invalid.append((Place(path.name), str(error)))
        return corpus
    for line, suffix, found in _truthfulqa(text) if path.suffix == ".csv" else _qmsum(text):
        if isinstance(found, UnreadableText):
            corpus.invalid.append((Place(path.name, line), str(found)))
        elif problem := found.problem():
            corpus.invalid.append((Place(path.name, line), f"{problem}; the question is: {shown(found.question)}"))
        else:
            corpus.records.append(found.record(f"{path.name}:{line}{suffix}", path.name, line))
    return corpus


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """As it was read, every text stripped."""

    domain: Domain
    question: str
    context: str | None = None
    best: str
    correct: tuple[str, ...]
    incorrect: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """What keeps it from being a record."""
        texts = (self.question, self.context or "", self.best, *self.correct, *self.incorrect)
        checks = {
            "an empty question": not self.question,
            "an empty transcript": self.context == "",
            "no best answer": not self.best,
            "no incorrect answer": self.domain == "truthfulqa" and not self.incorrect,
            "the best answer is among the incorrect ones": self.best in self.incorrect,
            "a text holds half of a surrogate pair": any(SURROGATE.search(text) for text in texts),
        }
        return next((problem for problem, found in checks.items() if found), markup_problem(*texts))

    def record(self, sample_id: str, file: str, line: int) -> Record:
        correct = self.correct if self.best in self.correct else (self.best, *self.correct)
        return Record(**{**vars(self), "correct": correct}, id=sample_id, file=file, line=line)


_Read = Iterator[tuple[int, str, _Sample | UnreadableText]]
"""Of each sample: its line, what tells it from others of that line, and what was read."""


def _truthfulqa(text: str) -> _Read:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] = []
    start = 1
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield start, "", UnreadableText(f"not CSV: {error}; what follows cannot be read")
            return
        if row is None:
            return
        line, start = start, rows.line_num + 1
        if not columns or not row:
            columns = columns or row
            continue
        if len(row) != len(columns):
            yield line, "", UnreadableText(f"{len(row)} fields, expected the {len(columns)} of the first line")
            continue
        question, best, correct, incorrect = (dict(zip(columns, row, strict=True))[name].strip() for name in COLUMNS)
        yield (
            line,
            "",
            _Sample(
                domain="truthfulqa",
                question=question,
                best=best,
                correct=_answers(correct),
                incorrect=_answers(incorrect),
            ),
        )


def _answers(text: str) -> tuple[str, ...]:
    """The real table ends some of its lists with a semicolon."""
    return tuple(dict.fromkeys(answer.strip() for answer in text.split(";") if answer.strip()))


def _qmsum(text: str) -> _Read:
    for line, found in _objects(text):
        if isinstance(found, UnreadableText):
            yield line, "", found
        elif reader := _reader(found):
            for number, sample in enumerate(reader(found), start=1):
                yield line, "" if reader is _longbench else f".{number}", sample
        else:
            yield line, "", UnreadableText(f"neither {_keys(MEETING)} nor {_keys(LONGBENCH)}; found {_keys(found)}")


def _objects(text: str) -> Iterator[tuple[int, dict[str, Any] | UnreadableText]]:
    """The lines that are not blank, counted from 1."""
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines(), which also breaks at U+2028
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
            yield number, UnreadableText(f"not JSON: {error}")
            continue
        found = f"a JSON object is expected, found {shown(content)}"
        yield number, content if isinstance(content, dict) else UnreadableText(found)


def _reader(
    content: Mapping[str, Any],
) -> Callable[[Mapping[str, Any]], Iterator[_Sample | UnreadableText]] | None:
    if MEETING[0] in content and set(MEETING[1:]) & set(content):
        return _meeting
    return _longbench if set(LONGBENCH) <= set(content) else None


def _meeting(content: Mapping[str, Any]) -> Iterator[_Sample | UnreadableText]:
    turns = content[MEETING[0]]
    if not isinstance(turns, list) or not all(_has_texts(turn, "speaker", "content") for turn in turns):
        yield UnreadableText(f"{MEETING[0]} is no list of a speaker and a content each")
        return
    transcript = "\n".join(f"{turn['speaker'].strip()}: {turn['content'].strip()}" for turn in turns)
    for name in MEETING[1:]:
        queries = content.get(name, [])
        if not isinstance(queries, list):
            yield UnreadableText(f"{name} is no list")
            continue
        for number, query in enumerate(queries, start=1):
            if not _has_texts(query, "query", "answer"):
                yield UnreadableText(f"{name}, number {number}: no text as query, or none as answer")
                continue
            answer = query["answer"].strip()
            yield _Sample(
                domain="qmsum", question=query["query"].strip(), context=transcript, best=answer, correct=(answer,)
            )


def _longbench(content: Mapping[str, Any]) -> Iterator[_Sample | UnreadableText]:
    answers = content["answers"]
    if content.get("dataset", "qmsum") != "qmsum":
        yield UnreadableText(f"of LongBench's {shown(content['dataset'])}, expected its qmsum")
    elif not _has_texts(content, "input", "context"):
        yield UnreadableText("no text as input, or none as context")
    elif not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        yield UnreadableText(f"answers is no list of texts, found {shown(answers)}")
    else:
        correct = tuple(answer.strip() for answer in answers)
        yield _Sample(
            domain="qmsum",
            question=content["input"].strip(),
            context=content["context"].strip(),
            best=correct[0],
            correct=correct,
        )


def _has_texts(content: Any, *keys: str) -> bool:
    return isinstance(content, dict) and all(isinstance(content.get(key), str) for key in keys)


def _keys(names: Iterable[str]) -> str:
    return ", ".join(map(dotted, ([name] for name in names))) or "nothing"


def _read(path: Path) -> str:
    """The text of a file, without a byte order mark. Raises UnreadableText for one that is empty or not UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableText(f"not UTF-8: byte 0x{content[error.start]:02x} in line {line}") from None
    if not text.strip():
        raise UnreadableText("the file is empty")
    return text
