"""The records of this task: a question, perhaps about a text, and what is right and wrong to answer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from stages.kit.data.prepared import PreparedRow, read_prepared
from stages.kit.data.texts import same_text

Domain = Literal["truthfulqa", "qmsum"]
DOMAINS: tuple[Domain, ...] = ("truthfulqa", "qmsum")
"""Questions that many people answer wrongly, and queries about the transcript of a meeting."""

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("domain", pa.string()),
        ("question", pa.string()),
        ("context", pa.string()),
        ("best", pa.string()),
        ("correct", pa.list_(pa.string())),
        ("incorrect", pa.list_(pa.string())),
        ("file", pa.string()),
        ("line", pa.int64()),
    ]
)
"""Of a prepared split."""


@dataclass(frozen=True, kw_only=True)
class Record:
    id: str
    domain: Domain
    question: str
    context: str | None
    """The transcript that the question is about; None where it is about the world."""
    best: str
    """What the model is to answer; one of `correct`."""
    correct: tuple[str, ...]
    incorrect: tuple[str, ...]
    """None for a transcript."""
    file: str
    """Where it was read, relative to the dataset's folder."""
    line: int
    """Counted from 1."""

    def key(self) -> str:
        """A digest, equal for records that ask the same of the same text."""
        return _digest(same_text(self.question), same_text(self.context or ""))

    def subject(self) -> str:
        """A digest, equal for records that may not be in two splits: about the same transcript, or else the same
        question."""
        return _digest(same_text(self.context or self.question))

    def content(self) -> list[Any]:
        return [self.question, self.context, self.best, self.correct, self.incorrect]


def domain(record: Record) -> Domain:
    """What decides which expert of a mixture is to have its tokens."""
    return record.domain


def read_split(prepared_dir: Path, split: str) -> list[Record]:
    """The records of a prepared split, in their order.

    Raises UserError where prepare has not run, or what it wrote is damaged.
    """
    return read_prepared(prepared_dir, split, SCHEMA, _from_row, may_lack=("context",))


def _from_row(row: dict[str, Any], _: PreparedRow) -> Record:
    correct, incorrect = tuple(row["correct"]), tuple(row["incorrect"])
    if row["domain"] not in DOMAINS:
        raise ValueError(f"unknown domain {row['domain']!r}, expected one of {', '.join(DOMAINS)}")
    if row["best"] not in correct or None in (*correct, *incorrect):
        raise ValueError("the best answer is none of the correct ones, or an answer is missing")
    return Record(**{**row, "correct": correct, "incorrect": incorrect})


def _digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
