"""Small models of each family, plans and batches for them, and what is recorded and predicted of them.

No weights: a configuration is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, Qwen2Config, Qwen2MoeConfig

from stages.core.families import FAMILIES
from stages.core.params import load_params
from stages.core.params.schema import DeviceParams, LoraParams, Params, PartsParams
from stages.memory.fakes import fake_batch
from stages.memory.predict import Depth, predict, with_depth
from stages.memory.recorder import Recording
from stages.memory.step import record_step
from stages.models.load import load_config
from stages.models.prompts import Processor, load_processor
from stages.planning.plan import Plan
from stages.planning.prediction import Prediction
from stages.planning.resolve import resolve_plan
from stages.training.batches import packed
from tests import ROOT
from tests.plans import changed
from tests.tiny_families import config_for

TINY = ROOT / "data/tiny/qwen2-vl"
PIXELS = 112 * 112

ATTENTION = LoraParams(rank=8, alpha=16, dropout=0.1, targets={"llm": ("q_proj", "v_proj")})
EVERYTHING = LoraParams(
    rank=8,
    alpha=16,
    dropout=0.1,
    targets={"vision": ("attn.qkv", "mlp.fc1"), "llm": ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")},
)
R1: dict[str, Any] = {"parts": PartsParams(llm="lora"), "lora": ATTENTION}
R2: dict[str, Any] = {"parts": PartsParams(vision="full", projector="full"), "lora": None}
R4: dict[str, Any] = {"parts": PartsParams(vision="lora", llm="lora"), "lora": EVERYTHING}
FULL: dict[str, Any] = {"parts": PartsParams(llm="full"), "lora": None}
GATE: dict[str, Any] = {**FULL, "full_targets": {"llm": ("mlp.gate",)}}
LABELS: dict[str, Any] = {**GATE, "loss": "router-labels", "domains": tuple("abcdefgh")}
ALL: dict[str, Any] = {"parts": PartsParams(vision="full", projector="full", llm="full"), "lora": None}
CUDA: dict[str, Any] = {"kind": "cuda", "precision": "bf16"}

GEOMETRY: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def config_of(model: str, depth: Depth = (2, 2)) -> PreTrainedConfig:
    """model: detection, text, moe or a model_type. depth: of the language model, and of the vision tower if any."""
    text, _ = depth
    if model in FAMILIES:
        return config_for(model)
    if model == "detection":
        config = load_config(TINY)
        config.text_config.layer_types = ["full_attention"] * text
        return with_depth(config, depth)
    if model == "text":
        return Qwen2Config(**GEOMETRY, num_hidden_layers=text)
    return Qwen2MoeConfig(
        **GEOMETRY,
        num_hidden_layers=text,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
    )


@cache
def shipped_params() -> Params:
    return load_params(ROOT / "params.yaml")


def plan_of(
    *, micro_batch: int = 2, grad_accumulation: int = 2, max_length: int = 96, kind: Any = "cpu", **settings: Any
) -> Plan:
    """settings: of the plan, its parts and its LoRA among them."""
    plan = resolve_plan(shipped_params(), "r1-llm-only", train_samples=8)
    return changed(
        plan,
        micro_batch=micro_batch,
        grad_accumulation=grad_accumulation,
        learning_rates=dict.fromkeys(settings["parts"].trained(), 1e-4),
        max_length=max_length,
        trainable={},
        **{
            "device": DeviceParams(kind=kind),
            "gradient_checkpointing": False,
            "precision": "fp32",
            "quantization": "none",
            "attn": "sdpa",
            **settings,
        },
    )


@cache
def processor_of(model: str) -> Processor:
    processor = load_processor(TINY, None)
    return processor if model == "detection" or model.endswith("_vl") else processor.tokenizer


def batch_of(plan: Plan, config: PreTrainedConfig, *, pixels: int = PIXELS) -> Mapping[str, torch.Tensor]:
    """Without padding, the first sample is the shorter one."""
    sizes = {"micro_batch": plan.memory.micro_batch, "max_length": plan.recipe.max_length, "max_pixels": pixels}
    batch = fake_batch(config, **sizes)
    if plan.padding_free:
        batch["attention_mask"][0, plan.recipe.max_length - 30 :] = 0
        batch = packed(batch, config, plan.recipe.loss)
    return batch


Args = ParamSpec("Args")
Result = TypeVar("Result")


def made_once(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Cached by how its arguments print, as plans hold dictionaries."""
    results: dict[str, Result] = {}

    @wraps(function)
    def cached(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        key = repr((args, sorted(kwargs.items())))
        if key not in results:
            results[key] = function(*args, **kwargs)
        return results[key]

    return cached


@made_once
def recorded(model: str, plan: Plan, *, depth: Depth = (2, 2), padded: bool = False) -> Recording:
    """padded: the first sample is shorter, so that attention takes a mask."""
    config = config_of(model, depth)
    batch = dict(batch_of(plan, config))
    if padded:
        batch["attention_mask"] = batch["attention_mask"].clone()
        batch["attention_mask"][0, 60:] = 0
    return record_step(plan, config, processor_of(model), batch)


@made_once
def predicted(model: str, plan: Plan, *, depth: Depth = (2, 2)) -> Prediction:
    config = config_of(model, depth)
    return predict(plan, config, processor_of(model), batch_of(plan, config))


def peak_bytes(recording: Recording) -> int:
    return max(peak.total() for peak in recording.peaks().values())


def quantization_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The scales and tables that layers in 4 bits keep beside their packed weights (bitsandbytes' QuantState)."""
    states: Iterator[Any] = (state for module in model.modules() if (state := getattr(module, "quant_state", None)))
    parts = (part for state in states for part in (*vars(state).values(), *vars(state.state2).values()))
    return [part for part in parts if isinstance(part, torch.Tensor)]
