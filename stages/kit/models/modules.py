"""Modules that compute what the model's own do, faster or more repeatably: same weights, same names, same result."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward


class PatchProjection(nn.Conv3d):
    """A convolution whose input is as large as its kernel, computed as the matrix product that it is.

    Qwen's vision towers project each patch by an nn.Conv3d. cuDNN has no bf16 backward for it, or a slow one: 50 s a
    step against 1 s (github.com/modelscope/ms-swift/issues/6232). A checkpoint needs no conversion: the weight keeps
    its name and shape.
    """

    # Not `forward`: accelerate's hooks, on a model that is spread over GPUs, keep the one that they found.
    def _conv_forward(self, patches: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """patches: (N, in_channels, *kernel_size). Returns (N, out_channels, 1, 1, 1)."""
        assert patches.shape[1:] == weight.shape[1:], (patches.shape, weight.shape)
        return F.linear(patches.flatten(1), weight.flatten(1), bias)[..., None, None, None]


class ThreadIndependentLayerNorm(nn.LayerNorm):
    """A layer norm whose trained weights get the same gradients from any number of a CPU's threads.

    torch's own backward gives each thread some of the rows and adds up the threads' sums
    (aten/src/ATen/native/cpu/layer_norm_kernel.cpp); the backward of a product adds up rows in their order.
    """

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: (..., *normalized_shape), as is what it returns."""
        if rows.is_cuda or not self.elementwise_affine:
            return super().forward(rows)
        normalized = F.layer_norm(rows, self.normalized_shape, eps=self.eps) * self.weight
        bias: torch.Tensor | None = self.bias  # None where it has none, whatever its annotation says
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
"""The name by which a model is told to compute its experts by `autocast_experts`."""


def autocast_experts(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' grouped matrix products of experts, under autocast in autocast's precision.

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
