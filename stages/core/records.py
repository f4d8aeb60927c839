"""Files that stages and people write, read as dataclasses or refused with every problem."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Self, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.reader import ReaderError

from stages.core.atomic import atomic_write
from stages.core.errors import UserError, bytes_text, join_truncated, listed

MAX_SHOWN_CHARS = 80

MAX_YAML_DEPTH = 200
MAX_YAML_BYTES = 2**18
"""Limit of YAML, which takes up to 25 seconds a megabyte. params.yaml has 18 KB."""

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Configuration of a dataclass of a file: no unknown key, no value of another type, no figure that is not finite."""
STRICT_OR_NAN = ConfigDict(extra="forbid", strict=True)
"""STRICT for records with figures that may be NaN, as after a training that diverged."""

T = TypeVar("T")

_adapter: Callable[[Any], Any] = cache(TypeAdapter)
"""Made once for each kind, which takes longer than reading a record with it."""


def rebuild(stage: str) -> str:
    """The command that makes the outputs of a stage again, e.g. of "merge@r1"."""
    return f"dvc repro -f -s {stage}"


def obtain(stage: str) -> str:
    """The commands that bring the outputs of a stage that are not here."""
    return f"run: dvc repro {stage}; or, if a remote has the results: dvc pull --with-deps {stage}"


class StageFile:
    """Base of a dataclass that one stage writes to a file and others read: JSON, or YAML by the file's suffix."""

    @classmethod
    def read(cls, path: Path, *, fix: str) -> Self:
        """Raises UserError, with the command `fix` that makes the file again, if it is missing or damaged."""
        return read_record(cls, path, fix=fix)

    def write(self, path: Path) -> None:
        """Write the file whole, in place of an older one."""
        assert is_dataclass(self)
        content = json.loads(json.dumps(asdict(self)))
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        atomic_write(yaml_text(content) if path.suffix == ".yaml" else text, path)


def yaml_text(content: Any) -> str:
    """The YAML file of a record. content: as JSON has it, so that tuples and numbers are YAML's plain ones."""
    yaml, text = YAML(), io.StringIO()
    yaml.default_flow_style = False
    yaml.allow_unicode = False  # one of Unicode's line ends would be read back as a space
    yaml.width = 2**31  # a long text would be folded within its words, and read back with a space there
    yaml.dump(content, text)
    return text.getvalue()


def read_record(kind: type[T], path: Path, *, fix: str) -> T:
    """A file that a stage wrote, as `kind`: JSON, or YAML by the file's suffix.

    fix: the command that makes the file again, for the UserError that is raised if it is missing or damaged.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".yaml":
            return parse(kind, parse_yaml(content))
        record: T = _adapter(kind).validate_json(content)
        json.loads(content, object_pairs_hook=distinct)
    except OSError as error:
        raise UserError(f"{_unread(path, error)}; rebuild it with: {fix}") from None
    except Unreadable as error:
        raise damaged(path, {"the file": str(error)}, fix=fix) from None
    except ValidationError as error:
        raise damaged(path, problems(error, kind), fix=fix) from None
    else:
        return record


def read_settings(kind: type[T], path: Path, *, changes: Iterable[str] = ()) -> T:
    """A YAML file that a person wrote. Raises UserError with every value that does not fit the dataclass.

    changes: `KEY.KEY=VALUE` to set first, with or without `++`, as `-S` does: a mapping is merged into what is there.
    """
    try:
        raw = parse_yaml(path.read_bytes())
        for change in changes:
            _set(raw, change)
        return parse(kind, raw)
    except OSError as error:
        raise UserError(f"{_unread(path, error)}; run from the top of the repository") from None
    except Unreadable as error:
        raise UserError(f"{path} is not plain YAML: {error}") from None
    except ValidationError as error:
        raise refusal(path, problems(error, kind)) from None


def _set(raw: Any, change: str) -> None:
    """Set a value in a tree of mappings; what is above it is made where there is nothing."""
    place, equals, value = change.removeprefix("++").partition("=")
    *above, last = place.split(".")
    for key in above:
        raw = raw.setdefault(key, {}) if isinstance(raw, dict) else None
    if not equals or not isinstance(raw, dict):
        raise UserError(f"{change!r} sets no value; expected KEY.KEY=VALUE, such as seed=7")
    try:
        raw[last] = _merged(raw.get(last), parse_yaml(value))
    except Unreadable as error:
        raise UserError(f"{change!r}: the value is not plain YAML: {error}") from None


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new


def _unread(path: Path, error: OSError) -> str:
    missing = isinstance(error, FileNotFoundError)
    return f"{path} is missing" if missing else f"{path} cannot be read: {error.strerror}"


class Unreadable(ValueError):
    """Raised for a file that is not a YAML document; the message is one line."""


class _Constructor(SafeConstructor):
    """Reads a date as text: JSON has no dates."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def parse_json(content: bytes) -> Any:
    """Untrusted JSON as plain values. Raises Unreadable if it is no JSON, nested too deep, or has NaN or infinity, or a
    key twice: readers differ in which of the two they take."""
    try:
        from_json(content, allow_inf_nan=False)  # counts the depth
        return json.loads(content, object_pairs_hook=distinct, parse_float=_finite)
    except Unreadable:
        raise
    except ValueError as error:
        raise Unreadable(f"no JSON: {error}") from None


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs (object_pairs_hook of json.loads). Raises Unreadable for a key that is there twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise Unreadable(f"the key {shown(next(key for key in keys if keys.count(key) > 1))} is there twice")
    return values


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise Unreadable(f"no JSON: {cut(text)}")
    return number


