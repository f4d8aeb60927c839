"""Texts of a dataset: reading files of them, comparing them, and the chat markup that none may contain."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from stages.core.errors import UserError
from stages.core.records import shown

TextMetric = Literal["exact", "token_f1", "rouge_l", "chrf", "json", "perplexity"]
TEXT_METRICS: tuple[TextMetric, ...] = ("token_f1", "exact", "rouge_l", "chrf", "perplexity")
"""Metrics of a dataset that names none."""

_TOKEN = re.compile(r"<\|[^<>|\s]{1,60}\|>")
"""A special token in the notation of Qwen and most families since: <|im_end|>, <|image_pad|>."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is no character."""


class UnreadableText(ValueError):
    """Raised for a file that is not UTF-8, empty, or may not be read."""


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
        raise UnreadableText(f"not UTF-8: byte 0x{content[error.start]:02x} in line {line}") from None
    if not text.strip():
        raise EmptyText("the file is empty")
    return text


def json_lines(text: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """The lines that are not blank, counted from 1, each as an object or what is wrong with it."""
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines(), which also breaks at U+2028
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
            yield number, f"not JSON: {error}"
            continue
        yield number, content if isinstance(content, dict) else f"a JSON object is expected, found {shown(content)}"


def same_text(text: str) -> str:
    """Equal for texts that differ only in how Unicode composes their letters, in white space or in case."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def markup_problem(*texts: str) -> str | None:
    """The problem of a sample with a special token in one of its texts; None without one.

    Tokenizers read special tokens wherever a text has them: one would reach the model as the end of a turn, another
    role's words or an image's place. One rule for every task, for questions and answers, in both splits.
    """
    found = next((match[0] for text in texts if (match := _TOKEN.search(text))), None)
    return None if found is None else f"a text holds chat markup, {found}, which a model takes for more than text"
