"""Conversations for tests, as lines of JSON and as records."""

import json
from pathlib import Path
from typing import Any

from stages.core.params.schema import TextMetric
from stages.tasks.chat.samples.records import Message, Record


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
