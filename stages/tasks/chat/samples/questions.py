"""What a model is asked: the conversation up to its last answer, with the pictures that it shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.kit.families import family_of
from stages.tasks.chat.samples.records import Message, Picture, Record

_PROBES = (
    (Message("user", "Which day follows Monday?"), Message("assistant", "Tuesday.")),
    (
        Message("system", "Answer in one word."),
        Message("user", "Is ice warm?"),
        Message("assistant", "No."),
        Message("user", "What colour is snow?"),
        Message("assistant", "White."),
    ),
)


def check(model_type: str, answer_format: str | None) -> None:
    """Raises UserError for a model of an unknown family, and for an answer format, as there is but one.

    Whether the model takes images is checked where a conversation is encoded.
    """
    family_of(model_type)
    if answer_format is not None:
        raise UserError(f"answer_format: chat has one answer format, those of the data; found {answer_format!r}")


def conversation(record: Record, *, answered: bool, answer_format: None = None) -> Conversation:
    """The messages, without the last one unless `answered`."""
    return _conversation(record.id, record.messages if answered else record.messages[:-1], record.pictures)


def probes(answer_format: None = None) -> list[Conversation]:
    """Three answered conversations to compare models on: of one turn, of two behind a system prompt, and about a
    picture, which text models do not take."""
    texts = [_conversation(f"probe-{index}", messages) for index, messages in enumerate(_PROBES)]
    picture = Image.linear_gradient("L").resize((224, 280)).convert("RGB")
    content = [{"type": "image"}, {"type": "text", "text": "Is it darker above?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
    shown = Conversation(
        sample_id="probe-picture", messages=[{"role": "user", "content": content}, answer], images=[picture]
    )
    return [*texts, shown]


def _conversation(sample_id: str, messages: Sequence[Message], pictures: Sequence[Picture] = ()) -> Conversation:
    said = [
        {"role": each.role, "content": _parts(each.content, [one.offset for one in pictures if one.message == number])}
        for number, each in enumerate(messages)
    ]
    return Conversation(sample_id=sample_id, messages=said, images=pictures)


def _parts(text: str, offsets: Sequence[int]) -> list[dict[str, Any]]:
    """A text with a picture in front of the character at each of these offsets, which are in order."""
    if not offsets:
        return [{"type": "text", "text": text}]
    parts: list[dict[str, Any]] = []
    for start, stop in zip((0, *offsets), (*offsets, len(text)), strict=True):
        parts += [{"type": "text", "text": text[start:stop]}, {"type": "image"}]
    return [part for part in parts[:-1] if part.get("text") != ""]
