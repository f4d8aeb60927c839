"""What a task hands to the model: messages in the chat form of transformers, and the pictures they show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from stages.kit.data.images import ImageRecord


@dataclass(frozen=True, kw_only=True)
class Conversation:
    sample_id: str
    """Names the sample in messages to people."""
    messages: list[dict[str, Any]]
    """[{"role": ..., "content": [{"type": "text", "text": ...} or {"type": "image"}]}]; answered when the last is the
    assistant's. One text part of all may be "shortenable": True, and is cut at its end where the whole is too long."""
    images: Sequence[Image | ImageRecord] = ()
    """Upright RGB pictures, in the order in which the messages show them; a record's is decoded once it is needed."""

    def answered(self) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"
