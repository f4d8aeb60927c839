"""Lines and rows of data as messages, in the form of TRL and of the hub: `messages`, or `prompt` and `completion`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.core.documents import cut, dotted, shown
from stages.kit.data.texts import SURROGATE, markup_problem
from stages.tasks.chat.samples.records import Message, order_problems

ROLES = ("system", "user", "assistant")
UNREAD = {"image": "pictures", "images": "pictures", "tools": "tools"}
"""Columns that would change what the model is shown, and what they hold."""


def messages_of(content: Mapping[str, Any]) -> tuple[Message, ...] | list[str]:
    """The conversation of a line or row, or everything that is wrong with it."""
    problems = [
        f"{name} is set, but this task does not read {what}" for name, what in UNREAD.items() if _given(content, name)
    ]
    if _given(content, "messages"):
        found = _messages("messages", content["messages"], problems)
    elif _given(content, "prompt") and _given(content, "completion"):
        found = [
            *_side("prompt", content["prompt"], "user", problems),
            *_side("completion", content["completion"], "assistant", problems),
        ]
    else:
        keys = cut(", ".join(dotted([str(key)]) for key in content)) or "nothing"
        return [*problems, f"neither messages nor prompt and completion; found {keys}"]
    problems += _text_problems(found)
    if not problems:
        problems = order_problems(found)
    return problems or tuple(found)


def _given(content: Mapping[str, Any], name: str) -> bool:
    """Whether there is anything: tables have nulls and empty lists where JSON has no key."""
    return content.get(name) is not None and content[name] not in ([], {})


def _side(name: str, value: Any, role: str, problems: list[str]) -> list[Message]:
    return [Message(role, value)] if isinstance(value, str) else _messages(name, value, problems)


def _messages(name: str, value: Any, problems: list[str]) -> list[Message]:
    if not isinstance(value, list):
        problems.append(f"{name} is {shown(value)}, expected a list of messages")
        return []
    found = []
    for number, message in enumerate(value, start=1):
        where = f"{name}, message {number}"
        if not isinstance(message, dict):
            problems.append(f"{where} is {shown(message)}, expected a role and a content")
            continue
        role, text = message.get("role"), _text(message.get("content"))
        if role not in ROLES:
            problems.append(f"{where} has the role {shown(role)}, expected one of {', '.join(ROLES)}")
        if text is None:
            problems.append(f"{where} has the content {shown(message.get('content'))}, expected text")
        if message.get("tool_calls"):
            problems.append(f"{where} calls tools, which this task does not read")
        found.append(Message(str(role), text or ""))
    return found


def _text(content: Any) -> str | None:
    """The text of a content, which may be in parts; None where it is anything else, such as a picture."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) and content else [None]
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("type") == "text" and "text" in part]
    return "".join(texts) if len(texts) == len(parts) and all(isinstance(text, str) for text in texts) else None


def _text_problems(messages: Sequence[Message]) -> list[str]:
    texts = [message.content for message in messages]
    problems = []
    if any(SURROGATE.search(text) for text in texts):
        problems.append("a text holds half of a surrogate pair")
    problems += [f"message {number} is empty" for number, text in enumerate(texts, start=1) if not text.strip()]
    markup = markup_problem(*texts)
    return [*problems, *([markup] if markup else [])]
