"""YAML and JSON files as the dataclasses that they stand for, and what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.reader import ReaderError

from stages.core.errors import UserError, some

MAX_SHOWN_CHARS = 80

MAX_DEPTH = 200
"""Limit of lists and mappings within each other in a YAML file."""

T = TypeVar("T")


class Unreadable(ValueError):
    """A file that is no YAML document, and why, in a line."""


class _Constructor(SafeConstructor):
    """A date is the text that it was written as: JSON has no dates."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def read_yaml(kind: type[T], path: Path) -> T:
    """A YAML 1.2 file as a dataclass.

    Without anchors: a few lines of aliases can stand for billions of values, and `dvc exp run -S` changes all places of
    one, or loses it.
    Raises Unreadable where it is not YAML, ValidationError where it does not fit the dataclass; OSError.
    """
    yaml, content = YAML(typ="safe"), path.read_bytes()
    yaml.Constructor = _Constructor
    try:
        _refuse_depth_and_anchors(content)
        text = json.dumps(yaml.load(content))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise Unreadable(where + " ".join((error.problem or error.context or "no YAML").split())) from None
    except ReaderError as error:
        raise Unreadable(f"{error.reason}, at position {error.position}") from None
    except RecursionError:
        raise Unreadable("lists and mappings are nested too deep") from None
    # The latter of `!!int x`, of escapes beyond Unicode, and of sets.
    except (YAMLError, AssertionError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise Unreadable(" ".join(str(error).split())) from None
    # JSON mode is strict about types, yet takes a list for a tuple and 1 for 1.0, as a person writing YAML does.
    return TypeAdapter(kind).validate_json(text, strict=True)


def parse(kind: type[T], value: Any) -> T:
    """A value out of a YAML file as a dataclass. Raises ValidationError where it does not fit."""
    # JSON mode is strict about types, yet takes a list for a tuple and 1 for 1.0, as a person writing YAML does.
    return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)


def _refuse_depth_and_anchors(content: bytes) -> None:
    """Raises Unreadable for an anchor or an alias, and RecursionError for what is nested too deep: libyaml's composer
    calls itself for each list in a list, until the process is killed.
    """
    depth = 0
    for event in YAML(typ="safe").parse(content):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise RecursionError
        if anchor := getattr(event, "anchor", None):
            line = event.start_mark.line + 1
            raise Unreadable(f"line {line}: the anchor {shown(anchor)} is refused; write out the value in each place")


def read_settings(kind: type[T], path: Path, *, hint: str = "") -> T:
    """A YAML file that a person wrote. Raises UserError with every value that does not fit the dataclass.

    hint: what to do where the file is missing.
    """
    try:
        return read_yaml(kind, path)
    except FileNotFoundError:
        raise UserError("; ".join(filter(None, (f"{path} is missing", hint)))) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except Unreadable as error:
        raise UserError(f"{path} is not plain YAML: {error}") from None
    except ValidationError as error:
        raise refusal(path, problems(error, kind)) from None


def read_json(kind: type[T], path: Path, *, fix: str, read: Callable[[type[T], Path], T] | None = None) -> T:
    """A JSON file as the dataclass that was written to it.

    fix: the command that makes it anew, for the message of the UserError raised where it is missing or damaged.
    read: read_yaml for a file that is YAML.
    """
    try:
        return read(kind, path) if read else TypeAdapter(kind).validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing; rebuild it with: {fix}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; rebuild it with: {fix}") from None
    except Unreadable as error:
        raise damaged(path, {"the file": str(error)}, fix=fix) from None
    except ValidationError as error:
        raise damaged(path, problems(error, kind), fix=fix) from None


def refusal(path: Path, found: Mapping[str, str] | Iterable[tuple[str, str]]) -> UserError:
    """To be raised for a file that a person wrote. found: problems by dotted path; each gets a line of its own."""
    lines = [f"{where}: {problem}" for where, problem in (found.items() if isinstance(found, Mapping) else found)]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return UserError("\n  ".join([f"{path} has {count}:", *lines]))


def damaged(path: Path, found: Mapping[str, str], *, fix: str) -> UserError:
    """To be raised for a file that a stage wrote. found: what is wrong with it, by dotted path; few are listed, as who
    reads them did not write the file."""
    faults = [f"{where}: {what}" for where, what in found.items()]
    return UserError(f"{path} is damaged: {some(faults, 3)}; rebuild it with: {fix}")


def problems(error: ValidationError, kind: Any) -> dict[str, str]:
    """What is wrong with a value of a dataclass `kind`, by dotted path; an unknown key with the nearest known one."""
    found: dict[str, str] = {}
    for details in error.errors(include_url=False):
        *parent, last = details["loc"] or ("",)
        if last == "[key]":  # of a mapping's key, not of its value
            *parent, last = parent
        if details["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            problem = f"unknown key{nearest(str(last), _keys_at(parent, kind))}"
        elif details["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
            problem = "missing"
        else:
            message = " ".join(f"{details['msg'][0].lower()}{details['msg'][1:]}".split())
            problem = f"{message}, found {shown(details['input'])}"
        found.setdefault(dotted((*parent, last) if details["loc"] else ()), problem)
    return found


def _keys_at(steps: Iterable[str | int], kind: Any) -> list[str]:
    """The keys that a dataclass may have below a path."""
    here = kind
    for step in steps:
        here = get_type_hints(here).get(str(step)) if is_dataclass(here) else _values(here)
        if isinstance(here, UnionType):
            here = get_args(here)[0]
        if not (is_dataclass(here) or get_args(here)):
            return []
    return [field.name for field in fields(here)] if is_dataclass(here) else []


def _values(kind: Any) -> Any:
    """The type of the values of a mapping, or of a tuple of any length."""
    return next(arg for arg in reversed(get_args(kind)) if arg is not ...)


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'rank'?)`, or nothing."""
    # It takes the square of a name's length.
    match = get_close_matches(name, list(known), n=1) if len(name) <= MAX_SHOWN_CHARS else []
    return f" (did you mean {match[0]!r}?)" if match else ""


def dotted(steps: Iterable[str | int]) -> str:
    """`recipes.r1.lora.rank`; on one line, whatever the keys hold."""
    return ".".join(str(step) if re.fullmatch(r"[\w/@+-]{1,80}", str(step)) else shown(step) for step in steps) or (
        "the file"
    )


def shown(value: Any) -> str:
    """As Python writes it, on one line, cut where it is long."""
    return cut(repr(value))


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."
