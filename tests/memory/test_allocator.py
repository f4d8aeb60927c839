"""The allocator takes what torch's own takes: by its documented rules, and as a plain search of all blocks."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stages.memory.allocator import (
    LARGE_BUFFER,
    MIN_BLOCK,
    MIN_LARGE,
    ROUND_LARGE,
    SMALL_BUFFER,
    SMALL_SIZE,
    CachingAllocator,
    rounded_bytes,
)

MIB = 2**20
Event = tuple[int, int | None]
"""A key, and the bytes that it is allocated; None frees it."""


def after(events: Iterable[Event], *, expandable: bool = False) -> CachingAllocator:
    state = CachingAllocator(expandable=expandable)
    for key, size in events:
        if size is None:
            state.free(key)
        else:
            state.allocate(key, size)
    return state


def test_constants_are_those_of_the_installed_torch() -> None:
    spec = find_spec("torch")  # found, not imported
    assert spec is not None
    assert spec.origin is not None
    header = (Path(spec.origin).parent / "include/c10/core/AllocatorConfig.h").read_text(encoding="utf-8")
    found = dict(re.findall(r"(kSmallBuffer|kMinBlockSize|kSmallSize|kMinLargeAlloc|kRoundLarge) = (\d+)", header))
    found |= dict(re.findall(r"(large_segment_size_)\{(\d+)\}", header))
    assert {name: int(value) for name, value in found.items()} == {
        "kMinBlockSize": MIN_BLOCK,
        "kSmallSize": SMALL_SIZE,
        "kSmallBuffer": SMALL_BUFFER,
        "kMinLargeAlloc": MIN_LARGE,
        "kRoundLarge": ROUND_LARGE,
        "large_segment_size_": LARGE_BUFFER,
    }


Case = tuple[Sequence[float], Sequence[int], Sequence[float], int]
"""In MiB: what is allocated, which of it is freed, what is allocated then, and what is reserved."""
EXPANDABLE: dict[str, Case] = {
    "it grows by pages": ([1, 2], [], [], 22),
    "by as many as are lacking": ([2, 19, 59], [], [], 80),
    "there are no gaps between segments": ([20, 20, 11], [0, 1, 2], [60], 60),
    # Free: 6 in the middle, 5 at the end. 5 fit the end exactly, but it could grow, so the middle is cut.
    "its end is kept for growing": ([4, 6, 5], [1], [5, 25], 40),
}


@pytest.mark.parametrize("case", EXPANDABLE.values(), ids=EXPANDABLE)
def test_an_expandable_segment_takes_from_the_device(case: Case) -> None:
    first, freed, then, reserved = case
    allocated = [(key, round(size * MIB)) for key, size in enumerate([*first, *then])]
    frees = [(key, None) for key in freed]
    state = after([*allocated[: len(first)], *frees, *allocated[len(first) :]], expandable=True)
    assert state.reserved_bytes == reserved * MIB


SIZES = st.one_of(
    *(st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(MIB - 1024, MIB + 1024)),
    *(st.integers(MIB, 12 * MIB), st.integers(10 * MIB - 1024, 64 * MIB)),
)


@st.composite
def event_lists(draw: st.DrawFn) -> list[Event]:
    """Allocations, and frees of what is then allocated."""
    # A number picks what is freed; None allocates.
    picks = draw(st.lists(st.one_of(st.none(), st.integers(0, 2**16)), min_size=1, max_size=60))
    sizes = draw(st.lists(SIZES, min_size=len(picks), max_size=len(picks)))
    live: list[int] = []
    events: list[Event] = []
    for key, (pick, size) in enumerate(zip(picks, sizes, strict=True)):
        if live and pick is not None:
            events.append((live.pop(pick % len(live)), None))
        else:
            events.append((key, size))
            live.append(key)
    return events


@dataclass
class Piece:
    size: int
    key: int | None = None
    """None where it is free."""


def plain_reserved(events: Iterable[Event]) -> int:
    """A plain implementation: each segment a list of pieces, all of which are searched every time."""
    segments: list[tuple[bool, list[Piece]]] = []
    for key, size in events:
        if size is not None:
            place((size + 511) // 512 * 512, key, segments)
            continue
        for number, (small, pieces) in enumerate(segments):
            joined: list[Piece] = []
            for piece in pieces:
                piece.key = None if piece.key == key else piece.key
                if joined and joined[-1].key is None and piece.key is None:
                    joined[-1].size += piece.size
                else:
                    joined.append(piece)
            segments[number] = small, joined
    return sum(piece.size for _, pieces in segments for piece in pieces)


def place(size: int, key: int, segments: list[tuple[bool, list[Piece]]]) -> None:
    small = size <= 2**20
    fitting = [
        (piece.size, number, index)
        for number, (is_small, pieces) in enumerate(segments)
        for index, piece in enumerate(pieces)
        if is_small == small and piece.key is None and piece.size >= size
    ]
    if not fitting:
        whole = 2**21 if small else 20 * 2**20 if size < 10 * 2**20 else (size + 2**21 - 1) // 2**21 * 2**21
        segments.append((small, [Piece(whole)]))
        fitting = [(whole, len(segments) - 1, 0)]
    found, number, index = min(fitting)
    rest = found - size
    if rest >= 512 if small else rest > 2**20:
        segments[number][1][index : index + 1] = [Piece(size, key), Piece(rest)]
    else:
        segments[number][1][index].key = key


@given(event_lists())
@example([(0, 9 * MIB), (1, 9 * MIB), (0, None), (1, None), (2, 15 * MIB)])  # both halves of a segment, joined again
def test_what_is_reserved_equals_a_plain_search_of_all_blocks(events: list[Event]) -> None:
    assert after(events).reserved_bytes == plain_reserved(events)


@given(event_lists())
def test_what_is_allocated_is_the_sum_of_rounded_sizes_and_at_most_1_mib_more_a_large_block(
    events: list[Event],
) -> None:
    sizes: dict[int, int] = {}
    exact = 0
    for key, size in events:
        sizes[key] = 0 if size is None else rounded_bytes(size)
        exact = max(exact, sum(sizes.values()))
    num_large = sum(size is not None and size > MIB for _, size in events)
    assert after(events, expandable=True).peak_allocated_bytes == exact
    assert exact <= after(events).peak_allocated_bytes <= exact + num_large * MIB
