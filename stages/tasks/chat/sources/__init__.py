"""Conversations in the forms of `forms.FORMS`: JSON Lines, arrays of JSON or parquet.

Images are in `images`, or one in `image`, with a part of the type `image` in a content, or `<image>` in a text, for
each; or all in such parts. Without places, images come before the first of the user's texts, as in TRL
(trl.data_utils.prepare_multimodal_messages).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.errors import UserError
from stages.core.given_files import given_files
from stages.core.params.schema import DatasetParams, Text
from stages.core.records import STRICT, cut, shown
from stages.core.tasks import PlainReader
from stages.data.folder import IMAGES as IMAGE_SUFFIXES
from stages.data.folder import Folder
from stages.data.given_images import MAX_IMAGE_PIXELS, parse_image
from stages.data.groups import connected
from stages.data.near import describe_text
from stages.data.prepared import RawDataset, Rules, Sample, read_text_files
from stages.data.sources import READ_ON, Place, describe_folder, is_set, other_split, parquet_folder, table_rows
from stages.data.texts import TEXT_METRICS, TextMetric, composed, json_objects, read_text
from stages.tasks.chat.samples import IMAGES, SCHEMA, UNLEARNT, MessageImage, Record, json_fields, without_thinking
from stages.tasks.chat.sources.forms import PLACEHOLDER, parse_conversation, unread_keys

Fetch = Callable[[Any], tuple[str, bytes]]
"""From the value of a row that stands for an image to its name, empty for none, and its bytes. Raises UserError."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reader(PlainReader):
    """Settings of a chat dataset."""

    group: Text | None = None
    """Column that groups conversations, such as a customer or a document; all of a group are in one split. Null:
    only conversations that ask the same are a group."""
    metrics: Annotated[tuple[TextMetric, ...], Field(min_length=1)] = TEXT_METRICS
    """Metrics of answers (docs/chat.md); models are ranked by the first."""
    ignore: tuple[Text, ...] = ()
    """Keys of a row that are not read, also those that would be refused."""
    max_image_pixels: Annotated[int, Field(ge=1, le=178_956_970)] = MAX_IMAGE_PIXELS
    """A conversation with a larger image is invalid, and refused before the image is decoded."""


def read(dataset: DatasetParams, reader: Reader) -> RawDataset[Record]:
    """Conversations of `folder:PATH`, JSON Lines or parquet, or of `hub:OWNER/NAME@REVISION`, parquet.

    Files train* and val*, dev* or test* are the two splits; without the latter a share of the groups is held out.
    Raises UserError if a folder holds files of both kinds, or no training files.
    """
    rules: Rules[Record] = Rules(
        schema=SCHEMA,
        summary=_summary,
        expected="train*.jsonl, train*.json or train*.parquet with a conversation in each line, entry or row",
        subject="question" if reader.group is None else f"question or {reader.group}",
        describe=lambda record: describe_text(record.question, record.answer),
        held_out=0.1,
        adapt=lambda split, record: record if split == "train" else replace(record, metrics=reader.metrics),
    )
    folder, resolved = parquet_folder(dataset.source)
    lines = [] if resolved.startswith("hub:") else given_files(folder, "*.jsonl", "*.json", any_case=True)
    tables = given_files(folder, "data/*.parquet", any_case=True) or given_files(folder, "*.parquet", any_case=True)
    if lines and tables:
        raise UserError(f"{folder} holds JSON and parquet: {describe_folder(folder)}. Keep one of them; {READ_ON}")
    files = Folder(folder, dataset.splits)
    beside = [path for path in files.on_disk.values() if path.suffix.lower() not in (*IMAGE_SUFFIXES, ".md")]
    read_file = partial(_read_file, folder=files, reader=reader)
    found = read_text_files(dataset, folder, lines or tables, read_file, rules, others=beside)
    schema = SCHEMA
    if any(record.unlearnt for record in found.records()):
        schema = schema.append(UNLEARNT)
    if any(record.images for record in found.records()):
        schema = schema.append(IMAGES)
        found = found.mapped(_with_image)
    rules = replace(rules, schema=schema)
    return replace(_grouped(found), rules=rules, source=resolved)


def _with_image(record: Record) -> Record | list[str]:
    """The record, or its problem if it has a place for an image and no image: in a dataset without any, it is text."""
    placed = any(PLACEHOLDER in message.content for message in record.messages)
    return [f"{PLACEHOLDER} in a text, but no image"] if placed and not record.images else record


