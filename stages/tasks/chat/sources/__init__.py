"""Conversations in the form of TRL and of the hub: JSON Lines or parquet.

A line or row has `messages`, or `prompt` and `completion`; images in `images`, or one in `image`, with a part of the
type `image` in a content for each. Without such parts, images come before the first of the user's texts, as in TRL
(trl.data_utils.prepare_multimodal_messages).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.errors import UserError, pluralize
from stages.core.given_files import given_files, require_own
from stages.core.params.schema import DatasetParams, Text
from stages.core.records import STRICT, cut, dotted, shown
from stages.data.images import MAX_IMAGE_PIXELS, parse_image
from stages.data.parquet import read_rows
from stages.data.prepared import RawDataset, Rules, Sample, read_text_files
from stages.data.sources import READ_ON, Place, describe_folder, parquet_folder
from stages.data.texts import SURROGATE, TEXT_METRICS, TextMetric, json_lines, markup_problem, read_text
from stages.tasks.chat.samples import (
    IMAGES,
    SCHEMA,
    Message,
    MessageImage,
    Record,
    image_problems,
    json_fields,
    order_problems,
)

ROLES = ("system", "user", "assistant")
MAX_IMAGE_BYTES = 2**30
"""Limit of one image file."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reader:
    """Settings of a chat dataset."""

    group: Text | None = None
    """Column whose value groups conversations, such as a customer or a document; all of a group are in one split. Null:
    only conversations that ask the same are a group."""
    metrics: Annotated[tuple[TextMetric, ...], Field(min_length=1)] = TEXT_METRICS
    """Metrics of answers (docs/chat.md); models are ranked by the first."""
    max_image_pixels: Annotated[int, Field(ge=1, le=178_956_970)] = MAX_IMAGE_PIXELS
    """A conversation with a larger image is invalid, and refused before the image is decoded."""


def read(dataset: DatasetParams, reader: Reader) -> RawDataset[Record]:
    """Conversations of `folder:PATH`, JSON Lines or parquet, or of `hub:OWNER/NAME@REVISION`, parquet.

    Files train* and val*, dev* or test* are the two splits; without the latter a share of the groups is held out.
    Raises UserError if a folder holds files of both kinds, or no training files.
    """
    rules = _rules(reader)
    folder, resolved = parquet_folder(dataset.source)
    lines = [] if resolved.startswith("hub:") else given_files(folder, "*.jsonl")
    tables = given_files(folder, "data/*.parquet") or given_files(folder, "*.parquet")
    if lines and tables:
        raise UserError(
            f"{folder} holds JSON Lines and parquet: {describe_folder(folder)}. Keep one of them; {READ_ON}"
        )
    found = read_text_files(dataset, folder, lines or tables, partial(_read_file, folder=folder, reader=reader), rules)
    if any(record.shown_images for record in found.records()):
        rules = replace(rules, schema=SCHEMA.append(IMAGES))
    return replace(_grouped(found), rules=rules, source=resolved)


def _rules(reader: Reader) -> Rules[Record]:
    return Rules(
        schema=SCHEMA,
        summary=_summary,
        expected="train*.jsonl or train*.parquet with messages, or with prompt and completion, in each line or row",
        subject="question" if reader.group is None else f"question or {reader.group}",
        held_out=0.1,
        adapt=lambda split, record: record if split == "train" else replace(record, metrics=reader.metrics),
    )


def _summary(_: str, records: Sequence[Record]) -> dict[str, Any]:
    num_images = sum(len(record.shown_images) for record in records)
    return {
        **({"images": num_images} if num_images else {}),
        "groups": len({record.group for record in records}),
        "most_messages": max(len(record.messages) for record in records),
        "longest_question": max(len(record.question) for record in records),
        "longest_answer": max(len(record.answer) for record in records),
    }


def _grouped(dataset: RawDataset[Record]) -> RawDataset[Record]:
    """The dataset with a digest as each record's group, equal for records of the same group, or that ask the same."""
    parents: dict[str, str] = {}

    def root(node: str) -> str:
        while parents.setdefault(node, node) != node:
            parents[node] = node = parents[parents[node]]
        return node

    def node(record: Record) -> str:
        return f"named {json.dumps(record.group)}" if record.group else f"asked {record.question_digest()}"

    for record in dataset.records():
        asked, named = root(f"asked {record.question_digest()}"), root(node(record))
        parents[max(asked, named)] = min(asked, named)
    return dataset.mapped(lambda each: replace(each, group=hashlib.sha256(root(node(each)).encode()).hexdigest()))


