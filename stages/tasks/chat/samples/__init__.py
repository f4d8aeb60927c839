"""Conversations that end with the answer to be learnt or compared with: the records, and the question to a model.

Images are in a column of their own, which datasets of texts do not have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from PIL import Image

from stages.core.records import distinct, shown
from stages.data.conversation import Conversation, message
from stages.data.images import ImageRecord
from stages.data.splits import IMAGE_COLUMN, read_prepared, schema_of
from stages.data.texts import TextMetric, composed, same_text


class Message(NamedTuple):
    role: str
    """system, user or assistant."""
    content: str


@dataclass(frozen=True, kw_only=True)
class MessageImage(ImageRecord):
    message: int
    """Number of the message that shows it, counted from 0."""
    offset: int
    """Characters of the message before it."""

    def content(self) -> list[Any]:
        return [*super().content(), self.message, self.offset]


IMAGE = schema_of(MessageImage, "image_id", "image", "width", "height", "sha256", "message", "offset")
IMAGES = pa.field(IMAGE_COLUMN, pa.list_(pa.struct(list(IMAGE))))
"""The additional column of a split with images."""


@dataclass(frozen=True, kw_only=True)
class Record:
    id: str
    messages: tuple[Message, ...]
    """`order_problems` is empty for them."""
    group: str
    """Equal for records that may not be in two splits."""
    metrics: tuple[TextMetric, ...] = ()
    """Metrics of an answer, the one that models are ranked by first. The training split has none, so that its file does
    not depend on them."""
    file: str
    """Path of the source, relative to the dataset's folder."""
    number: int
    """Line, counted from 1, or row of a table, counted from 0."""
    images: tuple[MessageImage, ...] = ()
    """In the order in which the user's messages show them."""
    unlearnt: tuple[int, ...] = ()
    """Numbers, counted from 0, of the assistant's messages that are context alone; never all of them."""

    @property
    def answer(self) -> str:
        return self.messages[-1].content

    @property
    def question(self) -> str:
        """The last message before the answer."""
        return self.messages[-2].content

    @property
    def asked(self) -> str:
        """All before the answer, each message with its role unless there is one alone."""
        before = self.messages[:-1]
        return self.question if len(before) == 1 else "\n\n".join(f"{each.role}: {each.content}" for each in before)

    def subject(self) -> str:
        return self.group

    def content(self) -> list[Any]:
        messages = [[message.role, message.content] for message in self.messages]
        images, unlearnt = [image.content() for image in self.images], [list(self.unlearnt)] * bool(self.unlearnt)
        return [shown(self.question), self.group, *messages, *images, *unlearnt]

    def opening_digests(self) -> Iterator[str]:
        """A digest of all messages and images through each message, equal for conversations that differ only in white
        space, case or the encoding of an image."""
        begun = hashlib.sha256()  # of the JSON of one list, which grows: a long conversation is hashed once
        for number, each in enumerate(self.messages):
            begun.update((", " if number else "[").encode() + json.dumps([each.role, same_text(each.content)]).encode())
            shown_by = [[image.message, image.sha256] for image in self.images if image.message <= number]
            whole = begun.copy()
            whole.update("".join(f", {json.dumps(image)}" for image in shown_by).encode() + b"]")
            yield whole.hexdigest()


SCHEMA = schema_of(Record, "id", "messages", "group", "metrics", "file", "number")
"""Columns of a prepared split without images."""
UNLEARNT = pa.field("unlearnt", pa.list_(pa.int64()))
"""The additional column of a split with answers that are not to be learnt."""


def order_problems(messages: Sequence[Message]) -> list[str]:
    """Faults in the order of roles: an optional system, then user and assistant in turn, the assistant last."""
    first = 1 if messages and messages[0].role == "system" else 0
    turns = messages[first:]
    for index, turn in enumerate(turns):
        expected = ("user", "assistant")[index % 2]
        if turn.role != expected:
            return [f"message {first + index + 1} has the role {shown(turn.role)}, expected {expected}"]
    if not turns or turns[-1].role != "assistant":
        return ["no answer: the last message is not the assistant's"]
    return []


