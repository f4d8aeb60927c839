"""TruthfulQA's table and QMSum's meetings as samples.

TruthfulQA is the CSV of its authors, one question a row, lists of answers split by semicolons. QMSum is JSONL: of its
authors, one meeting a line with all the queries about it, or of LongBench, one query a line.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.core.records import dotted, shown
from stages.kit.data.prepared import Sample
from stages.kit.data.sources import Place
from stages.kit.data.texts import SURROGATE, UnreadableText, json_lines, markup_problem, read_text
from stages.tasks.moe.samples.records import Domain, Record

COLUMNS = ("Question", "Best Answer", "Correct Answers", "Incorrect Answers")
"""Of TruthfulQA's table; others are not read."""
MEETING = ("meeting_transcripts", "general_query_list", "specific_query_list")
"""Keys of a meeting of QMSum; a meeting needs but one of the lists."""
LONGBENCH = ("input", "context", "answers")
"""Keys of a query in LongBench."""
SUFFIXES = (".csv", ".jsonl")

Found = Record | str
"""A record whose place is not known yet, or what is wrong with it."""


def domain_of(path: Path) -> Domain | None:
    """The domain of a file, by the columns or keys at its beginning; None for something else.

    A file that cannot be read counts as what its suffix promises, so that reading it says why.
    """
    try:
        if path.suffix == ".csv":
            return "truthfulqa" if set(COLUMNS) <= set(_columns(path)) else None
        _, first = next(json_lines(read_text(path)))
    except (UnreadableText, csv.Error):
        return "truthfulqa" if path.suffix == ".csv" else "qmsum"
    return "qmsum" if isinstance(first, str) or _reader(first) else None


def unknown_form(path: Path) -> str:
    """What a file of no known domain lacks of the domains that its suffix promises."""
    if path.suffix == ".csv":
        columns = _columns(path)
        return f"lacks the columns {_keys(name for name in COLUMNS if name not in columns)} of TruthfulQA"
    _, found = next(json_lines(read_text(path)))
    assert isinstance(found, dict), found
    return f"begins with neither {_keys(MEETING)} nor {_keys(LONGBENCH)}, but {_keys(found)}"


def read_corpus(path: Path) -> Iterator[Sample[Record]]:
    """The samples of a file of a known domain. Raises as read_text does."""
    text = read_text(path)
    for line, suffix, found in _truthfulqa(text) if path.suffix == ".csv" else _qmsum(text):
        place = Place(path.name, line)
        if isinstance(found, str):
            yield place, [found]
        elif problem := _problem(found):
            yield place, [f"{problem}; the question is: {shown(found.question)}"]
        else:
            yield place, replace(found, id=f"{path.name}:{line}{suffix}", file=path.name, line=line)


def _problem(record: Record) -> str | None:
    texts = (record.question, record.context or "", *record.correct, *record.incorrect)
    checks = {
        "an empty question": not record.question,
        "an empty transcript": record.context == "",
        "no best answer": not record.best,
        "no incorrect answer": record.domain == "truthfulqa" and not record.incorrect,
        "the best answer is among the incorrect ones": record.best in record.incorrect,
        "a text holds half of a surrogate pair": any(SURROGATE.search(text) for text in texts),
    }
    return next((problem for problem, found in checks.items() if found), markup_problem(*texts))


def _truthfulqa(text: str) -> Iterator[tuple[int, str, Found]]:
    """Of each sample its line, and a suffix that tells it from others of that line."""
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] = []
    start = 1
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield start, "", f"not CSV: {error}; what follows cannot be read"
            return
        if row is None:
            return
        line, start = start, rows.line_num + 1
        if not columns or not row:
            columns = columns or row
        elif len(row) != len(columns):
            yield line, "", f"{len(row)} fields, expected the {len(columns)} of the first line"
        else:
            question, best, correct, incorrect = (
                dict(zip(columns, row, strict=True))[name].strip() for name in COLUMNS
            )
            yield line, "", _record("truthfulqa", question, None, best, _answers(correct), _answers(incorrect))


def _answers(text: str) -> tuple[str, ...]:
    """The real table ends some of its lists with a semicolon."""
    return tuple(dict.fromkeys(answer.strip() for answer in text.split(";") if answer.strip()))


def _qmsum(text: str) -> Iterator[tuple[int, str, Found]]:
    for line, found in json_lines(text):
        if isinstance(found, str):
            yield line, "", found
        elif reader := _reader(found):
            for number, sample in enumerate(reader(found), start=1):
                yield line, "" if reader is _longbench else f".{number}", sample
        else:
            yield line, "", f"neither {_keys(MEETING)} nor {_keys(LONGBENCH)}; found {_keys(found)}"


def _reader(content: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Iterator[Found]] | None:
    if MEETING[0] in content and set(MEETING[1:]) & set(content):
        return _meeting
    return _longbench if set(LONGBENCH) <= set(content) else None


def _meeting(content: Mapping[str, Any]) -> Iterator[Found]:
    turns = content[MEETING[0]]
    if not isinstance(turns, list) or not all(_has_texts(turn, "speaker", "content") for turn in turns):
        yield f"{MEETING[0]} is no list of a speaker and a content each"
        return
    transcript = "\n".join(f"{turn['speaker'].strip()}: {turn['content'].strip()}" for turn in turns)
    for name in MEETING[1:]:
        queries = content.get(name, [])
        if not isinstance(queries, list):
            yield f"{name} is no list"
            continue
        for number, query in enumerate(queries, start=1):
            if _has_texts(query, "query", "answer"):
                answer = query["answer"].strip()
                yield _record("qmsum", query["query"].strip(), transcript, answer, (answer,))
            else:
                yield f"{name}, number {number}: no text as query, or none as answer"


def _longbench(content: Mapping[str, Any]) -> Iterator[Found]:
    answers = content["answers"]
    if content.get("dataset", "qmsum") != "qmsum":
        yield f"of LongBench's {shown(content['dataset'])}, expected its qmsum"
    elif not _has_texts(content, "input", "context"):
        yield "no text as input, or none as context"
    elif not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        yield f"answers is no list of texts, found {shown(answers)}"
    else:
        correct = tuple(answer.strip() for answer in answers)
        yield _record("qmsum", content["input"].strip(), content["context"].strip(), correct[0], correct)


def _record(
    domain: Domain,
    question: str,
    context: str | None,
    best: str,
    correct: tuple[str, ...],
    incorrect: tuple[str, ...] = (),
) -> Record:
    return Record(
        id="",
        domain=domain,
        question=question,
        context=context,
        best=best,
        correct=correct if best in correct else (best, *correct),
        incorrect=incorrect,
        file="",
        line=0,
    )


def _has_texts(content: Any, *keys: str) -> bool:
    return isinstance(content, dict) and all(isinstance(content.get(key), str) for key in keys)


def _keys(names: Iterable[str]) -> str:
    return ", ".join(map(dotted, ([name] for name in names))) or "nothing"


def _columns(path: Path) -> list[str]:
    return next(csv.reader(io.StringIO(read_text(path), newline="")), [])
