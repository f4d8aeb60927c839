"""Modules and kernels that compute what a model's own do, faster or more repeatably: same weights, same names.

Attention over a row of several samples, modules that replace transformers' own, and Liger's kernels for RMS norms,
gated products and rotations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from stages.core.errors import UserError


class PatchProjection(nn.Conv3d):
    """A convolution whose input is as large as its kernel, computed as a matrix product.

    Qwen's vision towers project each patch by an nn.Conv3d. cuDNN has no bf16 backward for it, or a slow one: 50 s a
    step against 1 s (github.com/modelscope/ms-swift/issues/6232). A checkpoint needs no conversion: the weight keeps
    its name and shape.
    """

    # Not `forward`: accelerate's hooks, on a model that is spread over GPUs, hold the one that they found.
    def _conv_forward(self, patches: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """patches: (N, in_channels, *kernel_size). Returns (N, out_channels, 1, 1, 1)."""
        assert patches.shape[1:] == weight.shape[1:], (patches.shape, weight.shape)
        return F.linear(patches.flatten(1), weight.flatten(1), bias)[..., None, None, None]


class ThreadIndependentLayerNorm(nn.LayerNorm):
    """A layer norm whose trained weights get the same gradients with any number of CPU threads.

    torch's own backward gives each thread some of the rows and adds up the threads' sums
    (aten/src/ATen/native/cpu/layer_norm_kernel.cpp); the backward of a product adds up rows in their order.
    """

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: (..., *normalized_shape). Returns the same shape."""
        if rows.is_cuda or not self.elementwise_affine:
            return super().forward(rows)
        normalized = F.layer_norm(rows, self.normalized_shape, eps=self.eps) * self.weight
        bias: torch.Tensor | None = self.bias  # its annotation says Tensor, but it may be None
        return normalized if bias is None else normalized + bias


