"""Private parts of torch, for torch 2.13.0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from torch._C._profiler import _EventType
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import optimizer
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "active_fake_mode", "in_kernel_invocation_manager"]
__all__ += ["tree_leaves", "tree_map_only"]

without_modes = _disable_current_modes
"""A context in which neither fake tensors nor dispatch modes act."""


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


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the memory that a tensor shares with its views."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001


@contextmanager
def foreach_takes(kind: type[torch.Tensor]) -> Iterator[None]:
    """Optimizers and clipping process tensors of this class many at once, as they process plain ones."""
    with ExitStack() as stack:
        for module in (_foreach_utils, optimizer):
            types = [*module._foreach_supported_types, kind]  # noqa: SLF001
            stack.enter_context(patch.object(module, "_foreach_supported_types", types))
        yield


@contextmanager
def foreach_on_cpu() -> Iterator[None]:
    """Optimizers take their many-tensors-at-once form on a CPU by default, as they do on CUDA."""
    devices = optimizer._get_foreach_kernels_supported_devices  # type: ignore[attr-defined]  # noqa: SLF001
    with patch.object(optimizer, "_get_foreach_kernels_supported_devices", lambda: [*devices(), "cpu"]):
        yield


@contextmanager
def overridden_on_cpu(operations: Iterable[tuple[str, str, Callable[..., Any]]]) -> Iterator[None]:
    """Replace operations of `aten` on CPU tensors, each given as its name, a dispatch key and a function.

    At the dispatcher: a function mode is left while checkpointed layers are recomputed in backward, and the two passes
    would then differ.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, key, function in operations:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns that a kernel is overridden
                library.impl(name, function, key, allow_override=True)
        yield
    finally:
        library._destroy()  # noqa: SLF001 - restores the CPU's own


def without_autocast() -> Any:
    """A context in which a CPU's autocast does not act."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))  # noqa: SLF001


@contextmanager
def pretended_processes(count: int) -> Iterator[DeviceMesh]:
    """This process as the first of `count`; what it sends to the others is dropped."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        torch.distributed.destroy_process_group()
