"""Facts about the device and its software. Each probe says in a line that something works, or why not."""

from __future__ import annotations

import gc
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from stages.kit.launcher.gpus import driver_version
from stages.kit.models.kernels import packed_attention, takes_variable_lengths
from stages.kit.training.kernels import compiler_problem, refuse_wrong_kernels
from stages.kit.training.resume import seed_everything
from tools.gpu.device import Kind
from tools.gpu.flops import peak_tflops

ATTENTION = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
CASES = {
    "text": (28, 4, 2048, 128, True, False),
    "vision": (16, 16, 4096, 80, False, False),
    "text, masked": (28, 28, 2048, 128, False, True),
}
"""Attention whose kernel memory predictions have to know: query heads, key heads, tokens, width, causal, masked."""


def facts(device: Kind) -> dict[str, Any]:
    """In a process that has not used CUDA yet."""
    # Before anything else: what a context takes grows with every kernel that is used.
    workspaces_bytes = cublas_workspaces_bytes(torch.device(device))
    chosen = {f"SDPA chooses for {case}": chosen_kernel(torch.device(device), *CASES[case]) for case in CASES}
    free_bytes, total_bytes = torch.cuda.mem_get_info() if device == "cuda" else (0, 0)
    reserved_bytes = torch.cuda.memory_reserved() if device == "cuda" else 0
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    seed_everything(42)  # kernels without a deterministic form are refused, as in every training
    peak = peak_tflops(name)
    return {
        "kind": device,
        "name": name,
        "capability": torch.cuda.get_device_capability() if device == "cuda" else (0, 0),
        "memory_bytes": total_bytes,
        "context_bytes": total_bytes - free_bytes - reserved_bytes,
        "workspaces_bytes": workspaces_bytes,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,
        "python": platform.python_version(),
        "system": platform.platform(),
        "peak_tflops": peak[0] if peak else None,
        "peak_source": peak[1] if peak else None,
        "probes": {
            "C compiler": tried(compiles_c),
            "Triton": tried(partial(compiles_triton, device)),
            "nf4 of bitsandbytes": tried(partial(trains_on_nf4, device)),
            "flash-attn": "installed" if find_spec("flash_attn") else "not installed",
            "attention without padding": tried(partial(attends_by_sample, device)),
            **{f"SDPA {kernel}": tried(partial(attends, device, kernel)) for kernel in ATTENTION},
            **chosen,
        },
    }


def cublas_workspaces_bytes(device: torch.device) -> int:
    """Bytes that cuBLAS takes from torch's allocator for a forward and a backward pass; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    x, weight, bias = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()
        for shape in ((4096, 4096), (4096, 4096), (4096,))
    )
    before = torch.cuda.memory_allocated()
    (F.linear(x, weight, bias) @ weight).float().square().mean().backward()
    for tensor in (x, weight, bias):
        tensor.grad = None
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated() - before


def chosen_kernel(
    device: torch.device, heads: int, key_heads: int, tokens: int, width: int, causal: bool, masked: bool
) -> str:
    """The kernel of scaled_dot_product_attention that torch takes, as cuda.chosen_kernel predicts it."""
    query = torch.zeros(1, heads, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    key = torch.zeros(1, key_heads, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 1, tokens, tokens, device=device, dtype=torch.bool) if masked else None
    grouped = heads != key_heads
    number = int(torch._fused_sdp_choice(query, key, key, mask, 0.0, causal, enable_gqa=grouped))  # noqa: SLF001
    return next((name for name, value in SDPBackend.__members__.items() if value.value == number), str(number))


def tried(probe: Callable[[], str]) -> str:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - any error is the answer
        first = str(error).strip().partition("\n")[0]
        return f"does not work: {type(error).__name__}: {first}"[:200]


def compiles_c() -> str:
    problem = compiler_problem()
    return f"does not work: {problem}" if problem else "compiles against Python's headers"


def compiles_triton(device: Kind) -> str:
    """From an empty cache."""
    if find_spec("triton") is None:
        return "not installed"
    if device == "cpu":
        return "installed; there is no GPU to compile for"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        began = time.monotonic()
        refuse_wrong_kernels(device)
        return f"compiles Liger's kernels, which compute what torch does, in {time.monotonic() - began:.1f} s"


def trains_on_nf4(device: Kind) -> str:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(256, 256, compute_dtype=torch.float16 if device == "cuda" else torch.bfloat16)
    layer = layer.to(device)
    rows = torch.randn(8, 256, device=device, dtype=layer.compute_dtype, requires_grad=True)
    layer(rows).float().square().mean().backward()
    assert rows.grad is not None
    assert rows.grad.isfinite().all()
    return "forward and backward"


def attends(device: Kind, kernel: str) -> str:
    """One kernel of scaled_dot_product_attention on Qwen2-VL-7B's heads: whether it runs, and how long it takes."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    length = 2048 if device == "cuda" else 64
    rows = torch.randn(3, 1, 28, length, 128, device=device, dtype=dtype, requires_grad=True)

    def step() -> None:
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            F.scaled_dot_product_attention(rows[0], rows[1], rows[2], is_causal=True).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    step()
    began = time.perf_counter()
    step()
    return f"forward and backward of {length:,} tokens in {1000 * (time.perf_counter() - began):.2f} ms"


def attends_by_sample(device: Kind) -> str:
    """Attention of several samples in a row, on Qwen2-VL-7B's heads, as the device takes them and in fp32, which it
    takes one after another: whether outputs and gradients are the same but for rounding."""
    lengths = (700, 1, 1000, 347) if device == "cuda" else (5, 1, 9)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    decoder: Any = SimpleNamespace(is_causal=True, num_key_value_groups=7)
    drawn = [torch.randn(1, heads, sum(lengths), 128, device=device) for heads in (28, 4, 4)]
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        query, key, value = (tensor.to(dtype).requires_grad_() for tensor in drawn)
        output, _ = packed_attention(decoder, query, key, value, None, scaling=128**-0.5, position_ids=positions)
        gradients = torch.autograd.grad(output.float().square().sum(), (query, key, value))
        found.append([each.detach().float() for each in (output, *gradients)])
    apart = max(float((one - other).norm() / other.norm()) for one, other in zip(*found, strict=True))
    assert apart < 0.02, f"{apart:.1e} from fp32"
    at_once = takes_variable_lengths(drawn[0].bfloat16())
    return f"forward and backward {'at once' if at_once else 'sample by sample'}, {apart:.1e} from fp32"
