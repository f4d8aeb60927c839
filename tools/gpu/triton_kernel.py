"""The smallest kernel that says whether Triton compiles here. Triton wants its source, and `tl` among its globals."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _double(source: Any, target: Any, size: tl.constexpr) -> None:
    offsets = tl.arange(0, size)
    tl.store(target + offsets, 2 * tl.load(source + offsets))


def doubled(values: torch.Tensor) -> torch.Tensor:
    """values: (N,) on a GPU, N a power of two."""
    target = torch.empty_like(values)
    _double[(1,)](values, target, values.numel())
    return target
