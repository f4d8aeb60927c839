"""Conversations for tests, as lines of JSON and as records."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.kit.data.texts import TextMetric
from stages.tasks.chat.samples.records import Message, Picture, Record
from tests.kit.data.pictures import picture


def said(question: str, answer: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*([{"role": "system", "content": system}] if system else []), *messages]


def talk(number: int, **more: Any) -> dict[str, Any]:
    return {"messages": said(f"What is {number}?", f"A number, {number}."), **more}


def write_lines(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return path


def record(question: str, answer: str, *metrics: TextMetric, number: int = 1) -> Record:
    messages = (Message("user", question), Message("assistant", answer))
    return Record(id=f"a:{number}", messages=messages, group=question, metrics=metrics, file="a", number=number)


def shown(messages: tuple[Message, ...], spots: Sequence[tuple[int, int]], number: int = 1) -> Record:
    """A record with a plain picture at each of these places."""
    pictures = tuple(
        Picture(image_id="p", image=picture(), width=40, height=30, sha256="f", message=message, offset=offset)
        for message, offset in spots
    )
    return Record(id=f"a:{number}", messages=messages, group="g", file="a", number=number, pictures=pictures)
