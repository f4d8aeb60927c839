"""Private parts of torch, for torch 2.13.0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


class CpuPeak:
    size_bytes = 0


@contextmanager
def cpu_peak(existing: Iterable[torch.Tensor]) -> Iterator[CpuPeak]:
    """Measure the peak memory of CPU tensors within the block; read it afterwards.

    existing: tensors from before that stay throughout; those that share their storage count once.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in existing}
    peak = CpuPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    peak.size_bytes = sum(storages.values()) + max(accumulate(_memory_changes(profiler), initial=0))


def _memory_changes(profiler: profile) -> Iterator[int]:
    """Bytes allocated (> 0) and freed (< 0), in order.

    The profiler's tables sum memory up by operator; only its raw events say what was alive at once. They include frees
    of tensors that an earlier profile saw allocated, which do not count here.
    """
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    waiting = profiler.profiler.kineto_results.experimental_event_tree()
    events: list[Any] = []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == _EventType.Allocation:
            events.append(event)
    alive: set[int] = set()
    for event in sorted(events, key=attrgetter("start_time_ns")):
        pointer, size_bytes = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size_bytes > 0:
            alive.add(pointer)
            yield size_bytes
        elif pointer in alive:
            alive.remove(pointer)
            yield size_bytes


def expand_segments() -> None:
    """Let torch's allocator map a GPU's memory page by page; before it allocates (PYTORCH_ALLOC_CONF does the same)."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # noqa: SLF001
