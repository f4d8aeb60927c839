"""Private parts of torch, for torch 2.13.0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.optim import optimizer
from torch.profiler import ProfilerActivity, profile
from torch.profiler._utils import traverse_dfs
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "active_fake_mode", "in_kernel_invocation_manager"]
__all__ += ["tree_leaves", "tree_map_only"]

without_modes = _disable_current_modes
"""A context in which neither fake tensors nor dispatch modes act."""

aten: Any = torch.ops.aten

# The attention kernels of CUDA by their operators: scaled_dot_product_attention calls the one that it chooses.
flash_attention = aten._scaled_dot_product_flash_attention
efficient_attention = aten._scaled_dot_product_efficient_attention
math_attention = aten._scaled_dot_product_attention_math
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
varlen_attn = varlen.varlen_attn  # its module registers the operators
VARIABLE_LENGTHS_BACKWARD: Any = torch.ops.torch_attn._varlen_attn_backward.default

GROUPED_MM = aten._grouped_mm.default
READ_SCALAR = aten._local_scalar_dense.default
"""The operator behind `item`: the CPU waits for the device."""


def flops_of(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Floating-point operations of one operator, by torch's own rules where it has one (torch.utils.flop_counter).

    Its rules count causal attention whole: here it counts half. It has none for products in nf4, of groups (a
    mixture's experts), and in place. Elementwise operations count nothing.
    """
    if rule := flop_registry.get(func.overloadpacket):
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        return int(rule(*args, **kwargs, out_val=output)) // (2 if named.get("is_causal") else 1)
    if func is aten.addmm_.default:
        return 2 * args[1].numel() * args[2].shape[-1]
    if func is GROUPED_MM:
        return 2 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]
    if func.__name__.startswith("gemm_4bit"):
        return 2 * args[0].numel() * args[2][0]
    return 0


class PatchProjection(nn.Conv3d):
    """A convolution with an input as large as its kernel, computed as a matrix product.

    Qwen's vision towers project each patch by an nn.Conv3d. cuDNN has no bf16 backward for it, or a slow one: 50 s a
    step against 1 s (github.com/modelscope/ms-swift/issues/6232). A checkpoint needs no conversion: the weight keeps
    its name and shape.
    """

    # accelerate's hooks, on a model that is spread over GPUs, hold the `forward` that they found.
    def _conv_forward(self, patches: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """patches: (N, in_channels, *kernel_size). Returns (N, out_channels, 1, 1, 1)."""
        assert patches.shape[1:] == weight.shape[1:], (patches.shape, weight.shape)
        return F.linear(patches.flatten(1), weight.flatten(1), bias)[..., None, None, None]


class CpuPeak:
    size_bytes = 0


@contextmanager
def cpu_peak(existing: Iterable[object]) -> Iterator[CpuPeak]:
    """Measure the peak memory of CPU tensors within the block; read it afterwards.

    existing: tensors from before that stay throughout; those that share their storage count once, other values never.
    """
    held = [each.untyped_storage() for each in existing if isinstance(each, torch.Tensor)]
    storages = {storage.data_ptr(): storage.nbytes() for storage in held}
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
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    events = (event for event in traverse_dfs(tree) if event.tag == _EventType.Allocation)
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
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def storage_key(tensor: torch.Tensor | torch.UntypedStorage) -> int:
    """Identity of the memory that a tensor shares with its views."""
    storage = tensor if isinstance(tensor, torch.UntypedStorage) else tensor.untyped_storage()
    return storage._cdata


@contextmanager
def foreach_takes(kind: type[torch.Tensor]) -> Iterator[None]:
    """Optimizers and clipping process tensors of this class many at once, as they process plain ones."""
    with ExitStack() as stack:
        for module in (_foreach_utils, optimizer):
            types = [*module._foreach_supported_types, kind]
            stack.enter_context(patch.object(module, "_foreach_supported_types", types))
        yield


def foreach_on_cpu() -> AbstractContextManager[Any]:
    """In the block optimizers take their many-tensors-at-once form on a CPU by default, as they do on CUDA."""
    devices = optimizer._get_foreach_kernels_supported_devices  # type: ignore[attr-defined]
    return patch.object(optimizer, "_get_foreach_kernels_supported_devices", lambda: [*devices(), "cpu"])


@contextmanager
def overridden_on_cpu(operations: Iterable[tuple[str, str, Callable[..., Any]]]) -> Iterator[None]:
    """Replace operations of `aten` on CPU tensors, each given as its name, a dispatch key and a function.

    At the dispatcher: a function mode is left while checkpointed layers are recomputed in backward, and the two passes
    would then differ.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:  # restores the CPU's own
        with warnings.catch_warnings(action="ignore"):  # it warns that a kernel is overridden
            for name, key, function in operations:
                library.impl(name, function, key, allow_override=True)
        yield


def without_autocast() -> Any:
    """A context in which a CPU's autocast does not act."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


@contextmanager
def pretended_processes(count: int) -> Iterator[DeviceMesh]:
    """This process as the first of `count`; what it sends to the others is dropped."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        torch.distributed.destroy_process_group()
