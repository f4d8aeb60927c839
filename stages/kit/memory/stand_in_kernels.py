"""Stand-ins for Liger's kernels where a step is recorded: the same tensors, kept as long, and nothing computed.

Without a GPU neither Triton nor Liger need be installed. From liger_kernel/ops/{rms_norm,swiglu,geglu,rope}.py, 0.8.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from stages.kit.models import kernels


@contextmanager
def stand_in_kernels(multiprocessors: int) -> Iterator[None]:
    """Models that are given fused kernels (`kernels.fused_kernels`) within the block allocate what those would.

    multiprocessors: of the GPU; as many sums of a norm's weight are added up at once.
    """
    with patch.multiple(kernels, fuse_layers=partial(_fuse_layers, multiprocessors=multiprocessors), rotated=_rotated):
        yield


def _fuse_layers(model: PreTrainedModel, *, multiprocessors: int) -> None:
    """Replaces the same modules as Liger (a test compares the memory of each family's model)."""
    decoder = model.get_decoder()
    for module in decoder.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module, multiprocessors)
    for layer in decoder.layers if kernels.has_mlps(decoder) else ():
        layer.mlp.forward = partial(_fused_mlp if hasattr(layer.mlp, "gate_up_proj") else _mlp, layer.mlp)


def _norm(norm: nn.Module, multiprocessors: int, hidden: torch.Tensor) -> torch.Tensor:
    # Liger writes the gradient over the output's, except for Gemma's norms, which call their epsilon eps.
    return _RMSNorm.apply(hidden, norm.weight, multiprocessors, hasattr(norm, "variance_epsilon"))


def _mlp(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(_Gated.apply(mlp.gate_proj(hidden), mlp.up_proj(hidden)))


def _fused_mlp(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(_Gated.apply(*mlp.gate_up_proj(hidden).chunk(2, dim=-1)))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, multiprocessors: int, in_place: bool
    ) -> torch.Tensor:
        hidden = hidden.contiguous()
        factors = torch.empty(hidden.shape[:-1], dtype=torch.float32, device=hidden.device)
        ctx.save_for_backward(hidden, weight, factors)
        ctx.multiprocessors, ctx.in_place = multiprocessors, in_place
        return torch.empty_like(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _hidden, weight, _factors = ctx.saved_tensors
        gradient, by_weight = gradient.contiguous(), None
        by_hidden = gradient if ctx.in_place else torch.empty_like(gradient)
        if ctx.needs_input_grad[1]:
            sums = torch.empty(ctx.multiprocessors, len(weight), dtype=torch.float32, device=weight.device)
            by_weight = sums.sum(dim=0).to(weight.dtype)
        return by_hidden, by_weight, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        return gate, up


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        return _in_place(query), _in_place(key)

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, by_query: torch.Tensor, by_key: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _in_place(by_query), _in_place(by_key), None, None


def _rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, _unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    return _Rotated.apply(query, key, cos, sin)


def _in_place(states: torch.Tensor) -> torch.Tensor:
    """(B, heads, L, D), a view of what a projection left, or of a copy where that was none."""
    return states.transpose(1, 2).contiguous().transpose(1, 2)
