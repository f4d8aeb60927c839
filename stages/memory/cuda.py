"""CUDA's behaviour on CPU tensors: the attention kernel, what autocast keeps in fp32, what kernels allocate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch.nn import functional as F

from stages.internals.torch_internals import (
    EFFICIENT_BACKWARD,
    FLASH_BACKWARD,
    VARIABLE_LENGTHS_BACKWARD,
    aten,
    efficient_attention,
    flash_attention,
    foreach_on_cpu,
    math_attention,
    overridden_on_cpu,
    without_autocast,
)
from stages.internals.trl_internals import loss_allocates_as_on_gpu
from stages.memory.allocator import round_up
from stages.models import kernels

Kernel = Literal["flash", "efficient", "math"]

# Lists of torch/csrc (aten/src/ATen/autocast_mode.h): operations that CUDA's autocast runs in fp32 and the CPU's does
# not.
_FP32 = (
    *("layer_norm", "group_norm", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "rsqrt", "reciprocal", "exp", "log"),
    *("nll_loss", "mse_loss"),
)
_FP32_RESULT = ("softmax.int", "log_softmax.int", "cumsum", "sum", "sum.dim_IntList")


@contextmanager
def cuda_semantics(*, flash_only: bool = False) -> Iterator[None]:
    """Within the block CPU tensors go through the operations that CUDA tensors would.

    flash_only: attention by flash-attn's own kernels, which take no mask.
    """
    operations = [
        ("scaled_dot_product_attention", "AutogradCPU", _attention(flash_only=flash_only)),
        ("dropout", "AutogradCPU", _dropout),
        *((name, "AutocastCPU", _in_fp32(name)) for name in _FP32),
        *((name, "AutocastCPU", _with_fp32_result(name)) for name in _FP32_RESULT),
    ]
    with (
        overridden_on_cpu(operations),
        foreach_on_cpu(),
        loss_allocates_as_on_gpu(),
        patch.object(kernels, "takes_variable_lengths", lambda query: query.dtype in (torch.bfloat16, torch.float16)),
    ):
        yield


def hidden_bytes(func: Any, args: Any, multiprocessors: int) -> int:
    """Workspace that a CUDA kernel allocates and frees within its call, unseen by dispatchers. Not measured yet.

    multiprocessors: of the GPU, each of which runs one block at a time.
    """
    kernel = _KERNELS.get(func)
    return kernel(args, multiprocessors) if kernel else dequantized_bytes(func, args)


def flash_backward_bytes(args: Any, multiprocessors: int) -> int:
    """mha_bwd in torch's flash_api.cpp: an fp32 accumulator of dQ and the row sums."""
    query, key = args[1], args[2]
    batch, heads, length, _ = query.shape
    keys = (batch * key.shape[2], key.shape[1])
    copies = -(-multiprocessors // (batch * heads))
    return _flash_bytes(query, copies, batch * heads * round_up(length, 128), keys, heads)


def variable_lengths_backward_bytes(args: Any, multiprocessors: int) -> int:
    """mha_varlen_bwd in torch's flash_api.cpp: as above, the rows of each sample rounded up."""
    query, key, samples = args[1], args[2], args[6].numel() - 1
    length, heads, _ = query.shape
    copies = -(-multiprocessors // (samples * heads))
    return _flash_bytes(query, copies, heads * (length + 128 * samples), key.shape[:2], heads)


def efficient_backward_bytes(args: Any, _multiprocessors: int) -> int:
    """torch's attention_backward.cu: an fp32 accumulator of dQ and the row sums."""
    batch, heads, length, width = args[1].shape
    return batch * heads * length * 4 * (1 + width)


def masked_scatter_bytes(args: Any, _multiprocessors: int) -> int:
    """torch's IndexKernel.cu: the prefix sum of its mask."""
    return args[0].numel() * 9


_KERNELS: dict[Any, Callable[[Any, int], int]] = {
    FLASH_BACKWARD: flash_backward_bytes,
    VARIABLE_LENGTHS_BACKWARD: variable_lengths_backward_bytes,
    EFFICIENT_BACKWARD: efficient_backward_bytes,
    aten.masked_scatter.default: masked_scatter_bytes,
}


def _flash_bytes(query: torch.Tensor, copies: int, rows: int, keys: tuple[int, int], heads: int) -> int:
    """Flash attention's backward, deterministic as in training: blocks that run at once accumulate in copies of their
    own. keys: rows of the keys, and their heads. With grouped heads it holds dK and dV for every query head."""
    width = query.shape[-1]
    needed = rows * 4 * (1 + copies * round_up(width, 32 if width <= 128 else 64))
    key_rows, key_heads = keys
    return needed + (2 * key_rows * heads * width * query.element_size() if key_heads != heads else 0)


def dequantized_bytes(func: Any, args: Any) -> int:
    """The weight in the input's precision and its scales in fp32, within a product with a weight in 4 bits, on any
    device (bitsandbytes/backends); 0 for another operation."""
    if not func.__name__.startswith("gemm_4bit"):
        return 0
    rows, columns = args[2]
    return rows * columns * args[0].element_size() + rows * columns // args[4] * 4


def cpu_bytes(func: Any, args: Any) -> int:
    """Memory that an operation takes beside its result on a CPU: of Lion's step the gradient, the update and its sign
    (bitsandbytes/backends/cpu)."""
    is_step = func.__name__.startswith("optimizer_update_32bit")
    return 3 * int(args[1].nbytes) if is_step else dequantized_bytes(func, args)


def _attention(*, flash_only: bool) -> Callable[..., torch.Tensor]:
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """scaled_dot_product_attention by the kernel that CUDA takes. query, key, value: (B, H, T, D)."""
        mask = attn_mask
        kernel = "flash" if flash_only else chosen_kernel(query, key, mask)
        if kernel == "flash":
            width = query.shape[-1]
            padded = [F.pad(tensor, (0, -width % 8)) if width % 8 else tensor for tensor in (query, key, value)]
            scale = scale if scale is not None else width**-0.5
            return flash_attention(*padded, dropout_p, is_causal, scale=scale)[0][..., :width]
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if kernel == "math":
            return math_attention(query, key, value, mask, dropout_p, is_causal, scale=scale)[0]
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
            length = mask.shape[-1]
            mask = F.pad(mask, (0, -length % 16))[..., :length] if length % 16 else mask
            mask = mask.expand(*query.shape[:3], key.shape[2])
        needs_sums = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        return efficient_attention(query, key, value, mask, needs_sums, dropout_p, is_causal, scale=scale)[0]

    return attention


def chosen_kernel(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> Kernel:
    """The first kernel that can run, in torch's order (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).

    Without cuDNN's, which is turned off (models/kernels.py).
    """
    if query.dtype in (torch.bfloat16, torch.float16) and mask is None and query.shape[-1] <= 256:
        return "flash"
    return "efficient" if key.shape[1] == query.shape[1] else "math"


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """CUDA's keeps a mask of one byte per element; the CPU's a scaled mask of the tensor's own type."""
    return torch.native_dropout(tensor, p, True)[0] if train and p > 0 else tensor


def _in_fp32(name: str) -> Callable[..., Any]:
    operation = _operation(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            return operation(*map(_as_fp32, args), **{key: _as_fp32(value) for key, value in kwargs.items()})

    return run


def _with_fp32_result(name: str) -> Callable[..., Any]:
    operation = _operation(name)

    def run(tensor: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        with without_autocast():
            wanted = dtype or (torch.float32 if _is_cast(tensor) else None)
            if name.endswith("softmax.int"):
                dim, *given = args
                return operation(tensor, dim, given[0] if given and given[0] else wanted)
            return operation(tensor, *args, dtype=wanted, **kwargs)

    return run


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _is_cast(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _as_fp32(value: Any) -> Any:
    return value.float() if _is_cast(value) else value
