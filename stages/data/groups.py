"""Groups of samples that are alike, such as the questions about one meeting or the photographs of one product."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Record(Protocol):
    """A sample of any task."""

    def content(self) -> Sequence[Any]:
        """All fields but where the record was read, as JSON values; the first names the record in messages."""

    def subject(self) -> str:
        """A digest, equal for records that may not be in two splits."""

    @property
    def group(self) -> str:
        """A name that records of a group share; empty for none but that of the subject."""


def groups_of(records: Sequence[Record]) -> NDArray[np.int64] | None:
    """(records,) The number of each record's group, counted from 0 as they appear; None if each is its own."""
    joined = connected((record.subject(), record.group) for record in records)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(joined))}
    return np.array([numbers[name] for name in joined]) if len(numbers) < len(joined) else None


def connected(keys: Iterable[tuple[str, str]]) -> list[str]:
    """For each subject and group the smallest subject that it is joined with, by subjects or groups in common.

    A group may be empty, and then joins nothing.
    """
    parents: dict[str, str] = {}

    def root(node: str) -> str:
        while parents.setdefault(node, node) != node:
            parents[node] = node = parents[parents[node]]
        return node

    subjects = []
    for subject, group in keys:
        subjects.append(subject)
        nodes = root(subject), root(f"~{group}" if group else subject)  # `~` is behind every digest
        parents[max(nodes)] = min(nodes)
    return [root(subject) for subject in subjects]
