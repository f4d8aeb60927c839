"""What can still be said of a file of which a part is wrong: all that does not depend on that part."""

from __future__ import annotations

import json
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError


def validated(kind: Any, raw: Any) -> Any:
    """`raw`, as JSON has it, as `kind`. Raises ValidationError."""
    # JSON mode is strict about types, yet takes a list for a tuple and 1 for 1.0, as a person writing YAML does.
    return TypeAdapter(kind).validate_json(json.dumps(raw), strict=True)


class LookedAt(Exception):
    """What a value is was asked for, and it is wrong."""


class Wrong:
    """In the place of a value that is wrong by itself, which is reported: what follows from it nobody can say."""

    def _look(self, *_: Any) -> Any:
        raise LookedAt

    __getattr__ = __iter__ = __contains__ = __len__ = __bool__ = __str__ = __format__ = _look
    __eq__ = __hash__ = __lt__ = __le__ = __gt__ = __ge__ = __fspath__ = _look


def salvaged(kind: Any, raw: Any) -> Any:
    """`raw` as `kind`, with a Wrong in the place of every value that is not as it should be, or missing."""
    try:
        return validated(kind, raw)
    except ValidationError:
        if get_origin(kind) in (Union, UnionType):  # `... | None`
            kind = get_args(kind)[0]
    if get_origin(kind) is dict and isinstance(raw, dict):
        return {name: salvaged(get_args(kind)[1], value) for name, value in raw.items()}
    if not (hasattr(kind, "__pydantic_fields__") and isinstance(raw, dict)):
        return Wrong()
    whole = object.__new__(kind)
    hints = get_type_hints(kind, include_extras=True)
    for name, field in kind.__pydantic_fields__.items():
        if name in raw:
            value = salvaged(hints[name], raw[name])
        else:
            value = Wrong() if field.is_required() else field.get_default(call_default_factory=True)
        object.__setattr__(whole, name, value)
    return whole


def sound(owner: Any, name: str) -> Any:
    """The owner's mapping or list of that name; an empty one where either is wrong."""
    found = owner if isinstance(owner, Wrong) else getattr(owner, name)
    return {} if isinstance(found, Wrong) else found