def replace_modules(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model's patch projection a PatchProjection, and its layer norms thread-independent ones, in place."""
    for name, module in model.named_modules():
        if type(module) is nn.Conv3d and name.endswith("patch_embed.proj"):
            module.__class__ = PatchProjection
        elif type(module) is nn.LayerNorm:
            module.__class__ = ThreadIndependentLayerNorm
    return model


EXPERTS = "autocast_grouped_mm"
"""transformers' name of `autocast_experts`, among its implementations of experts."""


def autocast_experts(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' grouped matrix products of experts, in autocast's precision under autocast.

    torch's grouped_mm is not among the operations that autocast casts, and transformers casts its input to the weights:
    experts that are trained, and so kept in fp32, would be multiplied in fp32.
    hidden_states: (tokens, hidden). top_k_index, top_k_weights: (tokens, k). Returns (tokens, hidden).
    """
    kind = hidden_states.device.type
    if torch.is_autocast_enabled(kind):
        experts = _InPrecision(experts, torch.get_autocast_dtype(kind))  # type: ignore[assignment]
    return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)


class _InPrecision:
    """A module whose weights are read in another precision."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, torch.Tensor) else value


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, autocast_experts)


PACKED = "packed"
"""transformers' name of `packed_attention`, among its implementations of attention."""


@dataclass(frozen=True)
class PackedRow:
    """The samples of a row."""

    lengths: list[int]
    ends: torch.Tensor
    """(samples + 1,) int32: 0, and the end of each sample."""


_rows = WeakTensorKeyDictionary()
"""PackedRow by the positions of a row, which all layers get: otherwise every layer would wait for its GPU."""


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_ids: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in one row of several samples, each of which sees only itself; nothing is computed for what is masked.

    transformers calls it by its name, as it does SDPA, and makes no mask for a name that has none: the positions say
    where a sample begins. On a GPU a whole row is one call of torch's flash attention for variable lengths; elsewhere
    each sample is a call of SDPA. A vision tower, which is not causal and separates its images itself, gets SDPA.

    query: (1, H, L, D). key, value: the same, with a divisor of H heads. position_ids: (1, L), 0 where a sample begins.
    Returns (1, L, H, D).
    """
    options: dict[str, Any] = {"dropout": dropout, "scaling": scaling}
    if not module.is_causal:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options, **rest)
    assert attention_mask is None, "a row has no padding to mask"
    assert position_ids is not None, "only positions say which tokens are one sample's"
    assert query.shape[0] == 1, query.shape
    assert rest.get("sliding_window") is None, "a window would have to end where a sample begins"
    row = row_of(position_ids)
    if torch.is_autocast_enabled(query.device.type):  # SDPA is in autocast's list, varlen_attn is not
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if dropout == 0.0 and takes_variable_lengths(query):
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        limits = (row.ends, row.ends, max(row.lengths), max(row.lengths))
        output = varlen_attn(query, key, value, *limits, scale=scaling, window_size=(-1, 0), enable_gqa=True)
        assert isinstance(output, torch.Tensor)
        return output[None], None
    samples = zip(*(tensor.split(row.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, *sample, None, **options, is_causal=True)[0] for sample in samples]
    return torch.cat(outputs, dim=1), None


def row_of(position_ids: torch.Tensor) -> PackedRow:
    """position_ids: (1, L)."""
    if (row := _rows.get(position_ids)) is None:
        starts = (position_ids[0] == 0).nonzero().flatten()
        ends = torch.cat([starts, starts.new_tensor([position_ids.shape[1]])])
        row = _rows[position_ids] = PackedRow(ends.diff().tolist(), ends.int())
    return row


def takes_variable_lengths(query: torch.Tensor) -> bool:
    """Whether torch's flash attention takes such a tensor on its device.

    It does from Ampere on, in half precision (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
    """
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


AttentionInterface.register(PACKED, packed_attention)


ROTATE = "apply_rotary_pos_emb"
"""What transformers' modules of models call their rotation of queries and keys."""


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """hidden: (..., H), as is what it returns. weight: (H,)."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(hidden, weight, eps, 0.0, "llama", False)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. Its backward writes the gradients over both."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


def rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """query, key: (B, heads, L, D), written over where they lie as a projection left them. cos, sin: (B, L, D)."""
    from liger_kernel.ops.rope import LigerRopeFunction

    # Triton launches on the current device, wherever the tensors lie; of the three, only this one forgets that.
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        return LigerRopeFunction.apply(query, key, cos, sin, None, unsqueeze_dim)


class FusedRMSNorm(nn.Module):
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class FusedMLP(nn.Module):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(gated(self.gate_proj(hidden_states), self.up_proj(hidden_states)))


@contextmanager
def fused_kernels(model: nn.Module, *, used: bool) -> Iterator[None]:
    """Within it, a model's norms, gated products and rotations are those of this module; its weights stay.

    Which they are is known by their names and parts, as the families of transformers share them.
    """
    with ExitStack() as stack:
        for module in model.modules() if used else ():
            if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
                _become(module, FusedRMSNorm)
            elif hasattr(module, "gate_proj") and isinstance(getattr(module, "act_fn", None), SiLUActivation):
                _become(module, FusedMLP)
            elif hasattr(home := sys.modules[type(module).__module__], ROTATE):
                stack.enter_context(patch.object(home, ROTATE, _rotated))
        yield


def _become(module: nn.Module, fused: type[nn.Module]) -> None:
    module.__class__ = fused
    if "_old_forward" in vars(module):  # what accelerate's hook calls, on a model that is spread over GPUs
        vars(module)["_old_forward"] = MethodType(fused.forward, module)


def _rotated(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return rotated(*args, **kwargs)


def refuse_wrong_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Raises UserError where a kernel does not run on the device, or gives another result or gradient than torch."""
    tolerance = 2 * torch.finfo(dtype).eps ** (1.0 if dtype != torch.float32 else 0.75)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    angles = random(1, 24, 64).repeat(1, 1, 2)
    cases: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...]]] = {
        "RMS norm": (
            lambda hidden, weight: rms_norm(hidden, weight, 1e-6),
            _plain_norm,
            (random(24, 896), random(896)),
        ),
        "gated product": (gated, lambda gate, up: F.silu(gate) * up, (random(24, 896), random(24, 896))),
        "rotation": (
            lambda query, key: torch.cat(rotated(query, key, angles.cos(), angles.sin()), dim=1),
            lambda query, key: _plain_rotation(torch.cat([query, key], dim=1), angles),
            (random(1, 24, 4, 128).transpose(1, 2), random(1, 24, 2, 128).transpose(1, 2)),
        ),
    }
    for what, (ours, plain, inputs) in cases.items():
        found, expected = (_with_gradients(function, inputs) for function in (ours, plain))
        for one, other in zip(found, expected, strict=True):
            off = float((one - other).abs().max() / other.abs().max())
            if not off <= tolerance:
                raise UserError(
                    f"Liger's kernel for the {what} is off by {off:.1g} here, more than {tolerance:.1g}; "
                    "plan without, by memory.kernels: off"
                )


def _with_gradients(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    result = function(*(leaf * 1 for leaf in leaves))  # kernels may write over what they are given
    result.backward(torch.linspace(-1, 1, result.numel(), device=result.device).view(result.shape).to(result.dtype))
    return [result.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)]


def _plain_norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden.float(), hidden.shape[-1:], eps=1e-6).to(hidden.dtype) * weight


def _plain_rotation(states: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * angles.cos()[:, None] + torch.cat([-second, first], dim=-1) * angles.sin()[:, None]
