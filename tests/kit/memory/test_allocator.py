import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.kit.memory.allocator import (
    LARGE_BUFFER,
    MIN_BLOCK,
    MIN_LARGE,
    ROUND_LARGE,
    SMALL_BUFFER,
    SMALL_SIZE,
    Allocation,
    CachingAllocator,
    Event,
    Free,
    NoRoom,
    replay,
    rounded_bytes,
)

MIB = 2**20


def allocator(*sizes: int, expandable: bool = False, capacity_bytes: int | None = None) -> CachingAllocator:
    """One in which allocations 0, 1, ... of these sizes were made."""
    state = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    for key, size in enumerate(sizes):
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


@pytest.mark.parametrize(("num_bytes", "rounded"), [(1, 512), (512, 512), (513, 1024), (8519680, 8519680)])
def test_sizes_are_rounded_up_to_512_bytes(num_bytes: int, rounded: int) -> None:
    assert rounded_bytes(num_bytes) == rounded
    assert allocator(num_bytes).allocated_bytes == rounded


def test_nothing_is_taken_for_an_empty_tensor() -> None:
    state = allocator(0)
    assert (state.allocated_bytes, state.reserved_bytes) == (0, 0)
    state.free(0)


@pytest.mark.parametrize(
    ("num_bytes", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (101 * MIB, 102 * MIB),
    ],
)
def test_a_segments_size_follows_from_the_first_size_in_it(num_bytes: int, reserved: int) -> None:
    assert allocator(num_bytes).reserved_bytes == reserved


def test_small_and_large_sizes_never_share_a_segment() -> None:
    state = allocator(2 * MIB)  # leaves 18 of 20 MiB free
    state.allocate("small", 1024)
    assert state.reserved_bytes == 22 * MIB


def test_a_small_segment_is_filled_to_the_last_512_bytes() -> None:
    assert allocator(MIB, MIB - 512, 512).reserved_bytes == 2 * MIB
    assert allocator(MIB, MIB - 512, 513).reserved_bytes == 4 * MIB


def test_a_large_blocks_rest_is_split_off_only_above_1_mib() -> None:
    unsplit = allocator(11 * MIB)  # of 12
    assert unsplit.allocated_bytes == 12 * MIB  # torch counts the whole block
    split = allocator(11 * MIB - 512)
    assert split.allocated_bytes == 11 * MIB - 512
    split.allocate("rest", MIB + 512)
    assert split.reserved_bytes == 12 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    state = allocator(40 * MIB, 30 * MIB, 50 * MIB)
    for key in range(3):
        state.free(key)
    state.allocate("a", 29 * MIB + 512)
    # Had it been cut from 40 or 50, there would not be both of these left.
    state.allocate("b", 40 * MIB)
    state.allocate("c", 50 * MIB)
    assert state.reserved_bytes == 120 * MIB


def test_of_free_blocks_of_one_size_the_lower_is_taken() -> None:
    state = allocator(4 * MIB, 4 * MIB, 4 * MIB, 4 * MIB, 4 * MIB)
    state.free(3)
    state.free(1)
    state.allocate("a", 4 * MIB)
    state.free(2)
    # 2 and 3 lie side by side, so they have joined.
    state.allocate("b", 8 * MIB)
    assert state.reserved_bytes == 20 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_join(order: tuple[int, ...]) -> None:
    state = allocator(6 * MIB, 6 * MIB, 8 * MIB)
    assert state.reserved_bytes == 20 * MIB
    for key in order:
        state.free(key)
    state.allocate("whole", 20 * MIB)
    assert state.reserved_bytes == 20 * MIB


def test_blocks_of_different_segments_do_not_join() -> None:
    state = allocator(20 * MIB, 20 * MIB)
    state.free(0)
    state.free(1)
    state.allocate("both", 40 * MIB)
    assert state.reserved_bytes == 80 * MIB


def test_what_is_free_stays_reserved() -> None:
    state = allocator(100 * MIB)
    state.free(0)
    assert (state.allocated_bytes, state.reserved_bytes) == (0, 100 * MIB)
    assert state.peak_allocated_bytes == 100 * MIB
    state.reset_peaks()
    assert (state.peak_allocated_bytes, state.peak_reserved_bytes) == (0, 100 * MIB)


def test_a_full_device_gets_back_whole_free_segments_only() -> None:
    state = allocator(30 * MIB, 12 * MIB, 4 * MIB, 4 * MIB, capacity_bytes=70 * MIB)
    for key in (0, 1, 2):
        state.free(key)  # block 2 shares its segment with 3
    assert state.reserved_bytes == 62 * MIB
    state.allocate("more", 50 * MIB)
    assert (state.reserved_bytes, state.num_retries) == (70 * MIB, 1)
    assert state.peak_reserved_bytes == 70 * MIB


