"""Layers in 4 bits, as bitsandbytes holds them, without weights or with random ones.

The modules are bitsandbytes' own, put in by transformers' own rule. Without weights their contents are made here,
because a `Params4bit` can neither be fake nor be made from something fake.
"""

from __future__ import annotations

import bitsandbytes as bnb
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from stages.kit.models.load import nf4_config

ABSMAX_GROUP = 256
"""Scales that share a scale of their own under double quantization (bitsandbytes.functional.quantize_4bit)."""


def quantize_nf4(model: PreTrainedModel, precision: str, *, fake: bool = True) -> PreTrainedModel:
    """Every linear layer that transformers would load in nf4, in nf4. The model's weights may be fake.

    precision: of the arithmetic, fp16 or bf16. fake: without contents; else with new random weights, on its device.
    """
    device = model.device
    quantizer = Bnb4BitHfQuantizer(nf4_config(precision), pre_quantized=False)
    kept = quantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)  # noqa: SLF001
    biases = {
        name: module.bias.detach()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.bias is not None
    }
    with _disable_current_modes():
        replace_with_bnb_linear(model, kept, quantizer.quantization_config)
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            if fake:
                _fill(module)
            else:
                _quantize(module, device)
            if name in biases:
                module.bias = nn.Parameter(biases[name], requires_grad=False)
    model.is_loaded_in_4bit = True
    return model


def _quantize(module: bnb.nn.Linear4bit, device: torch.device) -> None:
    """As transformers does with each weight that it loads (Bnb4bitQuantize)."""
    weight = torch.empty(module.out_features, module.in_features, dtype=module.compute_dtype, device=device)
    nn.init.normal_(weight, std=0.02)
    module.weight = bnb.nn.Params4bit(weight, requires_grad=False, **module.weight.__dict__).to(device)


def _fill(module: bnb.nn.Linear4bit) -> None:
    rows, columns = module.out_features, module.in_features
    blocks = -(-rows * columns // 64)
    state = bnb.functional.QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8),
        shape=torch.Size((rows, columns)),
        code=torch.empty(16),
        blocksize=64,
        quant_type="nf4",
        dtype=module.compute_dtype,
        offset=torch.empty(()),
        state2=bnb.functional.QuantState(
            absmax=torch.empty(-(-blocks // ABSMAX_GROUP)),
            code=torch.empty(256),
            blocksize=ABSMAX_GROUP,
            dtype=torch.float32,
        ),
    )
    weight = nn.Parameter(torch.empty(rows * columns // 2, 1, dtype=torch.uint8), requires_grad=False)
    # What bitsandbytes and PEFT read of a Params4bit.
    for name, value in (
        *(("quant_state", state), ("bnb_quantized", True), ("compress_statistics", True), ("quant_type", "nf4")),
        *(("blocksize", 64), ("quant_storage", torch.uint8), ("module", module)),
    ):
        setattr(weight, name, value)
    module.weight = weight
    module.quant_state = state
