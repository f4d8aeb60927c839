"""The leak check: what a model is scored on must not be among what it learned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

Place = TypeVar("Place")
"""Where a sample was read, such as a tables.RowAt."""


def leaks(splits: Mapping[str, Sequence[tuple[str, Place]]]) -> list[tuple[Place, Place]]:
    """Content that is in more than one split.

    splits: for each split, the (content digest, place) of every sample.
    Returns pairs of places with the same content, first the one in the earlier split; a sample that leaks is
    named once, beside the first place that has its content.
    """
    first_seen: dict[str, tuple[str, Place]] = {}
    found = []
    for split, samples in splits.items():
        for digest, place in samples:
            seen_in, seen_at = first_seen.setdefault(digest, (split, place))
            if seen_in != split:
                found.append((seen_at, place))
    return found
