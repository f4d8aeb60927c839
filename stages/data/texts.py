"""Texts: reading files of them, comparing them, and the chat markup that none may contain."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from stages.core.errors import UserError
from stages.core.records import Unreadable, distinct, shown

TextMetric = Literal["exact", "token_f1", "rouge_l", "chrf", "json", "perplexity"]
TEXT_METRICS: tuple[TextMetric, ...] = ("token_f1", "exact", "rouge_l", "chrf", "perplexity")
"""Metrics of a dataset that names none."""

_TOKEN = re.compile(r"<\|[^<>|\s]{1,60}\|>")
"""A special token in the notation of Qwen and most families since: <|im_end|>, <|image_pad|>."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is no character."""


class UnreadableText(UserError):
    """Raised for a file that is empty, not UTF-8, or of another form."""


class EmptyText(UnreadableText):
    """Raised for an empty file."""


def read_text(path: Path) -> str:
    """The content of a text file without a byte order mark, its line ends as they are.

    Raises UnreadableText for a file that is empty or not UTF-8, UserError for one that cannot be opened.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableText(f"not UTF-8: byte 0x{content[error.start]:02x} in line {line}; save it as UTF-8") from None
    if not text.strip():
        raise EmptyText("the file is empty")
    return text


def json_objects(text: str) -> tuple[str, Iterator[tuple[int, dict[str, Any] | str]]]:
    """The objects of JSON Lines or of one JSON array: the word `line` or `entry`, and each object, or what is wrong
    with it, with the number of its line or entry, counted from 1. Blank lines are left out.

    Raises UnreadableText for a single document of another form, and for an array that is damaged.
    """
    # splitlines() would also break at U+2028; a carriage return within a text is escaped in JSON.
    lines = [each for each in enumerate(re.split("\r\n?|\n", text), start=1) if each[1].strip()]
    whole, begin, several = json_value(lines[0][1]), text.lstrip()[0], len(lines) > 1
    if several:
        whole = json_value(text) if isinstance(whole, Unreadable) and begin in "[{" else None
    if isinstance(whole, list):
        return "entry", ((number, _object(each)) for number, each in enumerate(whole, start=1))
    if several and (isinstance(whole, dict) or (isinstance(whole, Unreadable) and begin == "[")):
        found = f"a JSON array, but {whole}" if isinstance(whole, Unreadable) else "a single JSON object"
        raise UnreadableText(f"{found}; expected an object in each line, or an array of objects")
    return "line", ((number, _object(json_value(line))) for number, line in lines)


def json_value(text: str) -> Any:
    """The value of a JSON text, or Unreadable with the reason why it has none."""
    try:
        return json.loads(text, object_pairs_hook=distinct)
    except Unreadable as error:
        return error
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
        return Unreadable(f"not JSON: {error}")


def _object(value: Any) -> dict[str, Any] | str:
    if isinstance(value, Unreadable):
        return str(value)
    return value if isinstance(value, dict) else f"a JSON object is expected, found {shown(value)}"


def composed(text: str) -> str:
    """The text in NFC. Archives unpacked on macOS have `é` as two characters, which look like the one."""
    return unicodedata.normalize("NFC", text)


def same_text(text: str) -> str:
    """Equal for texts that differ only in how Unicode composes their letters, in white space or in case."""
    return " ".join(composed(text).casefold().split())


def markup_problem(*texts: str) -> str | None:
    """The problem of a sample with a special token in one of its texts; None without one.

    Tokenizers read special tokens wherever a text has them: one would reach the model as the end of a turn, another
    role's words or an image's place. One rule for every task, for questions and answers, in both splits.
    """
    found = next((match[0] for text in texts if (match := _TOKEN.search(text))), None)
    return None if found is None else f"a text holds chat markup, {found}, which a model takes for more than text"
