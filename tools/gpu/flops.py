"""Model FLOPs of a training step, and the FLOP/s that a device offers.

Model FLOPs are counted as in the PaLM paper (arXiv 2204.02311, appendix B): what the step needs, without what is
computed twice to save memory. A matrix of n weights on T tokens is

    2 n T forward  +  2 n T for its input's gradient, if one is needed  +  2 n T for its own, if it is trained

and attention over L tokens of width d is 4 L^2 d per layer, half if it is causal, and twice that backward. An input's
gradient is needed behind the first trained weight: a frozen vision tower in front of LoRA has none, nor has the first
layer's query. Embeddings are looked up, not multiplied; a token counts for the experts that it takes; the head counts
for the tokens of the loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

import torch
from transformers import PreTrainedConfig

from stages.core.params.schema import PARTS, Part
from stages.kit.models.adapters import apply_recipe, is_idle, part_of, plain_name
from stages.kit.models.load import meta_model
from stages.kit.planning.plan import Plan

PEAKS: tuple[tuple[str, float, str], ...] = (
    (r"B200", 2250, "NVIDIA DGX B200 datasheet, half of the sparse figure"),
    (r"H200 NVL|H100 NVL", 835.5, "NVIDIA H100 and H200 datasheets (NVL), half of the sparse figure"),
    (r"H200|GH200|H100 80GB HBM3", 989.4, "NVIDIA H100 and H200 datasheets (SXM), half of the sparse figure"),
    (r"H100 PCIe", 756.5, "NVIDIA H100 datasheet (PCIe), half of the sparse figure"),
    (r"A100|A800", 312, "NVIDIA A100 datasheet"),
    (r"A30", 165, "NVIDIA A30 datasheet"),
    (r"RTX 5090", 209.5, "NVIDIA RTX Blackwell whitepaper, FP32 accumulate"),
    (r"RTX 6000 Ada", 364.25, "NVIDIA Ada whitepaper, FP32 accumulate"),
    (r"A40", 149.7, "NVIDIA A40 datasheet"),
    (r"RTX A6000", 154.8, "NVIDIA GA102 whitepaper, 1.3"),
    (r"RTX 3090", 71, "NVIDIA GA102 whitepaper, FP32 accumulate"),
    (r"A10", 125, "NVIDIA A10 datasheet"),
    (r"L40S", 362.05, "NVIDIA L40S datasheet"),
    (r"L40", 181.05, "NVIDIA L40 datasheet"),
    (r"L4", 121, "NVIDIA L4 datasheet, half of the sparse figure"),
    (r"RTX 4090", 165.2, "NVIDIA Ada whitepaper, FP32 accumulate"),
    (r"V100-SXM[23]?", 125, "NVIDIA V100 datasheet"),
    (r"V100-PCIE", 112, "NVIDIA V100 datasheet"),
    (r"Quadro RTX 6000", 130.5, "NVIDIA Turing whitepaper, FP16 tensor"),
    (r"T4", 65, "NVIDIA T4 datasheet"),
)
"""Peaks by a part of the device's name, whole words; the first that matches.

They are the tensor cores' dense bf16 or fp16 peaks in TFLOP/s, without sparsity, as the vendors' data sheets and
whitepapers publish them; none is measured here. A card that is missing has no share of peak.
"""


_BLOCK_ENTRY = re.compile(r"\.(qkv|[qkv]_proj|fc1|gate|experts\.gate_up_proj|gate_proj|up_proj)\b")
"""Matrices that multiply the input of their block, attention or MLP, one beside the other."""


def peak_tflops(device_name: str) -> tuple[float, str] | None:
    """Dense bf16 or fp16 TFLOP/s and their source; None for a device that is not in the table."""
    found = ((peak, source) for words, peak, source in PEAKS if re.search(rf"\b({words})\b", device_name))
    return next(found, None)


def model_flops(plan: Plan, config: PreTrainedConfig, batch: Mapping[str, torch.Tensor]) -> float:
    """FLOPs of one micro-batch, forward and backward. Padding counts, since it is computed."""
    with torch.device("meta"):
        model = apply_recipe(meta_model(config), plan.parts, plan.lora, plan.full_targets)
    text = config.get_text_config()
    rows = _rows(config, batch)
    trained: set[Part] = set()
    block, block_has_gradient = "", False
    flops = 0.0
    for name, parameter in model.named_parameters():  # in the order of the forward pass
        part = part_of(name)
        has_gradient = bool(trained) or ".lora_B." in name
        if entry := _BLOCK_ENTRY.search(plain_name(name)):
            if block != (block := entry.string[: entry.start()]):
                block_has_gradient = bool(trained)
            has_gradient = block_has_gradient or ".lora_B." in name
        if parameter.requires_grad:
            trained.add(part)
        if parameter.ndim < 2 or is_idle(model, name) or ("embed_tokens" in name and ".lora_" not in name):
            continue
        share = text.num_experts_per_tok / text.num_experts if ".experts." in name else 1.0
        count = _learnt(batch) if "lm_head" in name else rows[part]
        flops += 2 * parameter.numel() * share * count * (1 + has_gradient + parameter.requires_grad)
    head = model.get_output_embeddings().weight
    if head is model.get_input_embeddings().weight:
        flops += 2 * head.numel() * _learnt(batch) * (1 + bool(trained) + head.requires_grad)
    passes = {part: 1 + any(before in trained for before in PARTS[: PARTS.index(part) + 1]) for part in PARTS}
    return flops + _attention_flops(config, batch, passes)


def _attention_flops(config: PreTrainedConfig, batch: Mapping[str, torch.Tensor], passes: Mapping[Part, int]) -> float:
    text = config.get_text_config()
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    # Backward takes twice the forward's.
    flops = 2.0 * text.num_hidden_layers * _squared_lengths(batch) * width * (2 * passes["llm"] - 1)
    if "pixel_values" in batch:
        vision = config.vision_config
        patches = batch["image_grid_thw"].prod(dim=1)
        flops += vision.depth * 4 * int((patches**2).sum()) * vision.embed_dim * (2 * passes["vision"] - 1)
    return flops


def _squared_lengths(batch: Mapping[str, torch.Tensor]) -> int:
    """Sum of the squares of the samples' lengths, padded or in one row."""
    if "position_ids" not in batch:
        num_samples, length = batch["input_ids"].shape
        return num_samples * length**2
    positions = batch["position_ids"].flatten(0, -2)[0]  # in the text, where each sample begins at 0
    ends = [*positions.eq(0).nonzero().flatten().tolist(), len(positions)]
    return sum((end - start) ** 2 for start, end in pairwise(ends))


def _rows(config: PreTrainedConfig, batch: Mapping[str, torch.Tensor]) -> dict[Part, int]:
    """Rows that each part's matrices multiply: patches, groups of patches, tokens."""
    patches = len(batch["pixel_values"]) if "pixel_values" in batch else 0
    merged = patches // config.vision_config.spatial_merge_size**2 if patches else 0
    return {"vision": patches, "projector": merged, "llm": batch["input_ids"].numel()}


def _learnt(batch: Mapping[str, torch.Tensor]) -> int:
    """Tokens whose next one counts in the loss."""
    return int(batch["labels"][:, 1:].ne(-100).sum())
