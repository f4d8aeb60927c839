"""YAML and JSON files, whoever wrote them and whatever became of them: their content, or in words what is wrong."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from stages.core.errors import UserError

MAX_DEPTH = 50
"""Of lists and mappings within each other; no file of ours has ten."""
MAX_VALUES = 100_000
"""In one file, those behind an alias counted at every place: a few lines of aliases can stand for billions."""
MAX_SHOWN_CHARS = 80
MAX_SAID = 3
"""Faults of a damaged file that a message lists: who reads it did not write the file."""

_TAG = "tag:yaml.org,2002:"
_COLLECTIONS = ("map", "seq")
_SCALARS = ("null", "bool", "int", "float")
_TEXTS = ("str", "timestamp")
SURROGATE = re.compile("[\ud800-\udfff]")

T = TypeVar("T")
Steps = tuple[str | int, ...]


class Unreadable(ValueError):
    """What is no document at all, and why, in a line."""


def read_yaml(path: Path) -> tuple[Any, dict[str, str]]:
    """What a YAML 1.2 file holds, in the types that JSON has, and what is wrong with it, by dotted path.

    A date is the text that it was written as. Of two values for one key the first is taken.
    Raises Unreadable where nothing can be made of it; OSError.
    """
    yaml, content = YAML(typ="safe", pure=True), path.read_bytes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)  # YAML allows it
            root = yaml.compose(content)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise Unreadable(where + " ".join((error.problem or error.context or "no YAML").split())) from None
    except ReaderError as error:
        raise Unreadable(f"{error.reason}, at position {error.position}") from None
    except RecursionError:
        raise Unreadable(f"lists and mappings are nested more than {MAX_DEPTH} deep") from None
    except (YAMLError, ValueError, OverflowError, AssertionError) as error:  # of escapes beyond Unicode, of %YAML 1.999
        raise Unreadable(" ".join(str(error).split())) from None
    reader = _Reader(yaml.constructor)
    return (None if root is None else reader.value(root, ())), reader.faults


def read_settings(path: Path, *, mend: str = "") -> tuple[Any, dict[str, str]]:
    """As read_yaml, of a file that a person wrote. Raises UserError where nothing can be made of it.

    mend: what to do where it is missing.
    """
    try:
        return read_yaml(path)
    except FileNotFoundError:
        raise UserError("; ".join(filter(None, (f"{path} is missing", mend)))) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except Unreadable as error:
        raise UserError(f"{path} is not YAML: {error}") from None


class _Reader:
    """From the nodes of a document to its values. ruamel's own constructor stops at the first fault, without a path."""

    def __init__(self, constructor: Any) -> None:
        self.constructor = constructor
        self.faults: dict[str, str] = {}
        self.num_values = 0

    def value(self, node: Node, steps: Steps) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise Unreadable(f"holds more than {MAX_VALUES:,} values, those behind an alias counted at every place")
        if len(steps) > MAX_DEPTH:
            raise Unreadable(f"{dotted(steps[:4])}: lists and mappings are nested more than {MAX_DEPTH} deep")
        kind = str(node.tag).removeprefix(_TAG)
        if kind not in (*_SCALARS, *_TEXTS, *_COLLECTIONS):
            self._fault(steps, f"unknown tag {shown(node.tag)}")
        if isinstance(node, MappingNode):
            return self._mapping(node, steps)
        if isinstance(node, SequenceNode):
            return [self.value(item, (*steps, index)) for index, item in enumerate(node.value)]
        return self._scalar(kind, node, steps) if kind in _SCALARS else self._text(node.value, steps)

    def _mapping(self, node: MappingNode, steps: Steps) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == f"{_TAG}merge":
                merged = {**self._merged(value_node, steps), **merged}
                continue
            if not isinstance(key_node, ScalarNode):
                self._fault(steps, f"a key that is a list or a mapping, in line {line}")
                continue
            key, here = key_node.value, (*steps, key_node.value)
            if key_node.tag != f"{_TAG}str":
                self._fault(here, "a key has to be text; put it in quotes")
            if key in own:
                self._fault(here, f"set twice, in lines {lines[key]} and {line}")
                continue
            lines[key] = line
            own[self._text(key, here)] = self.value(value_node, here)
        return {**merged, **own}

    def _merged(self, node: Node, steps: Steps) -> dict[str, Any]:
        """What `<<` stands for: a mapping, or several, of which the first that has a key gives it."""
        sources = node.value if isinstance(node, SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for source in sources:
            if isinstance(source, MappingNode):
                merged = {**self.value(source, (*steps, "<<")), **merged}
            else:
                self._fault((*steps, "<<"), "expected a mapping to merge, or a list of them")
        return merged

    def _scalar(self, kind: str, node: Node, steps: Steps) -> float | bool | None:
        try:
            value = getattr(self.constructor, f"construct_yaml_{kind}")(node)
        except (ValueError, KeyError, IndexError):  # `!!int x`, `!!int`, or more digits than Python reads
            self._fault(steps, f"{shown(node.value)} is no {kind}")
            return None
        if kind == "int" and abs(value) >= 2**63:
            self._fault(steps, "a number of more than 64 bits")
            return None
        return value

    def _text(self, text: str, steps: Steps) -> str:
        if "\0" in text:
            self._fault(steps, "the character of number 0, which no name and no path has")
        # JSON writes a character beyond the first 65,536 as two halves, which YAML takes for two characters.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        if SURROGATE.search(text):
            self._fault(steps, "half of a surrogate pair, which is no character")
        return SURROGATE.sub("?", text)

    def _fault(self, steps: Steps, fault: str) -> None:
        self.faults.setdefault(dotted(steps), fault)


def read_json(kind: type[T], path: Path, *, mend: str) -> T:
    """A JSON file as the dataclass that was written to it.

    mend: the command that makes it anew, for the message of the UserError raised where it is missing or damaged.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing; rebuild it with: {mend}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; rebuild it with: {mend}") from None
    except ValidationError as error:
        raise damaged(path, problems(error, kind), mend=mend) from None


def refusal(path: Path, found: Mapping[str, str], *more: str) -> UserError:
    """To be raised for a file that a person wrote: every problem on a line of its own.

    found: by dotted path. more: with their paths.
    """
    lines = [*(f"{where}: {problem}" for where, problem in found.items()), *more]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return UserError("\n  ".join([f"{path} has {count}:", *lines]))


def damaged(path: Path, found: Mapping[str, str], *, mend: str) -> UserError:
    """To be raised for a file that a stage wrote. found: what is wrong with it, by dotted path."""
    said = [f"{where}: {what}" for where, what in found.items()]
    more = f" and {len(said) - MAX_SAID:,} more" if len(said) > MAX_SAID else ""
    return UserError(f"{path} is damaged: {', '.join(said[:MAX_SAID])}{more}; rebuild it with: {mend}")


def problems(error: ValidationError, kind: Any) -> dict[str, str]:
    """What pydantic has against a value of a dataclass `kind`, by dotted path; of an unknown key the nearest known."""
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
    """Of a mapping, or of a tuple of any length."""
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
