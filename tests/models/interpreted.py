"""Training steps with Liger's kernels on a CPU, by Triton's interpreter, beside the same steps with torch's.

Triton reads TRITON_INTERPRET when a kernel is defined, so this is a process of its own. It prints, as JSON by family,
the differences of loss and gradients, and the peak of memory, measured and recorded.
Run: TRITON_INTERPRET=1 python -m tests.models.interpreted
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm, rope, swiglu
from torch import nn
from triton.runtime import interpreter

from stages.core.errors import UserError
from stages.core.families import FAMILIES
from stages.internals.accelerate_internals import reset_accelerator
from stages.internals.trl_internals import NoKernel
from stages.models import load
from stages.models.kernels import ROTATE, fused_kernels, rotated
from stages.training.kernels import refuse_wrong_kernels
from tests.memory.real_steps import measured_bytes
from tests.memory.small import ALL, FULL, batch_of, config_of, peak_bytes, plan_of, recorded
from tools.timing import random_model, with_contents

_convert = interpreter._implicit_cvt


def _with_floats(argument: Any) -> Any:
    """The interpreter leaves Python's floats as they are, which have no .to(); compiled, they are fp32."""
    if isinstance(argument, float):
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return _convert(argument)


interpreter._implicit_cvt = _with_floats
rms_norm.rsqrt = lambda value: tl.rsqrt(value)  # CUDA's library of functions has no interpreter
geglu.tanh = lambda value: 2 / (1 + tl.exp(-2 * value)) - 1

KERNELS = (
    (rms_norm, "_rms_norm_forward_kernel"),
    (rms_norm, "_rms_norm_backward_kernel"),
    (swiglu, "_swiglu_forward_kernel"),
    (swiglu, "_swiglu_backward_kernel"),
    (geglu, "_geglu_tanh_forward_kernel"),
    (geglu, "_geglu_tanh_backward_kernel"),
    (rope, "_triton_rope"),
)
FUSED = [model_type for model_type, family in FAMILIES.items() if family.fused_like]


def plan_for(model_type: str, **settings: Any) -> Any:
    # Two layers. nf4 and adapters do not change what is fused.
    return plan_of(**{**(ALL if FAMILIES[model_type].vision else FULL), "precision": "fp32", **settings})


def step(model_type: str, *, fused: bool) -> dict[str, torch.Tensor]:
    """The loss and the gradient of every weight of a random model, in fp32."""
    torch.manual_seed(0)
    # A short sample and a small image, as each token is interpreted: the kernels go row by row.
    plan, config = plan_for(model_type, micro_batch=1, max_length=8), config_of(model_type)
    batch = with_contents(batch_of(plan, config, pixels=56 * 56))
    model = random_model(plan, config).train().requires_grad_(True)
    for name, parameter in model.named_parameters():  # ones would hide a weight that is left out
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    with fused_kernels(model, used=fused):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    return {
        "loss": loss.detach(),
        **{name: each.grad for name, each in model.named_parameters() if each.grad is not None},
    }


def differences(model_type: str) -> dict[str, float]:
    """Largest difference of a tensor relative to its largest number, for the loss and by part."""
    ours, plain = (step(model_type, fused=fused) for fused in (True, False))
    assert ours.keys() == plain.keys()
    found: dict[str, float] = {}
    for name, tensor in plain.items():
        part = "loss" if name == "loss" else "vision" if ".visual." in name else "llm"
        off = float((ours[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-20))
        found[part] = max(found.get(part, 0.0), off)
    return found


def memory(model_type: str) -> tuple[int, int]:
    """(measured, recorded) peak of a training step. Kernels are not run: the interpreter keeps what it was given."""
    plan = replace(plan_for(model_type), fused_kernels=True)
    with ExitStack() as stack:
        for module, kernel in KERNELS:
            stack.enter_context(patch.object(module, kernel, NoKernel()))
        measured = measured_bytes(model_type, plan, None)
    reset_accelerator()
    return measured, peak_bytes(recorded(model_type, plan))


def refusals() -> list[str]:
    """Error messages of the comparison before a training: for right kernels, and for a wrong norm. On one layer."""
    found = []
    right, config = rms_norm.LigerRMSNormFunction.apply, config_of("text", (1, 0))
    for apply in (right, lambda hidden, weight, *rest: right(hidden, 2 * weight, *rest)):
        with (
            patch.object(load, "load_config", lambda _: config),
            patch.object(rms_norm.LigerRMSNormFunction, "apply", apply),
        ):
            try:
                refuse_wrong_kernels("cpu")
            except UserError as error:
                found.append(str(error))
    return found


def main() -> None:
    found = {
        "differences": {name: differences(name) for name in FUSED},
        "memory": {name: memory(name) for name in FUSED},
        "refused": refusals(),
        "left": [name for name, module in sys.modules.items() if getattr(module, ROTATE, None) is rotated],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