def _read_file(path: Path, *, folder: Path, reader: Reader) -> Iterator[Sample[Record]]:
    file = path.relative_to(folder).as_posix()
    if path.suffix == ".parquet":
        for number, row in enumerate(read_rows(path)):
            yield _sample(Place(file, number, "row"), row, reader, folder=None)
        return
    for line, content in json_lines(read_text(path)):
        place = Place(file, line)
        yield (place, [content]) if isinstance(content, str) else _sample(place, content, reader, folder=path.parent)


def _sample(place: Place, content: Mapping[str, Any], reader: Reader, *, folder: Path | None) -> Sample[Record]:
    """A line or row as a record, whose `group` is the value of the reader's column, or empty without one.

    folder: that of the file, for the paths of images; None for a table, which has their bytes.
    """
    assert isinstance(place.number, int), place
    parsed = parse_conversation(content)
    problems = list(parsed) if isinstance(parsed, list) else []
    positions = () if isinstance(parsed, list) else parsed.image_positions
    images, unreadable = _read_images(_images_of(content), positions, folder, reader.max_image_pixels)
    problems += unreadable
    group = content.get(reader.group) if reader.group else ""
    if reader.group and reader.group not in content:
        problems.append(f"no {reader.group!r}, which is the dataset's reader.group; found {cut(', '.join(content))}")
    elif not isinstance(group, str | int) or (reader.group and group == ""):
        problems.append(f"{reader.group} is {shown(group)}, expected the text or number of a group")
    if isinstance(parsed, list):
        return place, problems
    if "json" in reader.metrics and json_fields(answer := parsed.messages[-1].content) is None:
        problems.append(f"the answer is no JSON, which the dataset's metrics need: {shown(answer)}")
    if problems:
        return place, problems
    return place, Record(
        id=f"{place.file}:{place.number}",
        messages=parsed.messages,
        group=str(group),
        file=place.file,
        number=place.number,
        shown_images=tuple(images),
    )


class ParsedConversation(NamedTuple):
    messages: tuple[Message, ...]
    image_positions: tuple[tuple[int, int], ...]
    """(message, offset) of each image: the message that shows it, counted from 0, and the characters before it."""


def parse_conversation(content: Mapping[str, Any]) -> ParsedConversation | list[str]:
    """The conversation of a line or row, or all its problems."""
    problems = ["tools is set, but this task does not read tools"] if _has(content, "tools") else []
    if _has(content, "images") and _has(content, "image"):
        problems.append("image and images are both set")
    if _has(content, "messages"):
        found = _messages("messages", content["messages"], problems)
    elif _has(content, "prompt") and _has(content, "completion"):
        found = [
            *_side("prompt", content["prompt"], "user", problems),
            *_side("completion", content["completion"], "assistant", problems),
        ]
    else:
        keys = cut(", ".join(dotted([str(key)]) for key in content)) or "nothing"
        return [*problems, f"neither messages nor prompt and completion; found {keys}"]
    messages = tuple(message for message, _ in found)
    positions = [(number, offset) for number, (_, offsets) in enumerate(found) for offset in offsets]
    count = len(_images_of(content))
    if count and not positions:
        positions = [(next((at for at, each in enumerate(messages) if each.role == "user"), 0), 0)] * count
    elif count != len(positions):
        problems.append(f"{pluralize(len(positions), 'part')} of the type image, but {pluralize(count, 'image')}")
    problems += _text_problems(messages, {number for number, _ in positions})
    if not problems:
        problems = order_problems(messages) or image_problems(messages, positions)
    return problems or ParsedConversation(messages, tuple(positions))


def _has(content: Mapping[str, Any], name: str) -> bool:
    """Whether there is a value: tables have nulls and empty lists where JSON has no key."""
    return content.get(name) is not None and content[name] not in ([], {})


def _side(name: str, value: Any, role: str, problems: list[str]) -> list[tuple[Message, list[int]]]:
    return [(Message(role, value), [])] if isinstance(value, str) else _messages(name, value, problems)