def _summary(_: str, records: Sequence[Record]) -> dict[str, Any]:
    num_images = sum(len(record.images) for record in records)
    return {
        **({"images": num_images} if num_images else {}),
        "groups": len({record.group for record in records}),
        "most_messages": max(len(record.messages) for record in records),
        "longest_question": max(len(record.question) for record in records),
        "longest_answer": max(len(record.answer) for record in records),
    }


def _grouped(dataset: RawDataset[Record]) -> RawDataset[Record]:
    """The dataset with a digest as each record's group, equal for records of the same group, that ask the same, or of
    which one begins with all of the other."""
    records = [*dataset.records()]
    openings = [[*each.opening_digests()] for each in records]
    keys = [(some[-2], each.group and json.dumps(each.group)) for each, some in zip(records, openings, strict=True)]
    whole = {digests[-1] for digests in openings}
    keys += [(digests[-2], each) for digests in openings for each in digests if each in whole]
    asked = iter(connected(keys))
    return dataset.mapped(lambda each: replace(each, group=hashlib.sha256(f"asked {next(asked)}".encode()).hexdigest()))


def _read_file(
    path: Path, file: str, split: str, unread: Counter[str], folder: Folder, reader: Reader
) -> Iterator[Sample[Record]]:
    if path.suffix.lower() == ".parquet":
        for place, row in table_rows(folder.root, path):
            yield _sample(place, row, split, reader, unread, _in_table)
        return
    unit, objects = json_objects(read_text(path))
    for number, content in objects:
        place, fetch = Place(file, number, unit), partial(_in_folder, folder=folder, near=file)
        yield (place, [content]) if isinstance(content, str) else _sample(place, content, split, reader, unread, fetch)


def _in_table(value: Any) -> tuple[str, bytes]:
    found = value if isinstance(value, dict) else {"bytes": value}
    encoded, path = found.get("bytes"), found.get("path")
    if not isinstance(encoded, bytes) or not encoded:
        raise UserError(f"found {shown(value)}, expected its bytes")
    return path if isinstance(path, str) else "", encoded


def _in_folder(value: Any, *, folder: Folder, near: str) -> tuple[str, bytes]:
    if not isinstance(value, str) or not value:
        raise UserError(f"found {shown(value)}, expected the path of a file")
    if not value.startswith("data:"):
        return value, folder.image(value, near=near)[1]
    try:
        return "", base64.b64decode(value.partition(";base64,")[2], validate=True)
    except ValueError as error:
        raise UserError(f"found {shown(value)}, expected base64: {error}") from None


def _sample(
    place: Place, row: Mapping[str, Any], split: str, reader: Reader, unread: Counter[str], fetch: Fetch
) -> Sample[Record]:
    """A line or row as a record. Its `group` is the value of the reader's column, or empty without one."""
    assert isinstance(place.number, int), place
    content = {key: value for key, value in row.items() if key not in reader.ignore}
    group = content.pop(reader.group, None) if reader.group else ""
    parsed = parse_conversation(content)
    unread.update(unread_keys(content))
    images, image_problems = _read_images(parsed.images, fetch, reader.max_image_pixels)
    problems = [*parsed.problems, *image_problems]
    if wrong := other_split(content, split):
        problems.append(f"{wrong}, or add it to reader.ignore")
    if reader.group and not is_set(group):
        problems.append(f"no value of {reader.group!r}, the dataset's reader.group; found {cut(', '.join(content))}")
    elif not isinstance(group, str | int):
        problems.append(f"{reader.group} is {shown(group)}, expected the text or number of a group")
    if "json" in reader.metrics and not parsed.problems:
        text = without_thinking(parsed.messages[-1].content)
        if json_fields(text) is None:
            problems.append(f"the answer is no JSON, or has a key twice; the dataset's metrics need it: {shown(text)}")
    if problems:
        return place, problems
    return place, Record(
        id=f"{place.file}:{place.number}",
        messages=parsed.messages,
        group=composed(str(group)),
        file=place.file,
        number=place.number,
        images=tuple(
            MessageImage(**fields, message=message, offset=offset)
            for fields, (message, offset) in zip(images, parsed.image_positions, strict=True)
        ),
        unlearnt=parsed.unlearnt,
    )


def _read_images(values: Sequence[Any], fetch: Fetch, max_pixels: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The fields of the images, and all problems."""
    images, problems = [], []
    for number, value in enumerate(values, start=1):
        try:
            name, encoded = fetch(value)
        except UserError as error:
            problems.append(f"image {number}: {error.message.removeprefix('image ')}")
            continue
        fields, wrong = parse_image(name or f"image {number}", encoded, max_pixels)
        problems += [f"image {number}: {problem}" for problem in wrong]
        images.append(fields)
    return images, problems
