"""Answers in JSON, and how many of their fields are right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """A JSON text that was read; `value` may be None, which is JSON too."""

    value: Any


def parsed(text: str) -> Document | None:
    """None where a text is not JSON (RFC 8259: no NaN, nothing before or behind it but white space)."""
    try:
        return Document(json.loads(text, parse_constant=_refused))
    except (ValueError, RecursionError):
        return None


def field_accuracy(answer: str, truth: str) -> float:
    """The share of the fields of either that are in both with the same value, from 0 to 1; 0 where one is no JSON.

    A field is a value with the names and places that lead to it; an empty list or object is one too.
    """
    read = [parsed(text) for text in (answer, truth)]
    ours, theirs = (set() if each is None else set(_fields(each.value)) for each in read)
    return len(ours & theirs) / len(ours | theirs) if ours and theirs else 0.0


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _fields(document: Any) -> Iterator[tuple[Path, str, Any]]:
    """Each field's path, kind (1 and 1.0 are alike, True is neither) and value."""
    waiting: list[tuple[Path, Any]] = [((), document)]
    while waiting:  # not by recursion: an answer may nest as deep as it is long
        path, value = waiting.pop()
        if isinstance(value, dict | list) and value:
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [((*path, key), each) for key, each in inner]
        elif isinstance(value, dict | list):
            yield path, "empty", type(value).__name__
        else:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            yield path, "number" if number else type(value).__name__, value
