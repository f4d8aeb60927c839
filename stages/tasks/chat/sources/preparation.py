"""Files of conversations as prepared splits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.documents import shown
from stages.core.errors import UserError
from stages.core.given_files import given_files
from stages.core.params.schema import STRICT, Text
from stages.kit.data.images import MAX_IMAGE_PIXELS
from stages.kit.data.parquet import read_rows
from stages.kit.data.prepared import RawDataset, Rules, Sample, read_text_files
from stages.kit.data.sources import READ_ON, Place, describe_folder, files_by_split, parquet_folder, split_paths
from stages.kit.data.texts import TEXT_METRICS, TextMetric, json_lines, read_text
from stages.tasks.chat.samples.fields import parsed
from stages.tasks.chat.samples.records import IMAGES, SCHEMA, Record
from stages.tasks.chat.sources.messages import Talk, pictures_of, talk_of
from stages.tasks.chat.sources.pictures import read_pictures

Samples = Iterable[Sample[Record]]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reader:
    """Settings of a chat dataset."""

    group: Text | None = None
    """Column whose value groups conversations, such as a customer or a document; all of a group are in one split. Null:
    only conversations that ask the same are a group."""
    metrics: Annotated[tuple[TextMetric, ...], Field(min_length=1)] = TEXT_METRICS
    """How answers are scored (docs/chat.md); models are ranked by the first."""
    max_image_pixels: Annotated[int, Field(ge=1, le=178_956_970)] = MAX_IMAGE_PIXELS
    """A conversation with a larger image is invalid, and refused before the image is decoded."""


def read(source: str, reader: Reader) -> RawDataset[Record]:
    """Conversations of `folder:PATH`, JSON Lines or parquet, or of `hub:OWNER/NAME@REVISION`, parquet.

    Files train* and val*, dev* or test* are the two splits; without the latter a share of the groups is held out.
    Raises UserError if a folder holds files of both kinds, or no training files.
    """
    dataset = _from_files(source, reader)
    dataset.splits = splits = _in_groups(dataset.splits)
    if any(isinstance(each, Record) and each.pictures for samples in splits.values() for _, each in samples):
        dataset.rules = replace(dataset.rules, schema=SCHEMA.append(IMAGES))
    return dataset


def _rules(reader: Reader) -> Rules[Record]:
    def adapt(split: str, record: Record) -> Record:
        return record if split == "train" else replace(record, metrics=reader.metrics)

    return Rules(
        schema=SCHEMA,
        summary=_summary,
        expected="train*.jsonl or train*.parquet with messages, or with prompt and completion, in each line or row",
        subject="question" if reader.group is None else f"question or {reader.group}",
        held_out=0.1,
        adapt=adapt,
    )


def _summary(_: str, records: Sequence[Record]) -> dict[str, Any]:
    num_pictures = sum(len(record.pictures) for record in records)
    return {
        **({"pictures": num_pictures} if num_pictures else {}),
        "groups": len({record.group for record in records}),
        "most_messages": max(len(record.messages) for record in records),
        "longest_question": max(len(record.question()) for record in records),
        "longest_answer": max(len(record.answer) for record in records),
    }


def _from_files(source: str, reader: Reader) -> RawDataset[Record]:
    rules, parse = _rules(reader), partial(_sample, reader=reader)
    folder, resolved, revision = parquet_folder(source)
    lines = [] if revision else given_files(folder, "*.jsonl")
    tables = given_files(folder, "*.parquet", "data/*.parquet")
    if lines and tables:
        raise UserError(
            f"{folder} holds JSON Lines and parquet: {describe_folder(folder)}. Keep one of them; {READ_ON}"
        )
    if lines:
        chosen = files_by_split(lines)
    else:
        chosen = {split: paths for split in ("train", "val") if (paths := split_paths(folder, split))}
    if not chosen.get("train"):
        raise UserError(
            f"{folder} has no training files: {describe_folder(folder)}. Expected: {rules.expected}; {READ_ON}"
        )
    found = read_text_files(
        resolved,
        lines or tables,
        chosen,
        lambda path: _read_file(path, path.relative_to(folder).as_posix(), parse),
        rules,
        held_out=f"{rules.held_out:.0%} of the training groups, by a digest of each",
    )
    return replace(found, revision=revision)


def _read_file(path: Path, file: str, parse: Callable[..., Sample[Record]]) -> Iterator[Sample[Record]]:
    if path.suffix == ".parquet":
        for number, row in enumerate(read_rows(path)):
            yield parse(Place(file, number, "row"), row, folder=None)
        return
    for line, content in json_lines(read_text(path)):
        place = Place(file, line)
        yield (place, [content]) if isinstance(content, str) else parse(place, content, folder=path.parent)


def _sample(
    place: Place,
    content: Mapping[str, Any],
    *,
    reader: Reader,
    folder: Path | None,
) -> Sample[Record]:
    """Its `group` is what the column says, or empty without one. folder: as of read_pictures."""
    assert isinstance(place.number, int), place
    talk = talk_of(content)
    problems = [] if isinstance(talk, Talk) else list(talk)
    spots = talk.spots if isinstance(talk, Talk) else ()
    pictures, unreadable = read_pictures(pictures_of(content), spots, folder, reader.max_image_pixels)
    problems += unreadable
    group = reader.group
    value = content.get(group) if group else ""
    if not isinstance(value, str | int) or (group and value == ""):
        problems.append(f"{group} is {shown(value)}, expected the text or number of a group")
    if not isinstance(talk, Talk):
        return place, problems
    if "json" in reader.metrics and parsed(answer := talk.messages[-1].content) is None:
        problems.append(f"the answer is no JSON, by which the dataset's metrics score: {shown(answer)}")
    if problems:
        return place, problems
    name = f"{place.file}:{place.number}"
    record = Record(id=name, messages=talk.messages, group=str(value), file=place.file, number=place.number)
    return place, replace(record, pictures=tuple(pictures))


def _in_groups(splits: Mapping[str, Samples]) -> dict[str, Samples]:
    """The samples with the digest of their group: records of the same group, or that ask the same, have one."""
    parents: dict[str, str] = {}

    def root(node: str) -> str:
        while parents.setdefault(node, node) != node:
            parents[node] = node = parents[parents[node]]
        return node

    read = {split: list(samples) for split, samples in splits.items()}
    for samples in read.values():
        for _, record in samples:
            if isinstance(record, Record):
                asked, named = root(f"asked {record.asked()}"), root(_node(record))
                parents[max(asked, named)] = min(asked, named)

    def grouped(record: Record | list[str]) -> Record | list[str]:
        if isinstance(record, list):
            return record
        return replace(record, group=hashlib.sha256(root(_node(record)).encode()).hexdigest())

    return {split: [(place, grouped(record)) for place, record in samples] for split, samples in read.items()}


def _node(record: Record) -> str:
    return f"named {json.dumps(record.group)}" if record.group else f"asked {record.asked()}"
