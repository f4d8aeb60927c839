"""A model folder with the weights of its linear layers quantized by bitsandbytes, for transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type
from torch.nn.functional import pad
from transformers import BitsAndBytesConfig

from stages.core.errors import UserError
from stages.models.folders import Checkpoint, copy_model_files
from stages.models.load import NF4_BLOCK, auto_class, load_config, meta_model, nf4_config

CPU = torch.device("cpu")
NF4_STATE = ".quant_state.bitsandbytes__nf4"
NF4_PARTS = (".absmax", ".quant_map", NF4_STATE)
"""Ends of the names of what belongs to a weight in 4 bits."""


def write_quantized(model_dir: Path, folder: Path, quantization: str) -> None:
    """Write a model folder that loads with plain transformers. Takes the memory of the quantized model.

    nf4 is without double quantization, so that a scale is exact. Raises UserError for a mixture of experts.
    """
    config = load_config(model_dir)
    if any("experts" in f"{name} {type(part)}".lower() for name, part in meta_model(config).named_modules()):
        raise UserError(
            f"{config.model_type} is not exported by bitsandbytes: transformers leaves the weights of its experts "
            "unquantized; format: gguf takes some mixtures"
        )
    options = {
        "nf4": nf4_config(config.dtype or torch.float32, double_quantization=False),
        "int8": BitsAndBytesConfig(load_in_8bit=True),
    }
    model = auto_class(config).from_pretrained(
        model_dir, quantization_config=options[quantization], dtype="auto", device_map={"": CPU}, use_safetensors=True
    )
    copy_model_files(model_dir, folder, weights=False)
    model.save_pretrained(folder)


def largest_deviations(model_dir: Path, folder: Path) -> dict[str, float]:
    """The largest deviation of each tensor of the model, in steps; infinite for one that is missing, of another shape,
    or different though not quantized, and for a tensor of the folder that nothing in the model is made into."""
    originals, written = Checkpoint(model_dir), Checkpoint(folder)
    found, known = {}, set(originals.path_of)
    for name in originals.path_of:
        original, scales = originals[name].float(), f"{name.removesuffix('weight')}SCB"
        values, step = torch.empty(0), torch.zeros(())
        if f"{name}{NF4_STATE}" in written.path_of:
            known |= {f"{name}{part}" for part in NF4_PARTS}
            state = QuantState.from_dict({f"weight{part}": written[f"{name}{part}"] for part in NF4_PARTS}, CPU)
            values, step = dequantize_4bit(written[name], state).float(), nf4_step(original)
        elif scales in written.path_of:
            known |= {scales, f"{scales.removesuffix('SCB')}weight_format"}
            values = written[name] * written[scales][:, None] / 127
            step = original.abs().amax(dim=1, keepdim=True) / 127
        elif name in written.path_of:
            values = written[name].float()
        if values.shape != original.shape:
            values = torch.full_like(original, torch.inf)
        found[name] = float(torch.where(values == original, 0, (values - original).abs() / step).max())
    return found | dict.fromkeys(written.path_of.keys() - known, torch.inf)


def nf4_step(values: torch.Tensor) -> torch.Tensor:
    """The distance of the two neighbours in 4 bits that each of these weights lies between."""
    blocks = pad(values.flatten(), (0, -values.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
    scale, code = blocks.abs().amax(dim=1, keepdim=True), get_4bit_type("nf4", device=CPU)
    above = torch.searchsorted(code, blocks / scale).clamp(1, len(code) - 1)
    return ((code[above] - code[above - 1]) * scale).flatten()[: values.numel()].view_as(values)
