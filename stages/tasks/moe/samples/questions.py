"""What a model is asked, and how it is to answer."""

from __future__ import annotations

from typing import Any

from stages.kit.data.conversation import Conversation
from stages.kit.errors import UserError
from stages.tasks.moe.samples.records import Record

PROMPT = "Answer the question truthfully.\n"
TRANSCRIPT, QUERY = "Meeting transcript:\n", "\n\nAnswer the query about the meeting.\n"
"""What stands before a transcript, and between it and the query."""
FAMILIES = ("qwen2", "qwen2_moe")
"""Model families (`model_type` of a config) that this task has been made for; Qwen2.5 is a qwen2."""

_PROBES = (
    (None, "Which side of a road do people drive on?", "That depends on the country"),
    ("Chair: Let us begin.\nClerk: The budget is agreed.", "What was agreed?", "The budget was agreed."),
)


def check(model_type: str, target: str | None) -> None:
    """Raises UserError for a model that is not one of text like Qwen2, and for a target, as there is but one form."""
    if model_type not in FAMILIES:
        raise UserError(f"this task trains text models of {', '.join(FAMILIES)}; the base is a {model_type}")
    if target is not None:
        raise UserError(f"this task has one form of answers, sentences; it knows no target {target!r}")


def completion(target: None) -> None:
    """Nothing in an answer says that it is complete but the end of the turn."""


def conversation(record: Record, *, answered: bool, target: None = None) -> Conversation:
    """The question, after its transcript if it has one; with the best answer as the assistant's where `answered`.

    Where the whole is too long the transcript may be cut, and nothing else.
    """
    return answered_with(record, record.best if answered else None)


def answered_with(record: Record, answer: str | None) -> Conversation:
    """The question with an answer of any kind, or with none."""
    return _conversation(record.id, record.context, record.question, answer)


def probes(target: None = None) -> list[Conversation]:
    """Two answered conversations, without and with a transcript, to compare two models on."""
    return [
        _conversation(f"probe-{index}", context, question, answer)
        for index, (context, question, answer) in enumerate(_PROBES)
    ]


def _conversation(sample_id: str, context: str | None, question: str, answer: str | None) -> Conversation:
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"{PROMPT if context is None else QUERY}{question}"}]
    if context is not None:
        transcript = {"type": "text", "text": context, "shortenable": True}
        parts = [{"type": "text", "text": TRANSCRIPT}, transcript, *parts]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    if answer is not None:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return Conversation(sample_id=sample_id, messages=messages)
