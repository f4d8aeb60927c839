"""Batches of conversations: the longest first, and each prepared while the one before it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import TypeVar

from stages.kit.data.conversation import Conversation

T = TypeVar("T")


def longest_first(conversations: Sequence[Conversation], batch_size: int) -> list[list[int]]:
    """Batches of their indices. Within a batch there is little padding, and the first takes the most memory.

    Sorted by pixels, then by characters: nearly the order by tokens, without rendering or decoding anything.
    """
    sizes = [(_num_pixels(conversation), _num_characters(conversation)) for conversation in conversations]
    order = sorted(range(len(sizes)), key=lambda index: sizes[index], reverse=True)
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def prepared_ahead(batches: Sequence[list[int]], prepare: Callable[[list[int]], T]) -> Iterator[tuple[list[int], T]]:
    """Each batch with what `prepare` returns for it, which a thread computes one batch ahead.

    An error of `prepare` is raised here, when its batch would come.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare") as thread:
        upcoming = [thread.submit(prepare, batch) for batch in batches[:1]]
        for batch, following in zip_longest(batches, batches[1:]):
            prepared = upcoming.pop().result()
            if following is not None:
                upcoming.append(thread.submit(prepare, following))
            yield batch, prepared


def _num_pixels(conversation: Conversation) -> int:
    return sum(picture.width * picture.height for picture in conversation.images)


def _num_characters(conversation: Conversation) -> int:
    contents = (message["content"] for message in conversation.messages)
    parts = (part for content in contents for part in ([{"text": content}] if isinstance(content, str) else content))
    return sum(len(part.get("text", "")) for part in parts)
