"""A step recorded without weights is the step that really runs: on a CPU, where both can be watched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, Qwen2Config, Qwen2MoeConfig

from stages.kit.memory.predict import stand_in_batch
from stages.kit.memory.recording import Recording
from stages.kit.memory.step import record_step
from stages.kit.models.load import load_config
from stages.kit.models.processors import Processor, load_processor
from stages.kit.params import LoraParams, PartsParams, load_params
from stages.kit.plan import Plan, resolve_plan

TINY = Path("data/tiny/qwen2-vl")
PIXELS = 224 * 224

LLM = PartsParams(llm="lora")
ATTENTION = LoraParams(rank=8, alpha=16, dropout=0.1, targets={"llm": ("q_proj", "v_proj")})
EVERYTHING = LoraParams(
    rank=8,
    alpha=16,
    dropout=0.1,
    targets={"vision": ("attn.qkv", "mlp.fc1"), "llm": ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")},
)
FULL = PartsParams(llm="full")

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "detection r1": ("detection", {"parts": LLM, "lora": ATTENTION}),
    "detection r1, one at a time": ("detection", {"parts": LLM, "lora": ATTENTION, "micro_batch": 1}),
    "detection r1, checkpointed": ("detection", {"parts": LLM, "lora": ATTENTION, "gradient_checkpointing": True}),
    "detection r1, bf16": ("detection", {"parts": LLM, "lora": ATTENTION, "precision": "bf16"}),
    "detection r1, eager": ("detection", {"parts": LLM, "lora": ATTENTION, "attn": "eager"}),
    "detection r2": ("detection", {"parts": PartsParams(vision="full", projector="full"), "lora": None}),
    "detection r2, bf16, checkpointed": (
        "detection",
        {
            "parts": PartsParams(vision="full", projector="full"),
            "lora": None,
            "precision": "bf16",
            "gradient_checkpointing": True,
        },
    ),
    "detection r4": ("detection", {"parts": PartsParams(vision="lora", llm="lora"), "lora": EVERYTHING}),
    "detection r4, no accumulation": (
        "detection",
        {"parts": PartsParams(vision="lora", llm="lora"), "lora": EVERYTHING, "grad_accumulation": 1},
    ),
    "detection, all of it": (
        "detection",
        {"parts": PartsParams(vision="full", projector="full", llm="full"), "lora": None},
    ),
    "text lora": ("text", {"parts": LLM, "lora": ATTENTION}),
    "text lora, checkpointed": ("text", {"parts": LLM, "lora": ATTENTION, "gradient_checkpointing": True}),
    "text full": ("text", {"parts": FULL, "lora": None}),
    "text full, fused": ("text", {"parts": FULL, "lora": None, "optimizer": "adamw_torch_fused"}),
    "text full, bf16": ("text", {"parts": FULL, "lora": None, "precision": "bf16"}),
    "text full, checkpointed": ("text", {"parts": FULL, "lora": None, "gradient_checkpointing": True}),
    "text full, long": ("text", {"parts": FULL, "lora": None, "max_length": 384}),
    "moe full": ("moe", {"parts": FULL, "lora": None}),
    "moe full, checkpointed": ("moe", {"parts": FULL, "lora": None, "gradient_checkpointing": True}),
    "moe full, bf16": ("moe", {"parts": FULL, "lora": None, "precision": "bf16"}),
    "moe full, fused": ("moe", {"parts": FULL, "lora": None, "optimizer": "adamw_torch_fused"}),
    "moe lora": ("moe", {"parts": LLM, "lora": ATTENTION}),
}


@pytest.fixture(scope="module")
def processors() -> dict[str, Processor]:
    processor = load_processor(TINY, None)
    return {"detection": processor, "text": processor.tokenizer, "moe": processor.tokenizer}


def config_of(model: str) -> PreTrainedConfig:
    geometry: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    if model == "detection":
        return load_config(TINY)
    if model == "text":
        return Qwen2Config(**geometry)
    return Qwen2MoeConfig(
        **geometry, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=128
    )


def plan_of(
    *,
    micro_batch: int = 2,
    grad_accumulation: int = 2,
    max_length: int = 128,
    **settings: Any,
) -> Plan:
    plan = resolve_plan(load_params(), "r1-llm-only", train_samples=8)
    schedule = replace(plan.schedule, micro_batch=micro_batch, grad_accumulation=grad_accumulation)
    rates = dict.fromkeys(settings["parts"].trained(), 1e-4)
    return replace(
        plan,
        max_length=max_length,
        trainable={},
        schedule=replace(schedule, learning_rates=rates),
        **{"gradient_checkpointing": False, "precision": "fp32", "attn": "sdpa", **settings},
    )


def batch_of(plan: Plan, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    return stand_in_batch(config, micro_batch=plan.schedule.micro_batch, max_length=plan.max_length, max_pixels=PIXELS)


def peak_bytes(recording: Recording) -> int:
    return max(peak.size_bytes for peak in recording.peaks().values())


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_recorded_without_weights_is_what_really_runs(name: str, processors: Mapping[str, Processor]) -> None:
    model, settings = SETTINGS[name]
    plan, config = plan_of(**settings), config_of(model)
    batch = batch_of(plan, config)
    predicted = record_step(plan, config, processors[model], batch)
    measured = record_step(plan, config, processors[model], batch, fake=False)
    assert peak_bytes(predicted) == pytest.approx(peak_bytes(measured), rel=0.01)