def test_a_full_device_gets_back_small_segments_too() -> None:
    state = allocator(1, capacity_bytes=22 * MIB)
    state.free(0)
    state.allocate("large", 22 * MIB)
    assert (state.reserved_bytes, state.num_retries) == (22 * MIB, 1)


def test_a_device_that_stays_full_is_reported() -> None:
    state = allocator(30 * MIB, 30 * MIB, capacity_bytes=70 * MIB)
    state.free(0)
    with pytest.raises(NoRoom):
        state.allocate("more", 41 * MIB)
    state.allocate("less", 40 * MIB)
    assert state.reserved_bytes == 70 * MIB


def test_the_replay_ends_with_what_found_no_room() -> None:
    events: list[Event] = [
        *(Allocation("a", 30 * MIB), Allocation("b", 20 * MIB), Free("a")),
        *(Allocation("c", 60 * MIB), Allocation("d", 1), Free("unknown")),
    ]
    found = replay(events, capacity_bytes=70 * MIB)
    assert found.refused == Allocation("c", 60 * MIB)
    assert (found.allocated_bytes, found.reserved_bytes, found.num_retries) == (50 * MIB, 50 * MIB, 1)


def test_the_replay_tells_when_the_peak_is_first_reached() -> None:
    events: list[Event] = [
        *(Allocation("a", 30 * MIB), Allocation("b", 20 * MIB), Free("b")),
        *(Allocation("c", 20 * MIB), Free("a")),
    ]
    found = replay(events)
    assert (found.peak_event, found.allocated_bytes) == (1, 50 * MIB)
    assert replay([]).peak_event is None


def test_a_key_is_allocated_once_and_freed_once() -> None:
    state = allocator(1)
    with pytest.raises(AssertionError, match="0 is allocated already"):
        state.allocate(0, 1)
    state.free(0)
    with pytest.raises(AssertionError, match="0 is not allocated"):
        state.free(0)


def test_expandable_segments_grow_by_pages() -> None:
    state = allocator(1, expandable=True)
    assert state.reserved_bytes == 2 * MIB
    state.allocate("large", 2 * MIB)
    assert state.reserved_bytes == 22 * MIB
    state.allocate("larger", 19 * MIB)  # 18 are free
    assert state.reserved_bytes == 42 * MIB
    state.allocate("largest", 59 * MIB)  # 19 are free, and two more pages needed
    assert state.reserved_bytes == 82 * MIB


def test_expandable_segments_have_no_gaps_between_segments() -> None:
    sizes = (20 * MIB, 20 * MIB, 11 * MIB)
    state = allocator(*sizes, expandable=True)
    for key in range(3):
        state.free(key)
    state.allocate("all", 60 * MIB)
    assert state.reserved_bytes == 60 * MIB


def test_a_large_block_of_an_expandable_segment_splits_to_the_last_512_bytes() -> None:
    state = allocator(19 * MIB, MIB + 512, expandable=True)
    assert state.allocated_bytes == 20 * MIB + 512
    assert state.reserved_bytes == 40 * MIB
    assert allocator(20 * MIB - MIB - 512, MIB + 512, expandable=True).reserved_bytes == 20 * MIB


def test_the_end_of_an_expandable_segment_is_kept_for_growing() -> None:
    # Free: 6 MiB in the middle, 5 MiB at the end. 5 fit the end exactly, but it could grow, so the middle is cut.
    state = allocator(4 * MIB, 6 * MIB, 5 * MIB, expandable=True)
    state.free(1)
    state.allocate("a", 5 * MIB)
    state.allocate("b", 25 * MIB)
    assert state.reserved_bytes == 40 * MIB


def test_a_full_device_gets_back_the_free_pages_of_expandable_segments() -> None:
    state = allocator(15 * MIB, 50 * MIB, 15 * MIB, expandable=True, capacity_bytes=80 * MIB)
    assert state.reserved_bytes == 80 * MIB
    state.free(1)  # from 15 to 65 MiB: the pages from 20 to 60 lie wholly within it
    state.allocate("small", 1)
    assert (state.reserved_bytes, state.num_retries) == (42 * MIB, 1)
    # 5 of the 25 MiB lie before the hole that is left; one page within it holds the rest.
    state.allocate("back", 25 * MIB)
    assert state.reserved_bytes == 62 * MIB
    # Behind that page 20 MiB of the hole and 5 mapped ones are free.
    with pytest.raises(NoRoom):
        state.allocate("more", 26 * MIB)
    state.allocate("less", 5 * MIB)
    assert state.reserved_bytes == 62 * MIB


def test_a_hole_that_is_too_small_is_passed_over() -> None:
    state = allocator(15 * MIB, 50 * MIB, 15 * MIB, expandable=True, capacity_bytes=140 * MIB)
    state.free(1)
    state.allocate("large", 70 * MIB)  # 4 pages at the end, once the hole's are returned
    assert (state.reserved_bytes, state.num_retries) == (120 * MIB, 1)


