"""Chat markup in texts: it would reach the model as the end of a turn, another role's words or a picture's place.

Tokenizers read special tokens wherever a text has them. One rule for every task, for what is asked and what is
answered, in training and in validation.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"<\|[^<>|\s]{1,60}\|>")
"""As Qwen, and most families since, write their special tokens: <|im_end|>, <|image_pad|>."""


def markup_problem(*texts: str) -> str | None:
    """The fault of a sample one of whose texts holds a special token; None where none does."""
    found = next((match[0] for text in texts if (match := _TOKEN.search(text))), None)
    return None if found is None else f"a text holds chat markup, {found}, which a model takes for more than text"
