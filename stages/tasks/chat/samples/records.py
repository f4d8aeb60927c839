"""The records of this task: a conversation that ends with the answer to be learnt, or to be compared with.

Its pictures are in a column of their own, which datasets of texts alone do not have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pyarrow as pa

from stages.core.documents import shown
from stages.kit.data.images import ImageRecord, require_prepared_image
from stages.kit.data.prepared import IMAGE_COLUMN, PreparedRow, read_prepared, to_row
from stages.kit.data.texts import TextMetric, same_text

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
"""Columns of a prepared split without pictures."""

PICTURE = pa.schema(
    [
        ("image_id", pa.string()),
        ("image", pa.binary()),
        ("width", pa.int64()),
        ("height", pa.int64()),
        ("sha256", pa.string()),
        ("message", pa.int64()),
        ("offset", pa.int64()),
    ]
)
IMAGES = pa.field(IMAGE_COLUMN, pa.list_(pa.struct(list(PICTURE))))
"""The column more that a split with pictures has."""


class Message(NamedTuple):
    role: str
    """system, user or assistant."""
    content: str


@dataclass(frozen=True, kw_only=True)
class Picture(ImageRecord):
    message: int
    """Which of the messages shows it, counted from 0."""
    offset: int
    """The characters of the message in front of it."""

    def content(self) -> list[Any]:
        return [*super().content(), self.message, self.offset]


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
    pictures: tuple[Picture, ...] = ()
    """In the order in which they are shown; `picture_problems` finds nothing wrong with their places."""

    @property
    def images(self) -> list[dict[str, Any]]:
        """The value of the column IMAGES."""
        return [to_row(picture, PICTURE) for picture in self.pictures]

    @property
    def answer(self) -> str:
        return self.messages[-1].content

    def subject(self) -> str:
        return self.group

    def content(self) -> list[Any]:
        messages = [[message.role, message.content] for message in self.messages]
        return [shown(self.question()), self.group, *messages, *(picture.content() for picture in self.pictures)]

    def question(self) -> str:
        """What is asked last."""
        return self.messages[-2].content

    def asked(self) -> str:
        """A digest of all that is said and shown before the answer, equal for conversations that differ in white space
        or case alone, or in how a picture is encoded."""
        said: list[Any] = [(message.role, same_text(message.content)) for message in self.messages[:-1]]
        said += [(picture.message, picture.sha256) for picture in self.pictures]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


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


def picture_problems(messages: Sequence[Message], spots: Sequence[tuple[int, int]]) -> list[str]:
    """What is wrong with where pictures are shown: in the user's messages, in their order.

    spots: `message` and `offset` of each.
    """
    for message, offset in spots:
        if not (0 <= message < len(messages) and 0 <= offset <= len(messages[message].content)):
            return [f"no place {offset} of message {message + 1}, which a picture has"]
        if messages[message].role != "user":
            return [f"message {message + 1} shows a picture, which only a user's message may"]
    return [] if list(spots) == sorted(spots) else ["pictures are not in the order in which they are shown"]


def read_split(prepared_dir: Path, split: str) -> list[Record]:
    """The records of a prepared split, in their order.

    Raises UserError where prepare has not run, or what it wrote is damaged.
    """
    return read_prepared(prepared_dir, split, SCHEMA, _from_row, may_have=IMAGES)


def _from_row(row: dict[str, Any], place: PreparedRow) -> Record:
    messages = tuple(Message(**message) for message in row["messages"])
    if any(message.content is None for message in messages):
        raise ValueError("a message has no content")
    if problems := order_problems(messages):
        raise ValueError(problems[0])
    if unknown := [name for name in row["metrics"] if name not in get_args(TextMetric)]:
        raise ValueError(f"unknown metric {unknown[0]!r}")
    pictures = tuple(_picture(fields, place) for fields in row.pop(IMAGES.name, ()))
    if problems := picture_problems(messages, [(picture.message, picture.offset) for picture in pictures]):
        raise ValueError(problems[0])
    return Record(**{**row, "messages": messages, "metrics": tuple(row["metrics"]), "pictures": pictures})


def _picture(fields: dict[str, Any], place: PreparedRow) -> Picture:
    if lacking := [name for name, value in fields.items() if value is None]:
        raise ValueError(f"a picture has no {lacking[0]}")
    require_prepared_image(fields)
    return Picture(**fields, place=place)
