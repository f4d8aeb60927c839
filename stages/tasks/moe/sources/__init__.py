"""TruthfulQA's table and QMSum's meetings, or prepared datasets of them as a mix.

TruthfulQA is the CSV of its authors, one question a row, lists of answers separated by semicolons. QMSum is JSONL: of
its authors, one meeting a line with all queries about it, or of LongBench, one query a line.
"""

from __future__ import annotations

import csv
import io
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.core.errors import UserError, pluralize
from stages.core.given_files import given_files
from stages.core.params.schema import DatasetParams
from stages.core.records import dotted, shown
from stages.core.tasks import PlainReader
from stages.data.near import describe_text
from stages.data.prepared import RawDataset, Rules, Sample, read_text_files
from stages.data.sources import READ_ON, Place, describe_folder, is_set, other_split, source_folder
from stages.data.splits import read_origin
from stages.data.texts import SURROGATE, json_objects, markup_problem, read_text
from stages.tasks.moe.samples import SCHEMA, Record, read_split

COLUMNS = ("Question", "Best Answer", "Correct Answers", "Incorrect Answers")
"""Columns of TruthfulQA's table that are read."""
MEETING = ("meeting_transcripts", "general_query_list", "specific_query_list")
"""Keys of a meeting of QMSum; one of the lists is enough."""
LONGBENCH = ("input", "context", "answers")
"""Keys of a query in LongBench."""

# In Python's or JSON's form, or with an answer a line.
_LIST = re.compile(r"""\A\[\s*['"]|\n""")

Found = Mapping[str, Any] | str
"""The fields of a record but its place, or the problem."""

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


RULES = Rules(
    schema=SCHEMA,
    summary=_summary,
    expected=FORM,
    subject="question or transcript",
    describe=lambda record: describe_text(record.context or record.question),
    held_out=0.2,
)


def mix(parts: Mapping[str, int | None], prepared_dir: Path, *, with_selection: bool) -> RawDataset[Record]:
    """Prepared datasets as one, in the order of a digest of the text, so that the domains are mixed evenly.

    parts: by dataset, the number of training samples to take at most, None for all. All validation samples are taken,
    and with_selection all that the datasets have set aside. Ids and files begin with the dataset's name.
    """
    records: dict[str, list[Record]] = {split: [] for split in ("train", "val", *(["selection"] * with_selection))}
    found = {}
    for name, count in parts.items():
        available = {split: read_split(prepared_dir / name, split) for split in records}
        taken = sorted(available["train"], key=_order)[:count]
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


def read(dataset: DatasetParams, _: PlainReader) -> RawDataset[Record]:
    """The files of one domain in `folder:PATH`: TruthfulQA's CSV or QMSum's JSONL.

    Files train* and val*, dev* or test* are the two splits; without train* those that begin with no such word are
    trained on. Without validation files a share of all questions is held out, of QMSum whole meetings with all
    questions about them. Raises UserError if the folder holds neither CSV nor JSONL, or both.
    """
    folder = source_folder(dataset.source, known="folder:PATH or mix")
    files = sorted(given_files(folder, "*.csv", "*.jsonl", any_case=True))
    if not (files or dataset.splits.patterns()):
        raise UserError(
            f"{folder} has no file of a known form: {describe_folder(folder)}. Expected: {FORM}; `splits` names files "
            f"in folders of it, {READ_ON}"
        )
    if len({path.suffix.lower() for path in files}) > 1:
        raise UserError(f"{folder} holds two domains, but a dataset is of one; make a folder of each")
    return read_text_files(dataset, folder, files, _read_file, RULES, named_train=False)


def _order(record: Record) -> tuple[str, str]:
    """Any order, the same each time: a digest of the question and its text."""
    return record.key(), record.id


def _read_file(path: Path, file: str, split: str, unread: Counter[str]) -> Iterator[Sample[Record]]:
    text = read_text(path)
    if path.suffix.lower() == ".csv":
        unit, samples = "line", _truthfulqa(text, split, unread)
    else:
        unit, objects = json_objects(text)
        samples = _qmsum(objects, split, unread)
    for line, suffix, found in samples:
        place = Place(file, line, unit)
        if isinstance(found, str):
            yield place, [found]
            continue
        record = Record(id=f"{file}:{line}{suffix}", file=file, line=line, **found)
        problem = _problem(record)
        yield place, [f"{problem}; the question is: {shown(record.question)}"] if problem else record


