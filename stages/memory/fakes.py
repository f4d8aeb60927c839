"""Fakes for a recorded step: tokenizer and data that are not fetched yet, nf4 weights, Liger's kernels.

They allocate what the real ones do, keep it as long, and compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from math import isqrt
from typing import Any
from unittest.mock import patch

import torch
from peft.tuners.lora import dora
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig, PreTrainedModel

from stages.core.families import family_of
from stages.core.params.schema import ImageParams
from stages.internals.torch_internals import without_modes
from stages.internals.transformers_internals import become_nf4
from stages.models import kernels
from stages.models.folders import FAKE_PROCESSOR_DIR
from stages.models.load import DTYPES, nf4_config
from stages.models.prompts import Processor, load_processor, tokenizer_of

ABSMAX_GROUP = 256
"""Scales that share a scale of their own under double quantization (bitsandbytes.functional.quantize_4bit)."""


def fake_processor(config: PreTrainedConfig, images: ImageParams | None) -> Processor:
    """A processor for a vision-language model, a tokenizer for a text model."""
    processor = load_processor(FAKE_PROCESSOR_DIR, images)
    return processor if family_of(config.model_type).vision else tokenizer_of(processor)


def fake_batch(
    config: PreTrainedConfig, *, micro_batch: int, max_length: int, max_pixels: int | None
) -> dict[str, torch.Tensor]:
    """The largest micro-batch within a plan's limits: it needs no data.

    Every sample has max_length tokens. With images, one of max_pixels is among them, or of as many pixels as max_length
    has room for, in patches of Qwen2-VL's processor. All text counts in the loss.
    """
    ids = torch.zeros((micro_batch, max_length), dtype=torch.long)
    batch: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    labels = torch.ones_like(ids)
    if family_of(config.model_type).vision is not None and max_pixels is not None:
        vision = config.vision_config
        side = vision.patch_size * vision.spatial_merge_size
        tokens = min(max_pixels // side**2, max_length - 2)  # one before the image, and one to be learned
        patches = tokens * vision.spatial_merge_size**2
        start, stop = 1, 1 + tokens
        ids[:, 0], ids[:, start:stop] = config.vision_start_token_id, config.image_token_id
        labels[:, :stop] = -100
        features = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        rows = max(rows for rows in range(1, isqrt(tokens) + 1) if tokens % rows == 0)  # few windows, as real images
        grid = [1, rows * vision.spatial_merge_size, tokens // rows * vision.spatial_merge_size]
        batch |= {
            "pixel_values": torch.empty(micro_batch * patches, features),
            "image_grid_thw": torch.tensor([grid] * micro_batch),
            "mm_token_type_ids": (ids == config.image_token_id).int(),
        }
    return batch | {"labels": labels}


# --- nf4: bitsandbytes' own modules, placed by transformers' own rule


def quantize_nf4(
    model: PreTrainedModel, precision: str, fill: Callable[[nn.Module], None] | None = None
) -> PreTrainedModel:
    """Every linear layer that transformers would load in nf4, in nf4. The model's weights may be fake.

    precision: of the arithmetic, fp16 or bf16. fill: gives a layer its weights; by default they have no contents.
    """
    biases = {
        name: module.bias.detach()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.bias is not None
    }
    with without_modes():
        layers = become_nf4(model, nf4_config(DTYPES[precision]))
    for name, layer in layers.items():
        (fill or fill_without_contents)(layer)
        if name in biases:
            layer.bias = nn.Parameter(biases[name], requires_grad=False)
    model.is_loaded_in_4bit = True
    return model


def fill_without_contents(layer: Any) -> None:
    """Give a layer what bitsandbytes and PEFT read of a Params4bit, which can neither be fake nor be made of fakes."""
    from bitsandbytes.functional import QuantState

    rows, columns = layer.out_features, layer.in_features
    blocks = -(-rows * columns // 64)
    state = QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8),
        shape=torch.Size((rows, columns)),
        code=torch.empty(16),
        blocksize=64,
        quant_type="nf4",
        dtype=layer.compute_dtype,
        offset=torch.empty(()),
        state2=QuantState(
            absmax=torch.empty(-(-blocks // ABSMAX_GROUP)),
            code=torch.empty(256),
            blocksize=ABSMAX_GROUP,
            dtype=torch.float32,
        ),
    )
    weight = nn.Parameter(torch.empty(rows * columns // 2, 1, dtype=torch.uint8), requires_grad=False)
    vars(weight).update(
        quant_state=state,
        bnb_quantized=True,
        compress_statistics=True,
        quant_type="nf4",
        blocksize=64,
        quant_storage=torch.uint8,
        module=layer,
    )
    layer.weight, layer.quant_state = weight, state


def fake_dequantization() -> AbstractContextManager[Any]:
    """DoRA's layers dequantize weights without contents too in the block; PEFT knows those in 4 bits by their class."""
    from bitsandbytes.functional import dequantize_4bit

    def dequantized(layer: Any) -> torch.Tensor:
        state = getattr(layer, "quant_state", None)
        return layer.weight if state is None else dequantize_4bit(layer.weight.data, state)

    return patch.object(dora, "dequantize_module_weight", dequantized)


# --- Liger's kernels (liger_kernel/ops/{rms_norm,swiglu,geglu,rope}.py, 0.8.5), without Triton or Liger


def fake_kernels(multiprocessors: int) -> AbstractContextManager[Any]:
    """Models that are given fused kernels (`kernels.fused_kernels`) within the block allocate what those would.

    multiprocessors: of the GPU; as many sums of a norm's weight are added up at once.
    """
    fuse_layers = partial(_fuse_layers, multiprocessors=multiprocessors)
    return patch.multiple(kernels, fuse_layers=fuse_layers, rotated=_Rotated.apply)


def _fuse_layers(model: PreTrainedModel, *, multiprocessors: int) -> None:
    """Replaces the same modules as Liger (a test compares the memory of each family's model)."""
    decoder = model.get_decoder()
    for module in decoder.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module, multiprocessors)
    for layer in decoder.layers if kernels.has_mlps(decoder) else ():
        layer.mlp.forward = partial(_mlp, layer.mlp)


def _norm(norm: nn.Module, multiprocessors: int, hidden: torch.Tensor) -> torch.Tensor:
    # Liger writes the gradient over the output's, except for Gemma's norms, which call their epsilon eps.
    return _RMSNorm.apply(hidden, norm.weight, multiprocessors, hasattr(norm, "variance_epsilon"))


def _mlp(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
    if hasattr(mlp, "gate_up_proj"):
        return mlp.down_proj(_Gated.apply(*mlp.gate_up_proj(hidden).chunk(2, dim=-1)))
    return mlp.down_proj(_Gated.apply(mlp.gate_proj(hidden), mlp.up_proj(hidden)))


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


def _in_place(states: torch.Tensor) -> torch.Tensor:
    """(B, heads, L, D), a view of what a projection left, or of a copy where that was none."""
    return states.transpose(1, 2).contiguous().transpose(1, 2)
