"""What CUDA would do, on a CPU: which attention kernel, what autocast keeps in fp32, what kernels take for themselves.

Overridden at the dispatcher: a function mode is left while checkpointed layers are computed again in backward, and the
two passes would then differ.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch.nn import functional as F
from torch.optim import optimizer
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_trainer

from stages.kit.models import kernels

aten = torch.ops.aten

_VARIABLE_LENGTHS_BACKWARD = torch.ops.torch_attn._varlen_attn_backward.default  # noqa: SLF001

Kernel = Literal["flash", "efficient", "math"]

# Lists of torch/csrc (aten/src/ATen/autocast_mode.h): what CUDA's autocast computes in fp32 and the CPU's does not.
_FP32 = (
    *("layer_norm", "group_norm", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "rsqrt", "reciprocal", "exp", "log"),
    *("nll_loss", "mse_loss"),
)
_FP32_RESULT = ("softmax.int", "log_softmax.int", "cumsum", "sum", "sum.dim_IntList")

MULTIPROCESSORS = 144
"""Of a large GPU: 132 on an H100, 142 on an RTX 6000 Ada, 148 on a B200. Fewer need less."""


@contextmanager
def cuda_semantics(*, flash_only: bool = False) -> Iterator[None]:
    """Within it, CPU tensors go through what CUDA tensors would.

    flash_only: attention by flash-attn's own kernels, which take no mask.
    """
    library = torch.library.Library("aten", "IMPL")

    def override(name: str, function: Callable[..., Any], key: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that a kernel is overridden
            library.impl(name, function, key, allow_override=True)

    # Unasked, optimizers take their many-tensors-at-once form on CUDA and not on a CPU.
    foreach_devices = optimizer._get_foreach_kernels_supported_devices  # type: ignore[attr-defined]  # noqa: SLF001
    swaps = (
        (optimizer, "_get_foreach_kernels_supported_devices", lambda: [*foreach_devices(), "cpu"]),
        # TRL's loss scores a tile of logits in place, by Triton, and elsewhere in many steps that each take a tile.
        (chunked_logprob, "_forward_kernel", _NoKernel()),
        (chunked_logprob, "_backward_kernel", _NoKernel()),
        (chunked_logprob, "_addmm_fp32", lambda *_: None),
        (chunked_logprob, "_use_triton", lambda _: True),
        (chunked_logprob, "triton", _NoTriton),
        (trl_trainer, "_use_triton", lambda _: True),
        (kernels, "takes_variable_lengths", lambda query: query.dtype in (torch.bfloat16, torch.float16)),
    )
    with ExitStack() as stack:
        stack.callback(library._destroy)  # noqa: SLF001 - puts the CPU's own back
        override("scaled_dot_product_attention", _attention(flash_only=flash_only), "AutogradCPU")
        override("dropout", _dropout, "AutogradCPU")
        for name in _FP32:
            override(name, _in_fp32(name), "AutocastCPU")
        for name in _FP32_RESULT:
            override(name, _with_fp32_result(name), "AutocastCPU")
        for module, name, value in swaps:
            stack.enter_context(patch.object(module, name, value, create=True))  # Triton may not be installed
        yield


def hidden_bytes(func: Any, args: Any) -> int:
    """What a kernel allocates while it runs and frees before it returns, which no dispatcher sees. Not yet measured.

    Attention's backward: an fp32 accumulator of dQ and the row sums (flash_api.cpp and attention_backward.cu of torch);
    `dequantized_bytes`; masked_scatter: the prefix sum of its mask (torch's IndexKernel.cu).
    """
    if func is aten._scaled_dot_product_flash_attention_backward.default:  # noqa: SLF001
        query, key = args[1], args[2]
        batch, heads, length, width = query.shape
        step = 32 if width <= 128 else 64
        rows = batch * heads * _up(length, 128)
        # Deterministic, as training is: blocks that run at once add up in copies of their own.
        copies = -(-MULTIPROCESSORS // (batch * heads))
        needed = rows * 4 * (1 + copies * _up(width, step))
        if key.shape[1] != heads:  # dK and dV for every query head, before they are summed by group
            needed += 2 * batch * key.shape[2] * heads * width * query.element_size()
        return needed
    if func is _VARIABLE_LENGTHS_BACKWARD:  # mha_varlen_bwd: as above, the rows of each sample rounded up
        query, key, samples = args[1], args[2], args[6].numel() - 1
        length, heads, width = query.shape
        rows = heads * (length + 128 * samples)
        copies = -(-MULTIPROCESSORS // (samples * heads))
        needed = rows * 4 * (1 + copies * _up(width, 32 if width <= 128 else 64))
        if key.shape[1] != heads:
            needed += 2 * key.shape[0] * heads * width * query.element_size()
        return needed
    if func is aten._scaled_dot_product_efficient_attention_backward.default:  # noqa: SLF001
        batch, heads, length, width = args[1].shape
        return batch * heads * length * 4 * (1 + width)
    if dequantized := dequantized_bytes(func, args):
        return dequantized
    if func is aten.masked_scatter.default:
        return args[0].numel() * 9
    if func is aten.embedding_dense_backward.default:
        return args[1].numel() * 8 * 4
    return 0


def dequantized_bytes(func: Any, args: Any) -> int:
    """The weight in the input's precision, and its scales in fp32, within a product with a weight in 4 bits, on any
    device (bitsandbytes/backends); 0 for another operation."""
    if not func.__name__.startswith("gemm_4bit"):
        return 0
    rows, columns = args[2]
    return rows * columns * args[0].element_size() + rows * columns // args[4] * 4


class _NoKernel:
    """A kernel that is launched over a grid and allocates nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


class _NoTriton:
    @staticmethod
    def cdiv(number: int, step: int) -> int:
        return -(-number // step)


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
            return aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0][..., :width]  # noqa: SLF001
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if kernel == "math":
            return aten._scaled_dot_product_attention_math(  # noqa: SLF001
                query, key, value, mask, dropout_p, is_causal, scale=scale
            )[0]
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
            length = mask.shape[-1]
            mask = F.pad(mask, (0, -length % 16))[..., :length] if length % 16 else mask
            mask = mask.expand(*query.shape[:3], key.shape[2])
        needs_sums = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
            query, key, value, mask, needs_sums, dropout_p, is_causal, scale=scale
        )[0]

    return attention