def _problem(record: Record) -> str | None:
    answers = (*record.correct, *record.incorrect)
    texts = (record.question, record.context or "", *answers)
    checks = {
        "an empty question": not record.question,
        "an empty transcript": record.context == "",
        "no best answer": not record.best,
        "no incorrect answer": record.domain == "truthfulqa" and not record.incorrect,
        "the best answer is among the incorrect ones": record.best in record.incorrect,
        "a list, expected answers separated by semicolons": record.domain == "truthfulqa"
        and any(map(_LIST.search, answers)),
        "a text holds half of a surrogate pair": any(SURROGATE.search(text) for text in texts),
    }
    return next((problem for problem, found in checks.items() if found), markup_problem(*texts))


def _truthfulqa(text: str, split: str, unread: Counter[str]) -> Iterator[tuple[int, str, Found]]:
    """(line, suffix of the id, sample): the suffix distinguishes samples of one line."""
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] = []
    start = 1
    try:
        for row in rows:
            line, start = start, rows.line_num + 1
            if not columns or not row:
                columns = columns or row
                if lacking := [name for name in COLUMNS if columns and columns.count(name) != 1]:
                    found = _keys(columns)
                    yield line, "", f"lacks the columns {_keys(lacking)} of TruthfulQA, or has one twice; found {found}"
                    return
            elif len(row) != len(columns):
                yield line, "", f"{len(row)} fields, expected the {len(columns)} of the first line"
            else:
                fields = dict(zip(columns, row, strict=True))
                _count(unread, fields, COLUMNS)
                question, best, *lists = (fields[name].strip() for name in COLUMNS)
                correct, incorrect = map(_answers, lists)
                asked = {"domain": "truthfulqa", "question": question, "context": None, "best": best}
                correct = correct if best in correct else (best, *correct)
                yield line, "", other_split(fields, split) or {**asked, "correct": correct, "incorrect": incorrect}
    except csv.Error as error:
        yield start, "", f"not CSV: {error}; what follows cannot be read"


def _answers(text: str) -> tuple[str, ...]:
    """The real table ends some of its lists with a semicolon."""
    return tuple(dict.fromkeys(answer.strip() for answer in text.split(";") if answer.strip()))


def _count(unread: Counter[str], fields: Mapping[str, Any], read: Iterable[str], outer: str = "") -> None:
    unread.update(f"{outer}{name}" for name, value in fields.items() if name not in read and is_set(value))


def _qmsum(
    objects: Iterable[tuple[int, dict[str, Any] | str]], split: str, unread: Counter[str]
) -> Iterator[tuple[int, str, Found]]:
    for line, found in objects:
        if isinstance(found, str):
            yield line, "", found
        elif wrong := other_split(found, split):
            yield line, "", wrong
        elif MEETING[0] in found and set(MEETING[1:]) & set(found):
            _count(unread, found, MEETING)
            for number, sample in enumerate(_meeting(found, unread), start=1):
                yield line, f".{number}", sample
        elif set(LONGBENCH) <= set(found):
            _count(unread, found, (*LONGBENCH, "dataset"))
            yield line, "", _longbench(found)
        else:
            yield line, "", f"neither {_keys(MEETING)} nor {_keys(LONGBENCH)}; found {_keys(found)}"


def _meeting(content: Mapping[str, Any], unread: Counter[str]) -> Iterator[Found]:
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
                _count(unread, query, ("query", "answer"), f"{name}.")
                yield _about_meeting(query["query"], transcript, [query["answer"]])
            else:
                yield f"{name}, number {number}: no text as query, or none as answer"


def _longbench(content: Mapping[str, Any]) -> Found:
    answers = content["answers"]
    if content.get("dataset", "qmsum") != "qmsum":
        return f"of LongBench's {shown(content['dataset'])}, expected its qmsum"
    if not _has_texts(content, "input", "context"):
        return "no text as input, or none as context"
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        return f"answers is no list of texts, found {shown(answers)}"
    return _about_meeting(content["input"], content["context"].strip(), answers)


def _about_meeting(query: str, transcript: str, answers: Sequence[str]) -> Found:
    correct = tuple(answer.strip() for answer in answers)
    asked = {"domain": "qmsum", "question": query.strip(), "context": transcript}
    return {**asked, "best": correct[0], "correct": correct, "incorrect": ()}


def _has_texts(content: Any, *keys: str) -> bool:
    return isinstance(content, dict) and all(isinstance(content.get(key), str) for key in keys)


def _keys(names: Iterable[str]) -> str:
    return ", ".join(map(dotted, ([name] for name in names))) or "nothing"