@pytest.mark.parametrize("expandable", [False, True])
def test_a_capacity_that_is_never_reached_changes_nothing(expandable: bool) -> None:
    events: list[Event] = [Allocation(key, (key + 1) * 700_000) for key in range(20)]
    events += [Free(key) for key in range(0, 20, 3)]
    events += [Allocation(-1, 40 * MIB)]
    free = replay(events, expandable=expandable)
    assert replay(events, expandable=expandable, capacity_bytes=free.reserved_bytes) == free


SIZES = st.one_of(
    *(st.integers(0, 4096), st.integers(1, 2 * MIB), st.integers(MIB - 1024, MIB + 1024)),
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
            events.append(Free(live.pop(pick % len(live))))
        else:
            events.append(Allocation(key, size))
            live.append(key)
    return events


def running_peak(events: Iterable[Event]) -> int:
    """Of the rounded sizes."""
    sizes: dict[object, int] = {}
    peak = 0
    for event in events:
        if isinstance(event, Allocation):
            sizes[event.key] = rounded_bytes(event.num_bytes)
        else:
            del sizes[event.key]
        peak = max(peak, sum(sizes.values()))
    return peak


@dataclass
class Piece:
    size: int
    key: object = None
    """None where it is free."""


def plain_reserved(events: Iterable[Event]) -> int:
    """The same rules in the plainest way: each segment a list of pieces, and all of them searched every time."""
    segments: list[tuple[bool, list[Piece]]] = []
    for event in events:
        if isinstance(event, Free):
            for number, (small, pieces) in enumerate(segments):
                joined: list[Piece] = []
                for piece in pieces:
                    piece.key = None if piece.key == event.key else piece.key
                    if joined and joined[-1].key is None and piece.key is None:
                        joined[-1].size += piece.size
                    else:
                        joined.append(piece)
                segments[number] = small, joined
        elif event.num_bytes > 0:
            size = (event.num_bytes + 511) // 512 * 512
            place(size, event.key, segments)
    return sum(piece.size for _, pieces in segments for piece in pieces)


def place(size: int, key: object, segments: list[tuple[bool, list[Piece]]]) -> None:
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


def check_layout(state: CachingAllocator) -> None:
    """No two blocks overlap; what is counted is what is there; no two free neighbours are left apart."""
    held = [entry[1] for entry in state._in_use.values() if entry is not None]
    free = [block for pool in (state._small, state._large) for block in pool.blocks()]
    stretches = sorted((block.address, block.address + block.size) for block in [*held, *free])
    assert all(end <= start for (_, end), (start, _) in pairwise(stretches))
    assert sum(block.size for block in held) == state.allocated_bytes
    assert sum(block.size for block in [*held, *free]) == state.reserved_bytes
    assert all(block.next is None or block.next.allocated or not block.next.mapped for block in free)


@given(event_lists(), st.booleans(), st.one_of(st.none(), st.integers(2 * MIB, 300 * MIB)))
def test_blocks_never_overlap_and_are_all_accounted_for(
    events: list[Event], expandable: bool, capacity_bytes: int | None
) -> None:
    state = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    for event in events:
        if isinstance(event, Free):
            state.free(event.key)
        else:
            try:
                state.allocate(event.key, event.num_bytes)
            except NoRoom:
                break
        check_layout(state)
        assert state.allocated_bytes <= state.reserved_bytes <= state.peak_reserved_bytes
        assert capacity_bytes is None or state.reserved_bytes <= capacity_bytes


@given(event_lists())
def test_expandable_segments_allocate_the_running_sum_of_rounded_sizes(events: list[Event]) -> None:
    assert replay(events, expandable=True).allocated_bytes == running_peak(events)


@given(event_lists())
def test_plain_segments_allocate_that_and_at_most_1_mib_more_a_large_block(events: list[Event]) -> None:
    num_large = sum(isinstance(event, Allocation) and event.num_bytes > MIB for event in events)
    exact = running_peak(events)
    assert exact <= replay(events).allocated_bytes <= exact + num_large * MIB


@given(event_lists())
def test_what_is_reserved_equals_a_plain_search_of_all_blocks(events: list[Event]) -> None:
    assert replay(events).reserved_bytes == plain_reserved(events)


@given(event_lists(), st.booleans(), st.randoms(use_true_random=False))
def test_freeing_everything_leaves_whole_segments(events: list[Event], expandable: bool, random: Random) -> None:
    state = CachingAllocator(expandable=expandable)
    for event in events:
        if isinstance(event, Free):
            state.free(event.key)
        else:
            state.allocate(event.key, event.num_bytes)
    keys = list(state._in_use)
    random.shuffle(keys)
    for key in keys:
        state.free(key)
    free = [block for pool in (state._small, state._large) for block in pool.blocks()]
    assert state.allocated_bytes == 0
    assert sum(block.size for block in free) == state.reserved_bytes
    assert all(block.previous is None for block in free)
    assert all(block.next is None or not block.next.mapped for block in free)
