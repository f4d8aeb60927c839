"""A training step by Liger's kernels on a CPU, by Triton's interpreter, beside the same step by torch's.

Triton reads TRITON_INTERPRET when a kernel is defined, so this is a process of its own. It prints, as JSON, by model
what differs in loss and gradients, and the peak of memory, measured and recorded; and by case what is refused.
Run: TRITON_INTERPRET=1 python -m tests.kit.models.interpreted
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import rms_norm as liger_rms_norm
from liger_kernel.ops import rope as liger_rope
from liger_kernel.ops import swiglu as liger_swiglu
from torch import nn
from triton.runtime import interpreter

from stages.core.errors import UserError
from stages.kit.memory.step import forget_accelerator
from stages.kit.models import kernels
from stages.kit.models.kernels import ROTATE, FusedMLP, FusedRMSNorm, fused_kernels, refuse_wrong_kernels
from tests.kit.memory.real_steps import measured_bytes
from tests.kit.memory.small import ALL, FULL, batch_of, config_of, peak_bytes, plan_of, recorded
from tools.gpu.models import random_model, with_contents

_convert = interpreter._implicit_cvt


def _with_floats(argument: Any) -> Any:
    """The interpreter leaves Python's floats as they are, which have no .to(); compiled, they are fp32."""
    if isinstance(argument, float):
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return _convert(argument)


interpreter._implicit_cvt = _with_floats
liger_rms_norm.rsqrt = lambda value: tl.rsqrt(value)  # CUDA's library of functions has no interpreter

# Two of everything: layers, samples. nf4 and adapters change nothing of what is fused.
MODELS = {"detection": ALL, "text": FULL, "moe": FULL}


KERNELS = (
    (liger_rms_norm, "_rms_norm_forward_kernel"),
    (liger_rms_norm, "_rms_norm_backward_kernel"),
    (liger_swiglu, "_swiglu_forward_kernel"),
    (liger_swiglu, "_swiglu_backward_kernel"),
    (liger_rope, "_triton_rope"),
)


class NoKernel:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


def step(model_name: str, *, fused: bool) -> dict[str, torch.Tensor]:
    """The loss and the gradient of every weight of a random model, in fp32."""
    torch.manual_seed(0)
    # Short: each token of each kernel is interpreted.
    plan = plan_of(**{**MODELS[model_name], "precision": "fp32", "max_length": 32})
    config = config_of(model_name)
    batch = with_contents(batch_of(plan, config))
    model = random_model(plan, config).train().requires_grad_(True)
    for name, parameter in model.named_parameters():  # ones would hide a weight that is left out
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    with fused_kernels(model, used=fused):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    kinds = [type(module) for module in model.modules()]
    assert (FusedRMSNorm in kinds and FusedMLP in kinds) == fused, kinds
    return {
        "loss": loss.detach(),
        **{name: each.grad for name, each in model.named_parameters() if each.grad is not None},
    }


def differences(model_name: str) -> dict[str, float]:
    """By the loss and by part, the largest difference of a tensor, relative to its largest number."""
    ours, plain = (step(model_name, fused=fused) for fused in (True, False))
    assert ours.keys() == plain.keys()
    found: dict[str, float] = {}
    for name, tensor in plain.items():
        part = "loss" if name == "loss" else "vision" if ".visual." in name else "llm"
        off = float((ours[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-20))
        found[part] = max(found.get(part, 0.0), off)
    return found


def memory(model_name: str) -> tuple[int, int]:
    """(measured, recorded) peak of a training step. Kernels are not run: the interpreter keeps what it was given."""
    plan = replace(plan_of(**{**MODELS[model_name], "precision": "fp32"}), fused_kernels=True)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        for module, kernel in KERNELS:
            stack.enter_context(patch.object(module, kernel, NoKernel()))
        measured = measured_bytes(model_name, plan, Path(scratch), None)
    forget_accelerator()
    return measured, peak_bytes(recorded(model_name, plan))


def refusal(wrong: str) -> str:
    """What is said of kernels one of which is wrong in its result or in a gradient; "" where nothing is."""
    cpu, right = torch.device("cpu"), {name: getattr(kernels, name) for name in ("rms_norm", "gated", "rotated")}
    swaps: dict[str, Any] = {
        "no weight": ("rms_norm", lambda hidden, weight, eps: right["rms_norm"](hidden, weight * 0 + 1, eps)),
        "no gradient of up": ("gated", lambda gate, up: right["gated"](gate, up.detach() + 0 * up)),
        "turned back": ("rotated", lambda query, key, cos, sin: right["rotated"](query, key, cos, -sin)),
    }
    if wrong:
        name, function = swaps[wrong]
        setattr(kernels, name, function)
    try:
        for dtype in (torch.float32, torch.float16):  # it cannot multiply two bfloat16
            refuse_wrong_kernels(cpu, dtype)
    except UserError as error:
        return str(error)
    finally:
        for name, function in right.items():
            setattr(kernels, name, function)
    return ""


def main() -> None:
    found = {
        "differences": {name: differences(name) for name in MODELS},
        "memory": {name: memory(name) for name in MODELS},
        "refused": {wrong: refusal(wrong) for wrong in ("", "no weight", "no gradient of up", "turned back")},
        "left": [name for name, module in sys.modules.items() if getattr(module, ROTATE, None) is kernels._rotated],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
