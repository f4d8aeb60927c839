"""Damage: a flipped bit; and for hypothesis to draw, to bytes, to texts, and to the trees of JSON and YAML files."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

NUMBERS = st.sampled_from([0, -1, 1, 3, 2**31, 2**63, -(2**63) - 1, 10**30, 1e-320, 0.5, 1e308, -1e308]) | st.integers()
NOT_FINITE = st.sampled_from([float("nan"), float("inf"), float("-inf")])
TEXTS = st.text(max_size=12) | st.sampled_from(
    [
        *("", " ", "a.b", "../../../etc/passwd", "/etc/passwd", "data/bases/..", "\0", "x\ny: z", "1e5", "null", "~"),
        *("a" * 300, "<<", "{", "é", "chủ_tịch", "\N{ZERO WIDTH SPACE}", "\N{LINE SEPARATOR}", "[bold]x[/]", "%s {0}"),
    ]
)


def nested(depth: int) -> Any:
    """Lists within each other."""
    return [nested(depth - 1)] if depth else []


VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | NOT_FINITE | TEXTS | st.sampled_from([10**400, nested(300)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
"""Anything that a JSON file may hold, numbers included that some of its readers take and others do not."""


def quick(max_examples: int) -> settings:
    """So many examples, the same ones every time; EXAMPLES times as many where the environment says so."""
    max_examples *= int(os.environ.get("EXAMPLES", "1"))
    return settings(max_examples=max_examples, derandomize=True, deadline=None, database=None)


def places(tree: Any, *above: Any) -> list[tuple[Any, ...]]:
    """The path to everything in a tree of mappings and lists but to itself."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inside for place in ((*above, key), *places(value, *above, key))]


def at(tree: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        tree = tree[step]
    return tree


def flip(path: Path | str) -> None:
    """Flip a bit in the middle of a file, as an ageing disk does: size, time and mode stay the same."""
    path = Path(path)
    status, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    path.chmod(status.st_mode)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@st.composite
def damaged_tree(draw: st.DrawFn, tree: Any, *, most: int = 3) -> Any:
    """The tree after up to so many accidents: something gone, put in, exchanged, renamed, or of another kind."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        if not (all_places := places(tree)):
            return copy.deepcopy(draw(VALUES))
        *above, key = draw(st.sampled_from(all_places))
        around = at(tree, tuple(above))
        match draw(st.sampled_from(["drop", "replace", "add", "exchange", "rename", "wrap"])):
            case "drop":
                del around[key]
            case "replace":
                around[key] = copy.deepcopy(draw(VALUES))
            case "exchange":
                *other_above, other = draw(st.sampled_from(all_places))
                around[key] = copy.deepcopy(at(tree, (*other_above, other)))
            case "wrap":
                around[key] = draw(st.sampled_from([[around[key]], {"a": around[key]}]))
            case "rename" if isinstance(around, dict):
                around[draw(TEXTS)] = around.pop(key)
            case _ if isinstance(around, dict):
                around[draw(TEXTS)] = copy.deepcopy(draw(VALUES))
            case _:
                around.insert(key, copy.deepcopy(draw(VALUES)))
    return tree


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """A file cut short, with bytes flipped, put in or taken out, or with something else in its place."""
    match draw(st.sampled_from(["cut", "flip", "flip", "insert", "remove", "other"])):
        case "cut":
            return content[: draw(st.integers(0, len(content) - 1))]
        case "flip":
            flipped = bytearray(content)
            for _ in range(draw(st.integers(1, 4))):
                flipped[draw(st.integers(0, len(content) - 1))] ^= draw(st.integers(1, 255))
            return bytes(flipped)
        case "insert":
            place = draw(st.integers(0, len(content)))
            return content[:place] + draw(st.binary(min_size=1, max_size=9)) + content[place:]
        case "remove":
            place = draw(st.integers(0, len(content) - 1))
            return content[:place] + content[place + draw(st.integers(1, 9)) :]
        case _:
            return draw(st.binary(max_size=40) | st.sampled_from([b"null", b"[]", b"{}", b"3", b'""', b"\xff\xfe"]))


@st.composite
def damaged_text(draw: st.DrawFn, text: str, pieces: list[str]) -> str:
    """A text with some of its parts cut out, doubled, or replaced by others."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 12)))
        part = draw(st.sampled_from(pieces) | st.text(max_size=3) | st.just("") | st.just(2 * text[start:end]))
        text = text[:start] + part + text[end:]
    return text
