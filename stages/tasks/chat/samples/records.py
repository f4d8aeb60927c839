"""The records of this task: a conversation that ends with the answer to be learnt, or to be compared with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pyarrow as pa

from stages.core.documents import shown
from stages.core.params.schema import TextMetric
from stages.kit.data.prepared import PreparedRow, read_prepared
from stages.kit.data.texts import same_text

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("group", pa.string()),
        ("metrics", pa.list_(pa.string())),
        ("file", pa.string()),
        ("number", pa.int64()),
    ]
)
"""Of a prepared split."""


class Message(NamedTuple):
    role: str
    """system, user or assistant."""
    content: str


@dataclass(frozen=True, kw_only=True)
class Record:
    id: str
    messages: tuple[Message, ...]
    """`order_problems` finds nothing wrong with them."""
    group: str
    """Equal for records that may not be in two splits."""
    metrics: tuple[TextMetric, ...] = ()
    """How an answer is scored, the one that models are ranked by first; none in the training split, whose file so stays
    the same where only they change."""
    file: str
    """Where it was read, relative to the dataset's folder."""
    number: int
    """Of the line, counted from 1, or of a table's row, counted from 0."""

    @property
    def answer(self) -> str:
        return self.messages[-1].content

    def subject(self) -> str:
        return self.group

    def content(self) -> list[Any]:
        return [shown(self.question()), self.group, *([message.role, message.content] for message in self.messages)]

    def question(self) -> str:
        """What is asked last."""
        return self.messages[-2].content

    def asked(self) -> str:
        """A digest of all that is said before the answer, equal for conversations that differ in white space or case
        alone."""
        texts = [(message.role, same_text(message.content)) for message in self.messages[:-1]]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def order_problems(messages: Sequence[Message]) -> list[str]:
    """What is wrong with the order of roles: system or not, then user and assistant in turn, the assistant last."""
    first = 1 if messages and messages[0].role == "system" else 0
    turns = messages[first:]
    for index, message in enumerate(turns):
        expected = ("user", "assistant")[index % 2]
        if message.role != expected:
            return [f"message {first + index + 1} has the role {shown(message.role)}, expected {expected}"]
    if not turns or turns[-1].role != "assistant":
        return ["no answer: the last message is not the assistant's"]
    return []


def read_split(prepared_dir: Path, split: str) -> list[Record]:
    """The records of a prepared split, in their order.

    Raises UserError where prepare has not run, or what it wrote is damaged.
    """
    return read_prepared(prepared_dir, split, SCHEMA, _from_row)


def _from_row(row: dict[str, Any], _: PreparedRow) -> Record:
    messages = tuple(Message(**message) for message in row["messages"])
    if any(message.content is None for message in messages):
        raise ValueError("a message has no content")
    if problems := order_problems(messages):
        raise ValueError(problems[0])
    if unknown := [name for name in row["metrics"] if name not in get_args(TextMetric)]:
        raise ValueError(f"unknown metric {unknown[0]!r}")
    return Record(**{**row, "messages": messages, "metrics": tuple(row["metrics"])})
