"""Records the allocations of a training step: a real one, or one without weights or a GPU.

Without weights, floating-point tensors are fake: they have a shape, a type and a lifetime, and no contents
(torch._subclasses.fake_tensor). Small tensors of whole numbers stay real, since models compute shapes from them, as
Qwen2-VL does from its images' grids.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from stages.core.params.schema import DeviceParams
from stages.internals.torch_internals import (
    GROUPED_MM,
    READ_SCALAR,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    active_fake_mode,
    aten,
    flops_of,
    foreach_takes,
    in_kernel_invocation_manager,
    storage_key,
    tree_leaves,
    without_modes,
)
from stages.internals.trl_internals import LOSS_TILE
from stages.memory.allocator import CachingAllocator, rounded_bytes
from stages.memory.cuda import cpu_bytes, cuda_semantics, hidden_bytes
from stages.planning.cards import multiprocessors
from stages.planning.prediction import Budget, Phase

_DEVICE = torch.ops.prim.device.default
_VIEWS = {
    *(aten.detach.default, aten.alias.default, aten.view.default, aten.expand.default, aten.slice.Tensor),
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.select.int, aten.unsqueeze.default),
}
"""Views that make up half of a step's operations."""

REAL_LIMIT = 1 << 22
"""Elements up to which a tensor of whole numbers has contents."""

Peak: TypeAlias = Counter[Budget]
"""Memory in bytes by category at the peak of a phase."""


@dataclass(slots=True)
class Storage:
    """One piece of memory that tensors share. Times are ticks of the recording's clock."""

    size_bytes: int
    budget: Budget
    born: int
    died: int | None = None
    """None if it outlived the recording."""


@dataclass
class Recording:
    """The storages of one step. Tick n is the n-th allocation, free or change of phase."""

    cuda: bool
    """Whether sizes count as torch's CUDA allocator hands them out, or as they are."""
    storages: list[Storage] = field(default_factory=list)
    phases: list[tuple[int, Phase]] = field(default_factory=list)
    """The tick at which each phase began."""
    flops: int = 0
    """Floating-point operations of matrix products and attention, what checkpointing repeats included."""
    operators: int = 0
    """Calls of torch's operators after loading, views apart: on a GPU each launches a kernel, or a few."""

    def timeline(self) -> list[tuple[int, Storage | Phase]]:
        """In order: storages, at their birth and at their death, and phases, at their beginning."""
        births = ((storage.born, storage) for storage in self.storages)
        deaths = ((storage.died, storage) for storage in self.storages if storage.died is not None)
        events: list[tuple[int, Storage | Phase]] = [*self.phases, *births, *deaths]
        return sorted(events, key=lambda event: event[0])

    def peaks(self) -> dict[Phase, Peak]:
        """The peak of each phase; what is left of earlier phases counts."""
        phase: Phase = "load"
        current = Peak()
        peaks = {phase: Peak()}
        for tick, event in self.timeline():
            if isinstance(event, Storage):
                size = rounded_bytes(event.size_bytes) if self.cuda else event.size_bytes
                current[event.budget] += size if tick == event.born else -size
            else:
                phase = event
            if phase not in peaks or current.total() > peaks[phase].total():
                peaks[phase] = current.copy()
        return peaks

    def replayed(self, *, expandable: bool) -> CachingAllocator:
        """torch's allocator at the end of the step."""
        allocator = CachingAllocator(expandable=expandable)
        for tick, event in self.timeline():
            if isinstance(event, Storage) and event.size_bytes:
                if tick == event.born:
                    allocator.allocate(id(event), event.size_bytes)
                else:
                    allocator.free(id(event))
        return allocator


