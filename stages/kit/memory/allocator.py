"""What torch takes from a CUDA device for a list of allocations: its caching allocator, replayed without a device.

The rules are those of torch's c10/cuda/CUDACachingAllocator.cpp, the constants those of c10/core/AllocatorConfig.h of
torch 2.13; torch's "CUDA semantics" describes both under "Memory management". One device, one stream, and default
settings, `expandable_segments` apart. Nothing here sets max_split_size_mb, roundup_power2_divisions,
garbage_collection_threshold or large_segment_size_mb, so their rules are left out: with the first of them goes torch's
attempt, on a full device, to return "oversize" segments before all others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

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

# Pages of address space that an expandable segment may grow to. torch reserves 9/8 of the device, and begins another
# segment past that; it gets there only where memory was returned to a full device many times.
_PAGES = 1 << 30


class Allocation(NamedTuple):
    key: Hashable
    num_bytes: int


class Free(NamedTuple):
    key: Hashable


Event = Allocation | Free


@dataclass(frozen=True, kw_only=True)
class Replay:
    allocated_bytes: int
    """The peak, as torch.cuda.max_memory_allocated counts it: rounded, and with what could not be split off."""
    reserved_bytes: int
    """The peak, as torch.cuda.max_memory_reserved counts it."""
    peak_event: int | None
    """The first event after which the peak of allocated_bytes was reached; None where nothing was allocated."""
    num_retries: int
    """How often free segments were returned to a full device to make room: torch stands still for it."""
    refused: Allocation | None
    """What torch raises OutOfMemoryError for. The replay ends there."""


class NoRoom(Exception):
    """The device is full, also after what was free has been returned to it."""


def replay(events: Iterable[Event], *, expandable: bool = False, capacity_bytes: int | None = None) -> Replay:
    """The peaks that a list of allocations and frees leads to.

    expandable: PYTORCH_ALLOC_CONF=expandable_segments:True.
    capacity_bytes: what torch may reserve on the device; None for no limit, where nothing is ever returned to it.
    """
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    peak_event, peak_bytes, refused = None, 0, None
    for index, event in enumerate(events):
        if isinstance(event, Free):
            allocator.free(event.key)
            continue
        try:
            allocator.allocate(event.key, event.num_bytes)
        except NoRoom:
            refused = event
            break
        if allocator.allocated_bytes > peak_bytes:
            peak_event, peak_bytes = index, allocator.allocated_bytes
    return Replay(
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
        peak_event=peak_event,
        num_retries=allocator.num_retries,
        refused=refused,
    )


def rounded_bytes(num_bytes: int) -> int:
    """What an allocation of num_bytes >= 1 asks for (round_size)."""
    return -(-num_bytes // MIN_BLOCK) * MIN_BLOCK


def segment_bytes(size: int) -> int:
    """What is taken from the device for a rounded size that finds no free block (get_allocation_size)."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


class _Block:
    """A stretch of a segment, between its neighbours: in use, free, or (expandable segments only) address space that
    no memory is mapped to."""

    __slots__ = ("address", "allocated", "mapped", "next", "previous", "size")

    def __init__(self, address: int, size: int, *, mapped: bool = True) -> None:
        self.address = address
        self.size = size
        self.allocated = False
        self.mapped = mapped
        self.previous: _Block | None = None
        self.next: _Block | None = None

    def split(self, size: int) -> _Block:
        """Cut off what lies behind the first `size` bytes."""
        rest = _Block(self.address + size, self.size - size, mapped=self.mapped)
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next = rest
        self.size = size
        return rest


class _Pool:
    """The blocks that are not in use: of the small sizes, or of the large ones."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page_bytes = SMALL_BUFFER if small else LARGE_BUFFER
        self.free: list[tuple[int, int]] = []
        """Size and address of each free block, sorted: the first that is large enough is the best fit."""
        self.unmapped: list[int] = []
        """The address of each unmapped block, sorted."""
        self._blocks: dict[int, _Block] = {}

    def add(self, block: _Block) -> None:
        self._blocks[block.address] = block
        if block.mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)

    def remove(self, block: _Block) -> None:
        del self._blocks[block.address]
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]

    def take_best_fit(self, size: int) -> _Block | None:
        """The smallest free block of at least `size`, the lowest of several; no longer free then (get_free_block).

        A block that unmapped address space follows counts as large as it could grow, so a larger one within the
        segment is preferred to it.
        """
        index = bisect_left(self.free, (size, 0))
        if index == len(self.free):
            return None
        block = self._blocks[self.free[index][1]]
        while index + 1 < len(self.free):
            following = self._blocks[self.free[index + 1][1]]
            if _extent(following) >= _extent(block):
                break
            index, block = index + 1, following
        del self.free[index]
        del self._blocks[block.address]
        return block

    def blocks(self) -> list[_Block]:
        """The free blocks, smallest first."""
        return [self._blocks[address] for _, address in self.free]

    def expandable(self, size: int) -> _Block | None:
        """The lowest start of a chain of free and unmapped blocks that hold `size` together (find_expandable_block)."""
        for address in self.unmapped:
            block = self._blocks[address]
            if block.previous is not None and not block.previous.allocated:
                block = block.previous
            available = 0
            link: _Block | None = block
            while available < size and link is not None and not link.allocated:
                available += link.size
                link = link.next
            if available >= size:
                return block
        return None


def _extent(block: _Block) -> int:
    """The size that a free block could have with the unmapped address space behind it."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