def parse_yaml(text: bytes | str) -> Any:
    """YAML 1.2, which a dataset may bring, as the values of JSON.

    Raises Unreadable if it is no YAML, is too large or nested too deep, or has anchors.
    """
    if len(text) > MAX_YAML_BYTES:
        raise Unreadable(f"{bytes_text(len(text))}, more than {bytes_text(MAX_YAML_BYTES)}")
    yaml = YAML(typ="safe")
    yaml.Constructor = _Constructor
    try:
        _refuse_anchors_and_depth(text)
        return json.loads(json.dumps(yaml.load(text)))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise Unreadable(where + " ".join((error.problem or error.context or "no YAML").split())) from None
    except ReaderError as error:
        raise Unreadable(f"{error.reason}, at position {error.position}") from None
    # The latter for `!!int x`, for escapes beyond Unicode, and for sets.
    except (YAMLError, AssertionError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise Unreadable(" ".join(str(error).split())) from None


def parse(kind: type[T], value: Any) -> T:
    """A value out of a JSON or YAML file as a dataclass. Raises ValidationError if it does not fit."""
    # JSON mode is strict about types, yet takes a list for a tuple and 1 for 1.0, as a person writing YAML does.
    return _adapter(kind).validate_json(json.dumps(value), strict=True)


def _refuse_anchors_and_depth(text: bytes | str) -> None:
    """Raises Unreadable for an anchor or an alias, and for deep nesting, in which libyaml's composer recurses until the
    process is killed.

    `dvc exp run -S` changes every place of an anchor, or loses it; a few lines of aliases stand for billions of values.
    """
    depth = 0
    for event in YAML(typ="safe").parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            raise Unreadable("lists and mappings are nested too deep")
        if anchor := getattr(event, "anchor", None):
            line = event.start_mark.line + 1
            raise Unreadable(f"line {line}: the anchor {shown(anchor)} is refused; write out the value in each place")


def refusal(path: Path, faults: Mapping[str, str] | Iterable[tuple[str, str]]) -> UserError:
    """The error for a file that a person wrote. faults: by dotted path; the first ones get a line each."""
    lines = [f"{where}: {problem}" for where, problem in (faults.items() if isinstance(faults, Mapping) else faults)]
    count = "1 problem" if len(lines) == 1 else f"{len(lines):,} problems"
    return UserError(f"{path} has {count}:\n{listed(lines)}")


def damaged(path: Path, faults: Mapping[str, str], *, fix: str) -> UserError:
    """The error for a file that a stage wrote. faults: by dotted path; the first three are named."""
    lines = [f"{where}: {what}" for where, what in faults.items()]
    return UserError(f"{path} is damaged: {join_truncated(lines, 3)}; rebuild it with: {fix}")


_OF_A_UNION = re.compile(r"constrained-\w+|(literal|tuple|list|dict|function-\w+)\[.*")
"""A part of pydantic's path that is not in the file: the kind that a value with several was compared with."""


def problems(error: ValidationError, kind: Any) -> dict[str, str]:
    """The problems of a value that is not a valid `kind`, by dotted path; an unknown key with the nearest known one."""
    by_path: dict[str, str] = {}
    for details in error.errors(include_url=False):
        *parent, last = [step for step in details["loc"] if not _OF_A_UNION.fullmatch(str(step))] or ("",)
        if last == "[key]":  # the problem is a mapping's key, not its value
            *parent, last = parent
        if details["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            problem = f"unknown key{nearest(str(last), _keys_at(parent, kind))}"
        elif details["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
            problem = "missing"
        else:
            message = " ".join(f"{details['msg'][0].lower()}{details['msg'][1:]}".split())
            problem = f"{message}, found {shown(details['input'])}"
        by_path.setdefault(dotted((*parent, last) if details["loc"] else ()), problem)
    return by_path


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


def unknown(lacking: str, name: str, known: Iterable[str]) -> str:
    """`no recipe is called 'r1' (did you mean 'r2'?); there are: r2, r3`. lacking: `recipe is called`."""
    names = sorted(known)
    return f"no {lacking} {name!r}{nearest(name, names)}; there are: {', '.join(names) or 'none'}"


def dotted(steps: Iterable[str | int]) -> str:
    """`recipes.r1.lora.rank`, on one line whatever the keys hold; "the file" for no steps."""
    return ".".join(str(step) if re.fullmatch(r"[\w/@+-]{1,80}", str(step)) else shown(step) for step in steps) or (
        "the file"
    )


def shown(value: Any) -> str:
    """The value as Python writes it, on one line, cut to MAX_SHOWN_CHARS."""
    return cut(repr(value))


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."
