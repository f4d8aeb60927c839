"""Peak memory of tensors, measured: on a GPU by torch's allocator, on a CPU by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from stages.core.params.schema import DeviceParams
from stages.kit.internals.torch_internals import memory_changes


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
    peak.size_bytes = sum(storages.values()) + max(accumulate(memory_changes(profiler), initial=0))
