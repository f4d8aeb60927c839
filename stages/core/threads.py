"""Work on many items at once, in threads: digests, for which hashlib and zlib let other threads run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def map_largest_first(work: Callable[[K], V], sizes: Mapping[K, int]) -> dict[K, V]:
    """The result of `work` for each item, by item, in the order of `sizes`; raises what it raises of one of them.

    Large items first: started last, one of them would keep the other threads waiting.
    """
    largest_first = sorted(sizes, key=sizes.__getitem__, reverse=True)
    with ThreadPoolExecutor(usable_cores()) as threads:
        done = dict(zip(largest_first, threads.map(work, largest_first), strict=True))
    return {item: done[item] for item in sizes}


def usable_cores() -> int:
    """Cores that this process may use, as torch counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