def chosen_kernel(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> Kernel:
    """The first that can run of those torch tries (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).

    Without cuDNN's, which some torch builds prefer on Hopper and which needs about as much as flash.
    """
    if query.dtype in (torch.bfloat16, torch.float16) and mask is None and query.shape[-1] <= 256:
        return "flash"
    return "efficient" if key.shape[1] == query.shape[1] else "math"


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """CUDA's keeps a mask of one byte an element; the CPU's a scaled mask of the tensor's own type."""
    return torch.native_dropout(tensor, p, True)[0] if train and p > 0 else tensor


def _in_fp32(name: str) -> Callable[..., Any]:
    operation = _operation(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return operation(*map(_as_fp32, args), **{key: _as_fp32(value) for key, value in kwargs.items()})

    return run


def _with_fp32_result(name: str) -> Callable[..., Any]:
    operation = _operation(name)

    def run(tensor: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        with _without_autocast():
            wanted = dtype or (torch.float32 if _is_autocast(tensor) else None)
            if name.endswith("softmax.int"):
                dim, *given = args
                return operation(tensor, dim, given[0] if given and given[0] else wanted)
            return operation(tensor, *args, dtype=wanted, **kwargs)

    return run


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))  # noqa: SLF001


def _is_autocast(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _as_fp32(value: Any) -> Any:
    return value.float() if _is_autocast(value) else value


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