class Recorder(TorchDispatchMode):
    """Records every storage that is allocated while it is entered; of a GPU with rounded sizes, and with what kernels
    allocate for themselves."""

    def __init__(self, device: DeviceParams, config: PreTrainedConfig) -> None:
        """config: of the recorded model."""
        super().__init__()
        self._multiprocessors = multiprocessors(device)
        self.recording = Recording(cuda=device.kind == "cuda")
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._vocab_size = config.get_text_config().vocab_size
        self._phase: Phase = "load"
        self._clock = 0
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Storage]] = {}

    def begin(self, phase: Phase) -> None:
        self._phase = phase
        self.recording.phases.append((self._tick(), phase))

    def label(self, values: Iterable[object], budget: Budget) -> None:
        """Set the category of the tensors among these values; those that are not known yet are recorded."""
        for tensor in values:
            if isinstance(tensor, torch.Tensor):
                self._record(tensor)
                self._alive[storage_key(tensor)][1].budget = budget

    def add(self, size_bytes: int, budget: Budget) -> Storage:
        """Record memory that is allocated now, and kept to the end unless its `died` is set."""
        storage = Storage(size_bytes, budget, born=self._tick())
        self.recording.storages.append(storage)
        return storage

    def finish(self) -> Recording:
        """The recording, without what died while loading: real weights come one by one, not through initialization."""
        start = next((tick for tick, phase in self.recording.phases if phase != "load"), 0)
        self.recording.storages = [
            storage for storage in self.recording.storages if storage.died is None or storage.died >= start
        ]
        self._alive.clear()
        return self.recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # most calls are this one
            return args[0].fake_device
        if func in _VIEWS and isinstance(args[0], FakeTensor) and active_fake_mode() is None:
            return _viewed(func, args, kwargs or {})
        kwargs = kwargs or {}
        if any(issubclass(each, DTensor) for each in types):  # it returns with this process's share of it
            return NotImplemented
        if active_fake_mode() is not None:  # a DTensor infers the placement of its result
            return func(*args, **kwargs)
        return self.recorded(func, args, kwargs)

    def recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on plain tensors and record what it allocates."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        any_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if any_fake or not _stays_real(func, args, kwargs, tensors):
            with self._fake_mode:
                output = _WITHOUT_CONTENTS.get(func, func)(*args, **kwargs)
        else:
            output = func(*args, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._record(leaf)
        if func.namespace == "c10d":
            self._relabel_messages(tensors)
        # Allocated beside the output, which exists before the kernel ends.
        on_cuda, sms = self.recording.cuda, self._multiprocessors
        if hidden := hidden_bytes(func, args, sms) if on_cuda else cpu_bytes(func, args):
            storage = self.add(hidden, "temporaries")
            storage.died = self._tick()
        self.recording.flops += flops_of(func, args, kwargs, output)
        self.recording.operators += self._phase != "load"
        return output

    def _relabel_messages(self, tensors: Iterable[torch.Tensor]) -> None:
        """Messages between processes are temporary; they were counted as activations."""
        for storage in (self._alive[key][1] for tensor in tensors if (key := storage_key(tensor)) in self._alive):
            if storage.budget == "activations":
                storage.budget = "temporaries"

    def _record(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key in self._alive:
            return
        storage = self.add(tensor.untyped_storage().nbytes(), self._budget(tensor))

        def died(_: Any) -> None:
            self._alive.pop(key)[1].died = self._tick()

        self._alive[key] = (weakref.ref(tensor.untyped_storage(), died), storage)

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """Records FSDP's gathered weights, which no dispatcher sees: it frees them by resizing their storage to 0, and
        gathers them again by resizing it back."""
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            if (known := self._alive.get(storage_key(storage))) is not None:
                reference, before = known
                before.died = self._tick()
                self._alive[storage_key(storage)] = reference, self.add(storage.nbytes(), "temporaries")
            return result

        with patch.object(torch.UntypedStorage, "resize_", watched):
            yield

    def _budget(self, tensor: torch.Tensor) -> Budget:
        if self._phase == "load":
            return "weights"
        if self._phase == "step":
            return "temporaries"
        is_tile = tensor.dim() == 2 and tensor.shape[1] == LOSS_TILE
        if is_tile or (tensor.dim() >= 2 and self._vocab_size in tensor.shape):
            return "logits"
        # Gradients are computed with gradients off; with them on, a checkpointed layer is recomputed.
        return "activations" if self._phase == "forward" or torch.is_grad_enabled() else "temporaries"

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


@contextmanager
def recorder_of(device: DeviceParams, attn: str, config: PreTrainedConfig) -> Iterator[Recorder]:
    """Records the block without weights, as the device would run it."""
    with ExitStack() as stack:
        if device.kind == "cuda":
            stack.enter_context(cuda_semantics(flash_only=attn == "flash_attention_2"))
        stack.enter_context(foreach_takes(FakeTensor))
        # A fake parameter cannot take another's contents: `Module.to` has to replace it.
        stack.enter_context(patch.object(nn.Module, "_apply", _apply_by_replacing))
        yield stack.enter_context(Recorder(device, config))


def without_contents(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs for a record without weights: real floating-point ones would be counted beside their fake copies."""
    return {
        name: torch.empty_like(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def _apply_by_replacing(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    for child in module.children():
        _apply_by_replacing(child, function)
    for name, parameter in module.named_parameters(recurse=False):
        changed = function(parameter.detach())
        if changed.dtype != parameter.dtype:
            module.register_parameter(name, nn.Parameter(changed, requires_grad=parameter.requires_grad))
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, function(buffer))
    return module


def _viewed(func: Any, args: Any, kwargs: Any) -> FakeTensor:
    """A view of a fake tensor, which allocates nothing: FakeTensorMode's own, without its checks."""
    mode, device = args[0].fake_mode, args[0].fake_device
    with in_kernel_invocation_manager(mode):
        view = func(*args, **kwargs)
    return FakeTensor(mode, view, device)


def _read_scalar(tensor: torch.Tensor) -> bool | int | float:
    """A number that clipping and GradScaler read."""
    return False if tensor.dtype is torch.bool else 1.0 if tensor.dtype.is_floating_point else 1


def _topk(scores: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts of each token of a router's scores (tokens, experts): each expert has as many as the others.

    A real router is less even; the sum of its allocations is the same.
    """
    values, chosen = aten.topk.default(scores, k, *args, **kwargs)
    if scores.dim() == 2:
        with without_modes():
            chosen = (torch.arange(chosen.numel()) % scores.shape[1]).view(chosen.shape)
    return values, chosen


def _index(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Masks become the positions that they select, which need no contents of the indexed tensor."""
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            with without_modes():
                positions += index.nonzero(as_tuple=True)
        else:
            positions.append(index)
    return aten.index.Tensor(tensor, positions)


def _grouped_mm(matrices: torch.Tensor, others: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """torch infers the result's shape for bf16 only, and computes it in fp32 too."""
    return GROUPED_MM(matrices.bfloat16(), others.bfloat16(), *args, **kwargs).to(matrices.dtype)


_WITHOUT_CONTENTS: dict[Any, Callable[..., Any]] = {
    READ_SCALAR: _read_scalar,
    aten.equal.default: lambda _tensor, _other: True,
    aten.index.Tensor: _index,
    aten.topk.default: _topk,
    GROUPED_MM: _grouped_mm,
}
"""Replacements of operations that depend on contents, or that torch cannot run without them."""


def _broadcast_numel(tensors: list[torch.Tensor]) -> int:
    """Elements of the result of an elementwise operation; 0 if the shapes rule that out."""
    try:
        return torch.broadcast_shapes(*(tensor.shape for tensor in tensors)).numel()
    except RuntimeError:
        return 0


def _stays_real(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether an operation without fake arguments is carried out."""
    if tensors:
        return max(_broadcast_numel(tensors), *(tensor.numel() for tensor in tensors), 0) <= REAL_LIMIT
    name = func.__name__
    if name.startswith(("arange", "linspace", "randperm", "scalar_tensor")):
        return True
    dtype = kwargs.get("dtype")
    if dtype is None and name.startswith("full"):
        whole = not isinstance(args[1], float)
    else:
        whole = dtype is not None and not dtype.is_floating_point
    size = args[0] if args else kwargs.get("size", ())
    return whole and torch.Size(size if isinstance(size, (list, tuple)) else (size,)).numel() <= REAL_LIMIT
