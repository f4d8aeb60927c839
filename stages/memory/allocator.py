"""torch's caching allocator, replayed without a device: the memory that it takes for a list of allocations.

The rules are those of torch's c10/cuda/CUDACachingAllocator.cpp, the constants those of c10/core/AllocatorConfig.h of
torch 2.13; torch's "CUDA semantics" describes both under "Memory management". One device that never fills up, one
stream, and default settings, `expandable_segments` apart.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable

MIN_BLOCK = 512
"""kMinBlockSize: every size is rounded up to a multiple of this."""
SMALL_SIZE = 1 << 20
"""kSmallSize: the largest size of the small pool."""
SMALL_BUFFER = 2 << 20
"""kSmallBuffer: a segment, or a page of an expandable one, of the small pool."""
LARGE_BUFFER = 20 << 20
"""large_segment_size: a segment for sizes below MIN_LARGE, or a page of an expandable one, of the large pool."""
MIN_LARGE = 10 << 20
"""kMinLargeAlloc: from this size on, an allocation that finds no free block gets a segment of its own."""
ROUND_LARGE = 2 << 20
"""kRoundLarge: such a segment is a multiple of this."""


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def rounded_bytes(num_bytes: int) -> int:
    """The size of the block for an allocation of num_bytes >= 1 (round_size)."""
    return round_up(num_bytes, MIN_BLOCK)


def segment_bytes(size: int) -> int:
    """Bytes taken from the device for a rounded size without a free block (get_allocation_size)."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE else round_up(size, ROUND_LARGE)


class CachingAllocator:
    """The state of torch's allocator on one device."""

    def __init__(self, *, expandable: bool = False) -> None:
        """expandable: PYTORCH_ALLOC_CONF=expandable_segments:True."""
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        """torch.cuda.max_memory_allocated: rounded sizes, with rests that could not be split off."""
        self._small = _Pool(SMALL_BUFFER, min_rest=MIN_BLOCK, expandable=expandable)
        self._large = _Pool(LARGE_BUFFER, min_rest=MIN_BLOCK if expandable else SMALL_SIZE + 1, expandable=expandable)
        self._in_use: dict[Hashable, tuple[_Pool, _Block]] = {}

    @property
    def reserved_bytes(self) -> int:
        """torch.cuda.memory_reserved, and its peak: nothing is returned to a device that has room."""
        return self._small.reserved_bytes + self._large.reserved_bytes

    def allocate(self, key: Hashable, num_bytes: int) -> None:
        """`key` names it until it is freed. num_bytes: at least 1."""
        assert key not in self._in_use, f"{key} is allocated already"
        size = rounded_bytes(num_bytes)
        pool = self._small if size <= SMALL_SIZE else self._large
        block = pool.take(size)
        self._in_use[key] = pool, block
        self.allocated_bytes += block[0]
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: Hashable) -> None:
        assert key in self._in_use, f"{key} is not allocated"
        pool, block = self._in_use.pop(key)
        self.allocated_bytes -= block[0]
        pool.give_back(*block)


_Block = tuple[int, int]
"""Size and address."""


class _Pool:
    """The segments of the small sizes, or of the large ones; an expandable one is a single segment that grows.

    Segments lie one behind the other, with a gap. Between blocks of one size the lower is taken first, so this matters;
    on a device the driver chooses, mostly in this order too.
    """

    def __init__(self, page_bytes: int, *, min_rest: int, expandable: bool) -> None:
        """min_rest: the rest of a block becomes a block of its own from this size on (should_split)."""
        self.reserved_bytes = 0
        self._page_bytes, self._min_rest, self._expandable = page_bytes, min_rest, expandable
        self._free: list[_Block] = []
        """Sorted: the first that is large enough is the best fit."""
        self._starts: dict[int, int] = {}
        """Sizes of free blocks by their address."""
        self._ends: dict[int, int] = {}
        """Sizes of free blocks by the address behind them."""
        self._end = 0
        """The address behind the last segment."""

    def take(self, size: int) -> _Block:
        """A block of `size`, or larger where the rest is too small to be split off."""
        block_size, address = self._best_fit(size) or self._grow(size)
        if (rest := block_size - size) >= self._min_rest:
            self._add_free(rest, address + size)
            block_size = size
        return block_size, address

    def give_back(self, size: int, address: int) -> None:
        """Joined with its free neighbours (try_merge_blocks)."""
        if after := self._starts.get(address + size):
            self._remove_free(after, address + size)
        if before := self._ends.get(address, 0):
            self._remove_free(before, address - before)
        self._add_free(before + size + (after or 0), address - before)

    def _best_fit(self, size: int) -> _Block | None:
        """The smallest free block of at least `size`, the lowest of several (get_free_block)."""
        index = bisect_left(self._free, (size, 0))
        if index == len(self._free):
            return None
        # The end of an expandable segment counts as large as it can grow: any other that is large enough is preferred.
        if self._expandable and sum(self._free[index]) == self._end and index + 1 < len(self._free):
            index += 1
        return self._remove_free(*self._free[index])

    def _grow(self, size: int) -> _Block:
        """A block of at least `size`, of memory new from the device (alloc_block, try_allocate_expandable_block)."""
        left = 0
        if not self._expandable:
            num_bytes = segment_bytes(size)
            self._end += MIN_BLOCK  # the gap
        else:
            if left := self._ends.get(self._end, 0):
                self._remove_free(left, self._end - left)
            num_bytes = round_up(size - left, self._page_bytes)
        block = left + num_bytes, self._end - left
        self._end += num_bytes
        self.reserved_bytes += num_bytes
        return block

    def _add_free(self, size: int, address: int) -> None:
        insort(self._free, (size, address))
        self._starts[address] = self._ends[address + size] = size

    def _remove_free(self, size: int, address: int) -> _Block:
        del self._free[bisect_left(self._free, (size, address))]
        del self._starts[address], self._ends[address + size]
        return size, address