def read_split(prepared_dir: Path, split: str) -> list[Record]:
    """The records of a prepared split, in their order. Raises UserError if it is not prepared, or damaged."""
    return read_prepared(prepared_dir, split, Record, SCHEMA, may_have=(UNLEARNT, IMAGES))


def check(model_type: str) -> None:
    """Takes any model. Whether it takes images is checked where a conversation is encoded."""


def conversation(record: Record, *, answered: bool, answer_format: None = None) -> Conversation:
    """The messages, without the last one unless `answered`."""
    messages = []
    for number, each in enumerate(record.messages if answered else record.messages[:-1]):
        offsets = [image.offset for image in record.images if image.message == number]
        messages.append({"role": each.role, "content": _parts(each.content, offsets)})
    return Conversation(sample_id=record.id, messages=messages, images=record.images, unlearnt=record.unlearnt)


def candidates(records: Sequence[Record], *, answer_format: None = None) -> list[Conversation]:
    """The answered conversations that a score needs likelihoods of: all if perplexity is a metric, else none."""
    return [conversation(record, answered=True) for record in records if "perplexity" in record.metrics]


def probes(answer_format: None = None) -> list[Conversation]:
    """Three answered conversations to compare models on: of one turn, of two, and about an image, which text models do
    not take. None has a system prompt, which some chat templates refuse (Gemma 2, Mistral 7B v0.1)."""
    day = [message("user", "Which day follows Monday?"), message("assistant", "Tuesday.")]
    ice = [message("user", "Is ice warm?"), message("assistant", "No.")]
    snow = [message("user", "What colour is snow?"), message("assistant", "White.")]
    image = Image.linear_gradient("L").resize((224, 280)).convert("RGB")
    content = [{"type": "image"}, {"type": "text", "text": "Is it darker above?"}]
    asked = [{"role": "user", "content": content}, message("assistant", "Yes.")]
    return [
        Conversation(sample_id="probe-0", messages=day),
        Conversation(sample_id="probe-1", messages=[*ice, *snow]),
        Conversation(sample_id="probe-image", messages=asked, images=[image]),
    ]


def _parts(text: str, offsets: Sequence[int]) -> list[dict[str, Any]]:
    """A text with an image before the character at each of these offsets, which are in order."""
    if not offsets:
        return [{"type": "text", "text": text}]
    parts: list[dict[str, Any]] = []
    for start, stop in zip((0, *offsets), (*offsets, len(text)), strict=True):
        parts += [{"type": "text", "text": text[start:stop]}, {"type": "image"}]
    return [part for part in parts[:-1] if part.get("text") != ""]


def without_thinking(text: str) -> str:
    """An answer or completion without the thinking at its beginning, through </think>."""
    _, thinks, answer = text.rpartition("</think>")
    return answer.lstrip() if thinks else text


Field = tuple[tuple[str | int, ...], type, Any]
"""A field's path, kind and value, texts in NFC; 1 and 1.0 are equal numbers, True is none."""


def json_fields(text: str) -> set[Field] | None:
    """The fields of a JSON document: its values, with the names and indices that lead to them. An empty list or object
    is a field too.

    None for a text that is not JSON (RFC 8259: no NaN, only white space around the document), or has a key twice, as
    readers differ in which of the two they take.
    """

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        document = json.loads(text, parse_constant=refuse, object_pairs_hook=distinct)
    except (ValueError, RecursionError):
        return None
    fields = set[Field]()
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), document)]
    while waiting:  # not by recursion: a completion may nest as deep as it is long
        path, value = waiting.pop()
        if isinstance(value, dict | list) and value:
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [((*path, _composed(key)), each) for key, each in inner]
        else:
            kind = float if type(value) is int else type(value)
            fields.add((path, kind, None if value in ([], {}) else _composed(value)))
    return fields


def _composed(value: Any) -> Any:
    return composed(value) if isinstance(value, str) else value


def field_accuracy(completion: str, truth: str) -> float:
    """Share of the fields of either JSON text that are in both, the values equal, from 0 to 1; 0 if one is no JSON."""
    ours, theirs = json_fields(completion), json_fields(truth)
    return len(ours & theirs) / len(ours | theirs) if ours and theirs else 0.0
