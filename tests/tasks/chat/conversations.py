"""Conversations for tests, as lines of JSON and as records."""

from collections.abc import Sequence
from typing import Any

from stages.data.texts import TextMetric
from stages.tasks.chat.samples import Message, MessageImage, Record
from tests.data.images import png


def messages(question: str, answer: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


def line(number: int, **more: Any) -> dict[str, Any]:
    return {"messages": messages(f"What is {number}?", f"A number, {number}."), **more}


def record(question: str, answer: str, *metrics: TextMetric, number: int = 1) -> Record:
    turns = (Message("user", question), Message("assistant", answer))
    return Record(id=f"a:{number}", messages=turns, group=question, metrics=metrics, file="a", number=number)


def with_images(turns: tuple[Message, ...], positions: Sequence[tuple[int, int]], number: int = 1) -> Record:
    """A record with a plain image at each of these positions."""
    images = tuple(
        MessageImage(image_id="p", image=png(), width=40, height=30, sha256="f", message=message, offset=offset)
        for message, offset in positions
    )
    return Record(id=f"a:{number}", messages=turns, group="g", file="a", number=number, images=images)
