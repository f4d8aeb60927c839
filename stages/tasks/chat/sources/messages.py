"""Lines and rows of data as messages, in the form of TRL and of the hub.

`messages`, or `prompt` and `completion`; pictures in `images`, or one in `image`, with a part of the type `image` in a
content for each. Where there are no such parts, pictures come before the first of the user's texts, as TRL has it
(trl.data_utils.prepare_multimodal_messages).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stages.core.documents import cut, dotted, shown
from stages.core.errors import counted
from stages.kit.data.texts import SURROGATE, markup_problem
from stages.tasks.chat.samples.records import Message, order_problems, picture_problems

ROLES = ("system", "user", "assistant")


class Talk(NamedTuple):
    messages: tuple[Message, ...]
    spots: tuple[tuple[int, int], ...]
    """Of each picture: the message that shows it, counted from 0, and the characters of its text in front of it."""


def pictures_of(content: Mapping[str, Any]) -> list[Any]:
    """What the line or row has for pictures, as it has them."""
    given = [content[name] for name in ("images", "image") if _given(content, name)]
    return [one for some in given for one in (some if isinstance(some, list) else [some])]


def talk_of(content: Mapping[str, Any]) -> Talk | list[str]:
    """The conversation of a line or row, or everything that is wrong with it."""
    problems = ["tools is set, but this task does not read tools"] if _given(content, "tools") else []
    if _given(content, "images") and _given(content, "image"):
        problems.append("image and images are both set")
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
    messages = tuple(message for message, _ in found)
    spots = [(number, offset) for number, (_, offsets) in enumerate(found) for offset in offsets]
    count = len(pictures_of(content))
    if count and not spots:
        spots = [(next((at for at, each in enumerate(messages) if each.role == "user"), 0), 0)] * count
    elif count != len(spots):
        problems.append(f"{counted(len(spots), 'part')} of the type image, but {counted(count, 'picture')}")
    problems += _text_problems(messages, {number for number, _ in spots})
    if not problems:
        problems = order_problems(messages) or picture_problems(messages, spots)
    return problems or Talk(messages, tuple(spots))


def _given(content: Mapping[str, Any], name: str) -> bool:
    """Whether there is anything: tables have nulls and empty lists where JSON has no key."""
    return content.get(name) is not None and content[name] not in ([], {})


def _side(name: str, value: Any, role: str, problems: list[str]) -> list[tuple[Message, list[int]]]:
    return [(Message(role, value), [])] if isinstance(value, str) else _messages(name, value, problems)


def _messages(name: str, value: Any, problems: list[str]) -> list[tuple[Message, list[int]]]:
    """Each with the offsets of the pictures that it shows."""
    if not isinstance(value, list):
        problems.append(f"{name} is {shown(value)}, expected a list of messages")
        return []
    found = []
    for number, message in enumerate(value, start=1):
        where = f"{name}, message {number}"
        if not isinstance(message, dict):
            problems.append(f"{where} is {shown(message)}, expected a role and a content")
            continue
        role, (text, offsets) = message.get("role"), _text(message.get("content"))
        if role not in ROLES:
            problems.append(f"{where} has the role {shown(role)}, expected one of {', '.join(ROLES)}")
        if text is None:
            problems.append(f"{where} has the content {shown(message.get('content'))}, expected text or parts of it")
        if message.get("tool_calls"):
            problems.append(f"{where} calls tools, which this task does not read")
        found.append((Message(str(role), text or ""), offsets))
    return found


def _text(content: Any) -> tuple[str | None, list[int]]:
    """The text of a content, which may be in parts, and the offsets of pictures in it; None where it is neither."""
    if isinstance(content, str):
        return content, []
    text, offsets = "", []
    for part in content if isinstance(content, list) and content else [None]:
        if not isinstance(part, dict):
            return None, []
        if part.get("type") == "image" and not any(value for key, value in part.items() if key != "type"):
            offsets.append(len(text))
        elif part.get("type") == "text" and isinstance(part.get("text"), str):
            text += part["text"]
        else:
            return None, []
    return text, offsets


def _text_problems(messages: Sequence[Message], with_pictures: set[int]) -> list[str]:
    texts = [message.content for message in messages]
    problems = []
    if any(SURROGATE.search(text) for text in texts):
        problems.append("a text holds half of a surrogate pair")
    problems += [
        f"message {number + 1} is empty"
        for number, text in enumerate(texts)
        if not text.strip() and number not in with_pictures
    ]
    markup = markup_problem(*texts)
    return [*problems, *([markup] if markup else [])]
