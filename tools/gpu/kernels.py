"""Kernels of a profiled step, by what they do. Imports nothing heavy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tools.gpu.device import Kind

if TYPE_CHECKING:
    from torch.profiler import profile

KINDS: tuple[tuple[str, str], ...] = (
    ("copies", r"memcpy|memset|direct_copy|catarray|aten::(copy_|fill_|cat\b)|fillfunctor"),
    ("dequantization", r"quantize|bitsandbytes::"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("optimizer", r"adam|multi_tensor_apply|koptimizer|_foreach_"),
    ("loss (Triton)", r"^_(forward|backward)_kernel"),
    ("matmul", r"gemm|gemv|nvjet|cutlass|cublas|splitk|wgmma|convol|dgrad|wgrad|fprop|aten::(add|b|_grouped_)?mm\b"),
    ("elementwise", r"elementwise|reduce_kernel|norm|softmax|index|gather|scatter|sort|scan|dropout|at::native|aten::"),
    ("other", ""),
)
"""Kinds of kernel by a part of their names, lower case; the first that matches. Reductions count as elementwise. On a
CPU the names are torch's operators."""


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, name.lower()))


def kernels(profiled: profile, device: Kind) -> list[tuple[str, float]]:
    """Name and seconds of each kernel and copy on a GPU, and of each operator on a CPU, without those that it calls."""
    if device == "cpu":
        return [(event.name, event.self_cpu_time_total / 1e6) for event in profiled.events()]
    return [
        (event.name, (event.time_range.end - event.time_range.start) / 1e6)
        for event in profiled.events()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
