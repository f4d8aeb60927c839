"""A sample as the model sees it: messages in the chat form of transformers, and the images they show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from stages.data.images import ImageRecord


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    sample_id: str
    """The sample's name in messages."""
    messages: list[dict[str, Any]]
    """[{"role": ..., "content": [{"type": "text", "text": ...} or {"type": "image"}]}]; answered if the last is the
    assistant's. One text part of all may be "shortenable": True, and is cut at its end if the whole is too long."""
    images: Sequence[Image | ImageRecord] = ()
    """Upright RGB images, in the order in which the messages show them; a record's is decoded when it is needed."""
    unlearnt: Sequence[int] = ()
    """Numbers, counted from 0, of the assistant's messages that are context alone."""

    def answered(self) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"
