"""Facts about the device and its software. Each probe says in a line that something works, or why not."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from stages.kit.launcher.gpus import driver_version
from stages.kit.training.compiler import compiler_problem
from stages.kit.training.seed import seed_everything
from tools.calibrate.measured import device_facts
from tools.gpu.flops import peak_tflops
from tools.gpu.pieces import Kind

ATTENTION = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")


def facts(device: Kind) -> dict[str, Any]:
    """In a process that has not used CUDA yet."""
    measured = asdict(device_facts(device))
    seed_everything(42)  # kernels without a deterministic form are refused, as in every training
    peak = peak_tflops(measured["name"])
    return {
        "name": measured["name"],
        "capability": ".".join(map(str, measured["capability"])),
        "memory_bytes": measured["total_bytes"],
        "context_bytes": measured["context_bytes"],
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
            **{f"SDPA {name}": tried(partial(attends, device, name)) for name in ATTENTION},
            **{f"SDPA chooses for {case}": kernel for case, kernel in measured["attention"].items()},
        },
    }


def tried(probe: Callable[[], str]) -> str:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what this is to say
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
        from tools.gpu.triton_kernel import doubled

        began = time.monotonic()
        values = torch.arange(64, device=device)
        assert doubled(values).equal(2 * values)
        return f"compiles and launches, the first time in {time.monotonic() - began:.1f} s"


def trains_on_nf4(device: Kind) -> str:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(256, 256, compute_dtype=torch.float16 if device == "cuda" else torch.bfloat16)
    layer = layer.to(device)
    rows = torch.randn(8, 256, device=device, dtype=layer.compute_dtype, requires_grad=True)
    layer(rows).float().square().mean().backward()
    assert rows.grad is not None
    assert rows.grad.isfinite().all()
    return "forward and backward"


def attends(device: Kind, name: str) -> str:
    """One kernel of scaled_dot_product_attention on Qwen2-VL-7B's heads: whether it runs, and how long it takes."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    length = 2048 if device == "cuda" else 64
    rows = torch.randn(3, 1, 28, length, 128, device=device, dtype=dtype, requires_grad=True)

    def step() -> None:
        with sdpa_kernel(getattr(SDPBackend, name)):
            F.scaled_dot_product_attention(rows[0], rows[1], rows[2], is_causal=True).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    step()
    began = time.perf_counter()
    step()
    return f"forward and backward of {length:,} tokens in {1000 * (time.perf_counter() - began):.2f} ms"
