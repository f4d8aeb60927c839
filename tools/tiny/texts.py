"""Writes the text data sets of the demo, in the forms in which the published ones come.

    python -m tools.tiny.texts --out data/tiny

visempar       sentences with AMR graphs, as the text files of ViSemPar
truthfulqa     questions about the world, as the CSV of TruthfulQA
qmsum          queries about meetings, as LongBench's JSON Lines of QMSum
conversations  orders at made-up shops to be answered in JSON, as JSON Lines of messages
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

import click

from stages.core.records import publish_text
from stages.tasks.moe.samples import Record
from tools.tiny import knowledge, sentences
from tools.tiny.sentences import WORDS

T = TypeVar("T")

SEED = 7
SENTENCES, QUESTIONS, ORDERS = (480, 150), (800, 120), (640, 128)
"""Training and validation samples; QUESTIONS in each of the two domains."""

_PHRASINGS = (
    "Mua {count} hộp {goods} của quán {shop}, giao đến {city}.",
    "Giao đến {city} {count} hộp {goods} của quán {shop}.",
    "Tôi cần {count} hộp {goods}. Quán {shop}, ở {city}.",
    "Ở {city}, quán {shop} bán cho tôi {count} hộp {goods}.",
    "Quán {shop} giao {count} hộp {goods} đến {city}.",
    "{count} hộp {goods}, quán {shop}, {city}.",
)


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(out: Path) -> None:
    for name, text in files().items():
        publish_text(text, out / name)


def files() -> dict[str, str]:
    """The content of each file by its path. Each data set is one series cut in two, so that no sample is in both."""
    facts = knowledge.generate("truthfulqa", sum(QUESTIONS), SEED)
    meetings = knowledge.generate("qmsum", sum(QUESTIONS), SEED)
    queries = [{"input": each.question, "context": each.context, "answers": [each.best]} for each in meetings]
    found = {}
    for split, pairs in _splits(sentences.generate(sum(SENTENCES), SEED), SENTENCES):
        blocks = (f"#::id {split}-{n}\n#::snt {text}\n{graph}\n" for n, (text, graph) in enumerate(pairs, start=1))
        found[f"visempar/{split}.txt"] = "\n".join(blocks)
    for split, records in _splits(facts, QUESTIONS):
        found[f"truthfulqa/{split}.csv"] = _truthfulqa(records)
    for name, rows, sizes in (("qmsum", queries, QUESTIONS), ("conversations", orders(sum(ORDERS), SEED), ORDERS)):
        for split, part in _splits(rows, sizes):
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in part)
            found[f"{name}/{split}.jsonl"] = "".join(lines)
    return found


def _splits(rows: Sequence[T], sizes: tuple[int, int]) -> Iterator[tuple[str, Sequence[T]]]:
    assert len(rows) == sum(sizes), f"{len(rows)} rows, expected {sizes}"
    yield from (("train", rows[: sizes[0]]), ("val", rows[sizes[0] :]))


def orders(count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations that order goods, and `name`, the goods. The words of names repeat, a whole name never does: the
    model has to learn the form, to write numbers as digits, and to copy names that are not in the training data."""
    draw = random.Random(f"orders {seed}")
    names = iter(draw.sample([" ".join(pair) for pair in permutations(WORDS["syllables"], 2)], 2 * count))
    found = []
    for goods, shop in zip(names, names, strict=True):
        quantity, city = draw.randint(1, len(WORDS["numbers"])), draw.choice(WORDS["cities"]).replace("_", " ")
        number = WORDS["numbers"][quantity - 1]
        order = draw.choice(_PHRASINGS).format(count=number, goods=goods, shop=shop, city=city)
        answer = {"name": goods, "quant": quantity, "source": shop, "city": city}
        messages = [
            {"role": "system", "content": "Viết đơn hàng."},
            {"role": "user", "content": order[0].upper() + order[1:]},
            {"role": "assistant", "content": json.dumps(answer, ensure_ascii=False)},
        ]
        found.append({"messages": messages, "name": goods})
    return found


def _truthfulqa(records: Iterable[Record]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("Question", "Best Answer", "Correct Answers", "Incorrect Answers"))
    writer.writerows((each.question, each.best, "; ".join(each.correct), "; ".join(each.incorrect)) for each in records)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
