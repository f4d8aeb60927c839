"""Peak memory of tensors, measured: on a GPU by torch's allocator, on a CPU by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from stages.core.params.schema import DeviceParams


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """On the fullest device of this process."""

    allocated_bytes: int
    """On a GPU over all of the training, on a CPU over its rehearsal."""
    reserved_bytes: int
    """Taken from the device by torch; on a CPU the same."""
    kind: str
    """cuda_allocated or cpu_allocated."""

    @classmethod
    def of(cls, device: DeviceParams, *, on_cpu: int) -> PeakMemory:
        """The peak so far. on_cpu: the measured bytes for a CPU, which keeps no account."""
        if device.kind == "cpu":
            return cls(allocated_bytes=on_cpu, reserved_bytes=on_cpu, kind="cpu_allocated")
        gpus = range(torch.cuda.device_count())
        return cls(
            allocated_bytes=max(map(torch.cuda.max_memory_allocated, gpus)),
            reserved_bytes=max(map(torch.cuda.max_memory_reserved, gpus)),
            kind="cuda_allocated",
        )


class CpuPeak:
    size_bytes = 0


@contextmanager
def cpu_peak(held: Iterable[torch.Tensor]) -> Iterator[CpuPeak]:
    """Measures the peak of CPU tensors within the block; read it after. held: tensors that exist before, and stay."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    peak = CpuPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    peak.size_bytes = sum(storages.values()) + max(accumulate(_changes(profiler), initial=0))


def _changes(profiler: profile) -> Iterator[int]:
    """Bytes that were allocated (> 0) and freed (< 0), in order.

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
