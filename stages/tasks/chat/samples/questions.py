"""What a model is asked: the conversation up to its last answer."""

from __future__ import annotations

from collections.abc import Sequence

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.kit.families import require_text
from stages.tasks.chat.samples.records import Message, Record

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


def check(model_type: str, target: str | None) -> None:
    """Raises UserError for a model that is not one of text alone, and for a target, as there is but one form."""
    require_text(model_type, "chat")
    if target is not None:
        raise UserError(f"chat has one form of answers, those of the data; it knows no target {target!r}")


def completion(target: None) -> None:
    """Nothing in an answer says that it is complete but the end of the turn."""


def conversation(record: Record, *, answered: bool, target: None = None) -> Conversation:
    """The messages, without the last one unless `answered`."""
    return _conversation(record.id, record.messages if answered else record.messages[:-1])


def probes(target: None = None) -> list[Conversation]:
    """Two answered conversations to compare models on, of one turn and of two behind a system prompt."""
    return [_conversation(f"probe-{index}", messages) for index, messages in enumerate(_PROBES)]


def _conversation(sample_id: str, messages: Sequence[Message]) -> Conversation:
    said = [{"role": each.role, "content": [{"type": "text", "text": each.content}]} for each in messages]
    return Conversation(sample_id=sample_id, messages=said)
