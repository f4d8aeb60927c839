"""Texts in a dataset: reading files of them, comparing them, and the chat markup that none may hold."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

from stages.core.errors import UserError

_TOKEN = re.compile(r"<\|[^<>|\s]{1,60}\|>")
"""As Qwen, and most families since, write their special tokens: <|im_end|>, <|image_pad|>."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is no character."""


class UnreadableText(ValueError):
    """A file that is not UTF-8, or holds nothing, or may not be read."""


class EmptyText(UnreadableText):
    """A file that holds nothing."""


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


def same_text(text: str) -> str:
    """Equal for texts that differ only in how Unicode composes their letters, in white space or in case."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def markup_problem(*texts: str) -> str | None:
    """What is wrong with a sample one of whose texts holds a special token; None where none does.

    Tokenizers read special tokens wherever a text has them: it would reach the model as the end of a turn, another
    role's words or a picture's place. One rule for every task, for questions and answers, in both splits.
    """
    found = next((match[0] for text in texts if (match := _TOKEN.search(text))), None)
    return None if found is None else f"a text holds chat markup, {found}, which a model takes for more than text"