class CachingAllocator:
    """The state of torch's allocator on one device. Sizes that it tells are in bytes."""

    def __init__(self, *, expandable: bool = False, capacity_bytes: int | None = None) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_retries = 0
        self._expandable = expandable
        self._capacity_bytes = capacity_bytes
        self._small = _Pool(small=True)
        self._large = _Pool(small=False)
        self._in_use: dict[Hashable, tuple[_Pool, _Block] | None] = {}
        # Segments lie one behind the other. Between blocks of one size the lower is taken first, so this matters; on a
        # device the driver chooses, mostly in this order too.
        self._next_address = 0

    def reset_peaks(self) -> None:
        """torch.cuda.reset_peak_memory_stats."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def allocate(self, key: Hashable, num_bytes: int) -> None:
        """`key` names it until it is freed. Nothing is taken for 0 bytes.

        Raises NoRoom; what was allocated before stays.
        """
        assert num_bytes >= 0, num_bytes
        assert key not in self._in_use, f"{key} is allocated already"
        if num_bytes == 0:
            self._in_use[key] = None
            return
        size = rounded_bytes(num_bytes)
        pool = self._small if size <= SMALL_SIZE else self._large
        block = pool.take_best_fit(size) or self._grow(pool, size)
        if block is None:
            self.num_retries += 1
            self._return_free_memory()
            block = self._grow(pool, size)
        if block is None:
            raise NoRoom
        if self._splits(pool, block.size - size):
            pool.add(block.split(size))
        block.allocated = True
        self._in_use[key] = pool, block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: Hashable) -> None:
        assert key in self._in_use, f"{key} is not allocated"
        held = self._in_use.pop(key)
        if held is None:
            return
        pool, block = held
        block.allocated = False
        self.allocated_bytes -= block.size
        self._merge(pool, block)
        pool.add(block)

    def _splits(self, pool: _Pool, remaining: int) -> bool:
        """Whether the rest of a block becomes a block of its own (should_split)."""
        return remaining >= MIN_BLOCK if pool.small or self._expandable else remaining > SMALL_SIZE

    def _merge(self, pool: _Pool, block: _Block) -> None:
        """Join a block, which is in no pool, with neighbours that are as free and as mapped (try_merge_blocks)."""
        before, after = block.previous, block.next
        if before is not None and not before.allocated and before.mapped == block.mapped:
            pool.remove(before)
            block.address = before.address
            block.size += before.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and not after.allocated and after.mapped == block.mapped:
            pool.remove(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block

    def _reserve(self, num_bytes: int) -> bool:
        """Take memory from the device, where it has that much."""
        if self._capacity_bytes is not None and self.reserved_bytes + num_bytes > self._capacity_bytes:
            return False
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _grow(self, pool: _Pool, size: int) -> _Block | None:
        """A block of at least `size`, in no pool, of memory new from the device (alloc_block)."""
        if self._expandable:
            return self._expand(pool, size)
        num_bytes = segment_bytes(size)
        return _Block(self._place(num_bytes), num_bytes) if self._reserve(num_bytes) else None

    def _place(self, num_bytes: int) -> int:
        """The address of a new segment: a multiple of both pools' pages."""
        address = self._next_address
        self._next_address += -(-num_bytes // LARGE_BUFFER) * LARGE_BUFFER
        return address

    def _expand(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages of the expandable segment until a block is large enough (try_allocate_expandable_block)."""
        block = pool.expandable(size)
        if block is None:
            space = _PAGES * pool.page_bytes
            block = _Block(self._place(space), space, mapped=False)
            pool.add(block)
        if not block.mapped and not self._map(pool, block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(pool, following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _map(self, pool: _Pool, block: _Block, size: int) -> bool:
        """Put memory behind the first `size` bytes of an unmapped block, whole pages of it (map_block)."""
        num_bytes = -(-size // pool.page_bytes) * pool.page_bytes
        if not self._reserve(num_bytes):
            return False
        pool.remove(block)
        if num_bytes < block.size:
            pool.add(block.split(num_bytes))
        block.mapped = True
        self._merge(pool, block)
        pool.add(block)
        return True

    def _return_free_memory(self) -> None:
        """Give free segments, or free pages of expandable ones, back to the device (release_cached_blocks)."""
        for pool in (self._large, self._small):
            for block in pool.blocks():
                if self._expandable:
                    self._unmap(pool, block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _unmap(self, pool: _Pool, block: _Block) -> None:
        """Take the memory away from the pages that lie wholly within a free block (unmap_block)."""
        page = pool.page_bytes
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if end < block.address + block.size:
            pool.add(block.split(end - block.address))
        if begin > block.address:
            pages = block.split(begin - block.address)
            pool.add(block)
            block = pages
        block.mapped = False
        self._merge(pool, block)
        pool.add(block)
        self.reserved_bytes -= end - begin
