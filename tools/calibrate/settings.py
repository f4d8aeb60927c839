"""What is measured: real geometries at full width, and tiny ones that try the same on a CPU.

Written out here, not read from params.yaml: measurements stay comparable whatever a person tries there. The recipes
and limits are those of the shipped one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedConfig

from stages.core.params.schema import Attention, DeviceParams, LoraParams, Optimizer, PartsParams
from stages.kit.memory.stand_in import stand_in_batch, stand_in_processor
from stages.kit.models.geometries import STAND_IN_DIR, geometry_config_path
from stages.kit.models.load import load_config
from stages.kit.models.processors import Processor
from stages.kit.models.random_weights import take_token_ids
from stages.kit.planning.plan import Plan, Schedule

Recipe = Literal["r1", "r2", "r4", "lora", "full", "attention-lora"]
"""r1, r2 and r4 of params.yaml; and of a text model: LoRA, all weights, LoRA beside experts."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LLM = (*_ATTENTION, "gate_proj", "up_proj", "down_proj")
_VISION = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")

ACCUMULATION = 4
"""Micro-batches a step. Trainer holds all of them on the device at once, so it matters; recipes have 8 or 16."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    geometry: str
    recipe: Recipe
    quantization: Literal["none", "nf4"] = "none"
    precision: Literal["fp32", "fp16", "bf16"] = "bf16"
    micro_batch: int = 1
    checkpointing: bool = True
    optimizer: Optimizer = "adamw_torch_fused"
    attn: Attention = "sdpa"
    max_length: int = 2048
    max_pixels: int = 1003520

    @property
    def name(self) -> str:
        words = [self.geometry, self.recipe, self.precision, f"x{self.micro_batch}", self.optimizer]
        words += [word for word in (self.quantization, self.attn) if word not in ("none", "sdpa")]
        return " ".join((*words, *(("checkpointed",) if self.checkpointing else ())))

    def config(self) -> PreTrainedConfig:
        config = load_config(geometry_config_path(self.geometry).parent)
        take_token_ids(config, STAND_IN_DIR)
        return config

    def processor(self) -> Processor:
        return stand_in_processor(self.config(), None)

    def batch(self, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
        return stand_in_batch(
            config, micro_batch=self.micro_batch, max_length=self.max_length, max_pixels=self.max_pixels
        )

    def plan(self, device: Literal["cpu", "cuda"]) -> Plan:
        parts, lora = _recipe(self.recipe)
        effective_batch = self.micro_batch * ACCUMULATION
        return Plan(
            recipe=self.name,
            profile="calibration",
            task="none",
            base_dir=f"random:{self.geometry}",
            data_dir="none",
            target=None,
            device=DeviceParams(kind=device),
            placement="single",
            precision=self.precision,
            quantization=self.quantization,
            may_quantize=False,
            attn=self.attn,
            gradient_checkpointing=self.checkpointing,
            optimizer=self.optimizer,
            dataloader_workers=0,
            parts=parts,
            lora=lora,
            full_targets={},
            loss="all-tokens",
            max_length=self.max_length,
            images=None,
            schedule=Schedule(
                train_samples=effective_batch,
                effective_batch=effective_batch,
                micro_batch=self.micro_batch,
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


def _recipe(name: Recipe) -> tuple[PartsParams, LoraParams | None]:
    if name == "r2":
        return PartsParams(vision="full", projector="full"), None
    if name == "full":
        return PartsParams(llm="full"), None
    if name == "r4":
        parts = PartsParams(vision="lora", llm="lora")
        return parts, LoraParams(rank=64, alpha=128, dropout=0.1, targets={"vision": _VISION, "llm": _LLM})
    targets = _ATTENTION if name == "attention-lora" else _LLM
    return PartsParams(llm="lora"), LoraParams(rank=64, alpha=128, dropout=0.1, targets={"llm": targets})


def _settings(geometry: str, *rows: dict[str, object]) -> list[Setting]:
    return [Setting(geometry=geometry, **row) for row in rows]  # type: ignore[arg-type]


# The most telling first: a budget may end the run before the last.
ON_CUDA: tuple[Setting, ...] = (
    *_settings(
        "qwen2-vl-7b",
        {"recipe": "r1", "quantization": "nf4", "micro_batch": 2},
        {"recipe": "r2", "micro_batch": 2},
        {"recipe": "r4", "quantization": "nf4", "micro_batch": 2},
        {"recipe": "r1", "micro_batch": 2, "attn": "flash_attention_2"},
    ),
    *_settings(
        "qwen2-vl-2b",
        {"recipe": "r1", "quantization": "nf4", "micro_batch": 2},
        {"recipe": "r1", "checkpointing": False},
        {"recipe": "r1", "precision": "fp16", "micro_batch": 2},
        {"recipe": "r1", "precision": "fp32"},
        {"recipe": "r2", "checkpointing": False, "optimizer": "adamw_torch"},
        {"recipe": "r2", "micro_batch": 2, "optimizer": "adamw_8bit"},
        {"recipe": "r4", "checkpointing": False, "optimizer": "adamw_torch"},
    ),
    *_settings(
        "qwen2.5-7b",
        {"recipe": "full", "optimizer": "adamw_torch"},
        {"recipe": "full"},
        {"recipe": "lora", "micro_batch": 2},
        {"recipe": "lora", "quantization": "nf4", "checkpointing": False},
    ),
    *_settings(
        "qwen1.5-moe-a2.7b",
        {"recipe": "attention-lora"},
        {"recipe": "full"},
    ),
    *_settings(
        "qwen2-vl-7b",
        {"recipe": "r1", "checkpointing": False},
        {"recipe": "r1", "quantization": "nf4", "optimizer": "paged_adamw_8bit"},
        {"recipe": "r2", "optimizer": "paged_adamw_8bit"},
        {"recipe": "r4", "micro_batch": 2},
        {"recipe": "r1", "quantization": "nf4", "precision": "fp16", "checkpointing": False},
    ),
)

_SMALL: dict[str, object] = {"precision": "fp32", "micro_batch": 2, "max_length": 128, "optimizer": "adamw_torch"}

ON_CPU: tuple[Setting, ...] = (
    *_settings(
        "qwen2-vl-tiny",
        {**_SMALL, "recipe": "r1", "max_pixels": 224 * 224, "checkpointing": False},
        {**_SMALL, "recipe": "r2", "max_pixels": 224 * 224},
    ),
    *_settings("qwen1.5-moe-tiny", {**_SMALL, "recipe": "full"}),
)


def settings_for(device: Literal["cpu", "cuda"], *, paged: bool) -> tuple[Setting, ...]:
    """paged: with those whose optimizer keeps its state in managed memory, which not every machine allows."""
    settings = ON_CUDA if device == "cuda" else ON_CPU
    return tuple(setting for setting in settings if paged or not setting.optimizer.startswith("paged_"))


def setting_named(name: str) -> Setting:
    return next(setting for setting in (*ON_CUDA, *ON_CPU) if setting.name == name)
