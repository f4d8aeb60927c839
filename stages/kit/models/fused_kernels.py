"""Liger's kernels for what a language model computes between its products: RMS norms, gated products, rotations.

Each goes over a GPU's memory once, where torch's operations do so several times, and less is kept for backward
(github.com/linkedin/Liger-Kernel). They compute the same and round differently, so a plan says whether they are used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from stages.core.errors import UserError

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

    def norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, weight, 1e-6)

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
