"""AMR corpora as text files (`samples.blocks`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.core.given_files import given_files
from stages.core.params.schema import DatasetParams
from stages.core.tasks import PlainReader
from stages.data.near import describe_text
from stages.data.prepared import RawDataset, Rules, Sample, read_text_files
from stages.data.sources import Place, source_folder
from stages.data.texts import markup_problem
from stages.tasks.amr.samples import ANSWER_FORMATS, SCHEMA, Record, encode, parse_record
from stages.tasks.amr.samples.blocks import FIELD, Block, read_blocks, read_lines, unread_fields
from stages.tasks.amr.samples.graphs import MalformedGraph


def _summary(_: str, records: Sequence[Record]) -> dict[str, Any]:
    graphs = [record.parsed() for record in records]
    return {
        "repeated_sentences": len(records) - len({record.subject() for record in records}),
        "graphs_with_references": sum(bool(graph.referred()) for graph in graphs),
        "largest_graph": max(sum(1 for _ in graph.walk()) for graph in graphs),
        "longest_sentence": max(len(record.sentence) for record in records),
        "longest_answer": {
            answer_format: max(len(encode(graph, answer_format)) for graph in graphs)
            for answer_format in ANSWER_FORMATS
        },
    }


RULES = Rules(
    schema=SCHEMA,
    summary=_summary,
    expected="train*.txt with #::snt lines, each above its graph in PENMAN",
    subject="sentence",
    describe=lambda record: describe_text(record.sentence),
    held_out=0.1,
)


def read(dataset: DatasetParams, _: PlainReader) -> RawDataset[Record]:
    """The corpus of `folder:PATH`: train*.txt and val*, dev* or test*.txt.

    Without a validation file a share of the training sentences is held out. A sample with an id that is not unique gets
    FILE:LINE instead.
    """
    known = "folder:PATH (the corpora are not on the hub: put their text files into a folder)"
    folder = source_folder(dataset.source, known=known)
    found = read_text_files(dataset, folder, given_files(folder, "*.txt", any_case=True), _read_file, RULES)
    counts = Counter(record.id for record in found.records())
    return found.mapped(lambda each: each if counts[each.id] == 1 else replace(each, id=f"{each.file}:{each.line}"))


def _read_file(path: Path, file: str, _: str, unread: Counter[str]) -> Iterator[Sample[Record]]:
    lines = read_lines(path)
    unread.update(name for line in lines for name in unread_fields(line))
    blocks = list(read_blocks(lines))
    if not any(block.sentence is not None for block in blocks):
        yield Place(file), ["no sentence; expected #::snt lines, each above its graph"]
        return
    for block in blocks:
        yield _sample(block, file)


def _sample(block: Block, file: str) -> Sample[Record]:
    place, graph = Place(file, block.line), block.graph_text()
    if block.sentence is None:
        found = "a graph" if graph else f"an id, {block.id},"
        return place, [f"{found} without a sentence; expected a line #::snt above it"]
    if not block.sentence:
        return place, ["an empty sentence"]
    if field := FIELD.search(block.sentence):
        return place, [f"a sentence with the field {field[0]}; put it on a line of its own: {block.sentence}"]
    if not graph:
        return place, [f"a sentence without a graph: {block.sentence}"]
    try:
        record = parse_record(block.id or f"{file}:{block.line}", block.sentence, graph, file=file, line=block.line)
    except MalformedGraph as malformed:
        line = block.graph_line + (malformed.line or 0)
        return Place(file, line), [f"{malformed}; the sentence is: {block.sentence}"]
    # The canonical graph joins the words of a concept, and so may make a token of two halves.
    if problem := markup_problem(record.sentence, record.graph, record.canonical):
        return place, [f"{problem}; the sentence is: {record.sentence}"]
    return place, record
