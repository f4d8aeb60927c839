"""Models of random weights in the known geometries, and the recipes' trainer on them."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from stages.core.params.schema import DeviceParams, LoraParams, Part, PartsParams
from stages.kit.memory.stand_in import stand_in_batch, stand_in_processor
from stages.kit.memory.step import from_features, one_batch_trainer
from stages.kit.models.adapters import ALL_LINEAR, apply_recipe
from stages.kit.models.folders import STAND_IN_DIR, geometry_config_path
from stages.kit.models.kernels import fused_kernels
from stages.kit.models.load import load_config, new_model, resolve_attention
from stages.kit.planning.plan import Plan, Schedule, with_fused_kernels, without_padding
from stages.kit.training.batches import packed
from stages.kit.training.kernels import prepare_kernels
from stages.kit.training.trainer import RecipeTrainer
from tools.gpu.device import Kind
from tools.gpu.pieces import Recipe, Setting

ACCUMULATION = 4
"""Micro-batches a step. Trainer holds all of them on the device at once, so it matters; recipes have 8 or 16."""

_RECIPES: dict[Recipe, tuple[PartsParams, dict[Part, tuple[str, ...]]]] = {
    "r1": (PartsParams(llm="lora"), {"llm": (ALL_LINEAR,)}),
    "r2": (PartsParams(vision="full", projector="full"), {}),
    "r4": (PartsParams(vision="lora", llm="lora"), {"vision": (ALL_LINEAR,), "llm": (ALL_LINEAR,)}),
    "lora": (PartsParams(llm="lora"), {"llm": (ALL_LINEAR,)}),
    "full": (PartsParams(llm="full"), {}),
}
"""What is trained of each part, and the modules that get adapters."""


_IMAGE_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "vision_token_id": "<|vision_pad|>",
}
"""By the names in Qwen2-VL's config.json."""


def config_of(geometry: str) -> PreTrainedConfig:
    config = load_config(geometry_config_path(geometry).parent)
    # Special tokens as the stand-in's tokenizer numbers them, or the model would look for images where there are none.
    added = json.loads((STAND_IN_DIR / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    text = config.get_text_config()
    text.eos_token_id = ids["<|im_end|>"]
    text.bos_token_id = text.pad_token_id = ids["<|endoftext|>"]
    for name, token in _IMAGE_TOKENS.items():
        if hasattr(config, name):
            setattr(config, name, ids[token])
    return config


def batch_of(plan: Plan, config: PreTrainedConfig, *, max_pixels: int) -> dict[str, torch.Tensor]:
    """A micro-batch without contents."""
    batch = stand_in_batch(
        config, micro_batch=plan.schedule.micro_batch, max_length=plan.max_length, max_pixels=max_pixels
    )
    batch = from_features(batch, config, plan.precision) if plan.features_bytes else batch
    return packed(batch, config, plan.loss) if plan.padding_free else batch


def plan_of(setting: Setting, device: Kind) -> Plan:
    parts, targets = _RECIPES[setting.recipe]
    effective_batch = setting.micro_batch * ACCUMULATION
    plan = Plan(
        recipe=setting.name,
        profile="calibration",
        task="none",
        base_dir=f"random:{setting.geometry}",
        data_dir="none",
        answer_format=None,
        device=DeviceParams(kind=device),
        placement="single",
        precision=setting.precision,
        quantization=setting.quantization,
        may_quantize=False,
        attn=setting.attn,
        gradient_checkpointing=setting.checkpointing,
        optimizer=setting.optimizer,
        dataloader_workers=0,
        parts=parts,
        lora=LoraParams(rank=64, alpha=128, dropout=0.1, targets=targets) if targets else None,
        full_targets={},
        loss="all-tokens",
        max_length=setting.max_length,
        images=None,
        features_bytes=int(setting.features),
        schedule=Schedule(
            train_samples=effective_batch,
            effective_batch=effective_batch,
            micro_batch=setting.micro_batch,
            grad_accumulation=ACCUMULATION,
            epochs=1,
            steps_per_epoch=1,
            num_steps=1,
            warmup_steps=0,
            lr_schedule="constant",
            learning_rates=dict.fromkeys(parts.trained(), 1e-5),
            weight_decay=0.0,
            max_grad_norm=1.0,
        ),
        seed=42,
        trainable={},
    )
    config = config_of(setting.geometry)
    padding_free, _ = without_padding(plan, "auto" if setting.padding_free else "off", config)
    fused_kernels, _ = with_fused_kernels(plan, "auto" if setting.fused_kernels else "off", config)
    return replace(plan, padding_free=padding_free, fused_kernels=fused_kernels)


@contextmanager
def random_trainer(
    plan: Plan, config: PreTrainedConfig, batch: Mapping[str, torch.Tensor], *, num_steps: int
) -> Iterator[RecipeTrainer]:
    """The plan's trainer on a model of random weights, to which every micro-batch of `num_steps` steps is this one.

    Raises UserError where the kernels that are predicted do not run.
    """
    prepare_kernels(plan)
    model = random_model(plan, config)
    gc.collect()
    if plan.device.kind == "cuda":
        torch.cuda.empty_cache()  # a real model comes weight by weight, and never lies there unquantized
    adapted = apply_recipe(model, plan.parts, plan.lora, plan.full_targets)
    schedule = replace(plan.schedule, num_steps=num_steps, train_samples=plan.schedule.effective_batch * num_steps)
    plan = replace(plan, schedule=schedule)
    with fused_kernels(adapted, used=plan.fused_kernels):
        yield one_batch_trainer(plan, adapted, stand_in_processor(config, None), batch)


def random_model(plan: Plan, config: PreTrainedConfig) -> PreTrainedModel:
    """The plan's base, never trained, on its device, without a file."""
    with torch.device(plan.device.kind):
        attn = resolve_attention(plan.attn, plan.device, plan.precision, padding_free=plan.padding_free)
        model = new_model(config, precision=plan.precision, attn=attn)
    if plan.quantization == "nf4":
        from stages.kit.memory.stand_in import quantize_nf4

        model = quantize_nf4(model, plan.precision, fill=partial(_fill_randomly, device=model.device))
    return model


def _fill_randomly(layer: Any, device: torch.device) -> None:
    """As transformers does with each weight that it loads (Bnb4bitQuantize)."""
    import bitsandbytes as bnb

    weight = torch.empty(layer.out_features, layer.in_features, dtype=layer.compute_dtype, device=device)
    torch.nn.init.normal_(weight, std=0.02)
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, **layer.weight.__dict__).to(device)


def with_contents(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A stand-in batch that can be computed with: pixels between 0 and 1, and in texts different tokens.

    The same token everywhere would send every token to the same experts.
    """
    filled = {name: torch.rand_like(tensor) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    if "image_grid_thw" not in batch:
        ids = batch["input_ids"]
        filled["input_ids"] = torch.arange(ids.numel()).view(ids.shape) % 256
    return filled