def _messages(name: str, value: Any, problems: list[str]) -> list[tuple[Message, list[int]]]:
    """Each message with the offsets of its images. Appends to `problems`."""
    if not isinstance(value, list):
        problems.append(f"{name} is {shown(value)}, expected a list of messages")
        return []
    found = []
    for number, message in enumerate(value, start=1):
        where = f"{name}, message {number}"
        if not isinstance(message, dict):
            problems.append(f"{where} is {shown(message)}, expected a role and a content")
            continue
        role, (text, offsets) = message.get("role"), _text(message.get("content"))
        if role not in ROLES:
            problems.append(f"{where} has the role {shown(role)}, expected one of {', '.join(ROLES)}")
        if text is None:
            problems.append(f"{where} has the content {shown(message.get('content'))}, expected text or parts of it")
        if message.get("tool_calls"):
            problems.append(f"{where} calls tools, which this task does not read")
        found.append((Message(str(role), text or ""), offsets))
    return found


def _text(content: Any) -> tuple[str | None, list[int]]:
    """The text of a content, which may be in parts, and the offsets of images in it; None if it is neither."""
    if isinstance(content, str):
        return content, []
    text, offsets = "", []
    for part in content if isinstance(content, list) and content else [None]:
        if not isinstance(part, dict):
            return None, []
        if part.get("type") == "image" and not any(value for key, value in part.items() if key != "type"):
            offsets.append(len(text))
        elif part.get("type") == "text" and isinstance(part.get("text"), str):
            text += part["text"]
        else:
            return None, []
    return text, offsets


def _text_problems(messages: Sequence[Message], with_images: set[int]) -> list[str]:
    texts = [message.content for message in messages]
    markup = markup_problem(*texts)
    return [
        *(["a text holds half of a surrogate pair"] if any(SURROGATE.search(text) for text in texts) else []),
        *(
            f"message {number + 1} is empty"
            for number, text in enumerate(texts)
            if not text.strip() and number not in with_images
        ),
        *([markup] if markup else []),
    ]


def _images_of(content: Mapping[str, Any]) -> list[Any]:
    """The values of a line or row that stand for images."""
    values = [content[name] for name in ("images", "image") if _has(content, name)]
    return [image for value in values for image in (value if isinstance(value, list) else [value])]


def _read_images(
    values: Iterable[Any], positions: Sequence[tuple[int, int]], folder: Path | None, max_pixels: int
) -> tuple[list[MessageImage], list[str]]:
    """The images, and all problems. positions: (message, offset) of each; none if they are not known."""
    found, problems = [], []
    for index, value in enumerate(values):
        name, encoded = _in_table(value) if folder is None else _in_folder(value, folder)
        if isinstance(encoded, str):
            problems.append(f"image {index + 1} {encoded}")
            continue
        fields, wrong = parse_image(name or f"image {index + 1}", encoded, max_pixels)
        problems += [f"image {index + 1}: {problem}" for problem in wrong]
        if not wrong and positions:
            message, offset = positions[index]
            found.append(MessageImage(**fields, message=message, offset=offset))
    return found, problems


def _in_table(value: Any) -> tuple[str, bytes | str]:
    """Name and bytes of an image, or its problem."""
    found = value if isinstance(value, dict) else {"bytes": value}
    encoded, path = found.get("bytes"), found.get("path")
    if not isinstance(encoded, bytes) or not encoded:
        return "", f"is {shown(value)}, expected its bytes"
    return path if isinstance(path, str) else "", encoded


def _in_folder(value: Any, folder: Path) -> tuple[str, bytes | str]:
    if not isinstance(value, str) or not value:
        return "", f"is {shown(value)}, expected the path of a file"
    pure = PurePosixPath(value)
    if pure.is_absolute() or ".." in pure.parts:
        return value, f"is {shown(value)}, which leads out of the dataset's folder"
    path = folder / pure
    try:
        require_own(path, folder)
        if (size := path.stat().st_size) > MAX_IMAGE_BYTES:
            return value, f"is {shown(value)}, which has {size:,} bytes, more than {MAX_IMAGE_BYTES:,}"
        return value, path.read_bytes()
    except (UserError, OSError, ValueError):  # ValueError: a name that no file can have
        return value, f"is {shown(value)}, which is no readable file of the dataset's folder"
