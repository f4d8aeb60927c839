"""The pieces of work that are measured, in order of worth. They do not depend on each other.

Imports nothing heavy: it is also read by whoever only writes the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["cpu", "cuda"]
Step = Literal["facts", "recipes", "repeats", "memory", "speed", "answers"]
STEPS: tuple[Step, ...] = ("facts", "recipes", "repeats", "memory", "speed", "answers")


@dataclass(frozen=True, kw_only=True)
class Device:
    kind: Kind
    name: str
    """As NVIDIA's driver has it, e.g. "NVIDIA H100 80GB HBM3"."""
    uuid: str = ""
    """Value of CUDA_VISIBLE_DEVICES; empty for none."""
    has_bf16: bool = True
    """In hardware: from compute capability 8.0 on."""

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of work, done by a process of its own (child.py)."""

    step: Step
    name: str
    task: dict[str, Any] = field(default_factory=dict)
    """Arguments of the step's job, as JSON."""
    timeout_s: float = 480

    @property
    def key(self) -> str:
        return f"{self.step}: {self.name}"

    @property
    def is_alone(self) -> bool:
        """Whether it needs the device for itself, as whatever is timed, and the launcher, which leases it. The others
        are tiny trainings, of which a GPU takes several."""
        return self.step not in ("recipes", "repeats") or bool(self.task.get("launched"))


# --- Recipes at tiny size, through the stages

VARIANTS: dict[str, dict[str, str]] = {
    "nf4": {"precision": "bf16", "quantization": "as-recipe"},
    "bf16": {"precision": "bf16", "quantization": "none"},
    "fp16": {"precision": "fp16", "quantization": "as-recipe"},
}
"""By name, what profiles.tiny.memory is to be. nf4 is for the recipes that ask for it."""

TARGETS = {
    "r1": "r1-llm-only",
    "r2": "r2-vision-only",
    "r3": "r3-stage2",
    "r4": "r4-joint",
    "AMR": "amr-baseline",
    "mixture": "moe-finetune",
}
"""Recipes that go all the way, with all that they start from: r3's first stage, the mixture's experts and gates."""

QUANTIZED = ("r1", "r3", "r4")

A_MIXTURE = {"recipes.moe-finetune.base": "bases/dense", "profiles.tiny.bases.dense": "random:qwen1.5-moe-tiny"}
"""Settings that make its last training start from a mixture that nobody has to build."""

REPEATED: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("r1 nf4", "r1-llm-only", "nf4", {}),
    ("r2 bf16", "r2-vision-only", "bf16", {}),
    ("r1 fp16, 8-bit optimizer", "r1-llm-only", "fp16", {"profiles.tiny.memory.optimizer": "adamw_8bit"}),
    ("AMR bf16", "amr-baseline", "bf16", {}),
    ("mixture bf16", "moe-finetune", "bf16", A_MIXTURE),
)
"""Name, recipe, variant, further settings."""


def _recipes(device: Device) -> Iterator[Piece]:
    for variant in _variants(device):
        for name, recipe in TARGETS.items():
            if variant != "nf4" or name in QUANTIZED:
                # One of them as `dvc repro` would start it: launcher, lease of the GPU, provenance.
                launched = (name, variant) == ("r1", _variants(device)[0])
                task = {"recipe": recipe, "settings": _settings(variant, device), "launched": launched}
                yield Piece(step="recipes", name=f"{name} {variant}", task=task)


def _repeats(device: Device) -> Iterator[Piece]:
    for name, recipe, variant, more in REPEATED:
        if variant in _variants(device):
            task = {"recipe": recipe, "settings": _settings(variant, device, more), "exhausted": False}
            yield Piece(step="repeats", name=name, task=task)
    task = {"recipe": "r2-vision-only", "settings": _settings(_variants(device)[-1], device), "exhausted": True}
    yield Piece(step="repeats", name="end of memory", task=task)


def _variants(device: Device) -> list[str]:
    return [name for name, memory in VARIANTS.items() if device.has_bf16 or memory["precision"] != "bf16"]


def _settings(variant: str, device: Device, more: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Settings of params.yaml, by dotted path."""
    on_cpu = device.kind == "cpu"
    memory = {
        **VARIANTS[variant],
        "attn": "auto",
        "optimizer": "adamw_torch" if on_cpu else "adamw_torch_fused",
    }
    more = {path: value for path, value in more.items() if not (on_cpu and "8bit" in value)}
    return {f"profiles.tiny.memory.{name}": value for name, value in memory.items()} | dict(more)


# --- Speed, at real size with random weights

_VLM = {"max_length": 1408, "micro_batch": 4}
"""A picture of 1 MP is 1,280 tokens; question and answer have some hundred more."""
_NF4 = {"quantization": "nf4"}

TIMED: dict[Kind, tuple[dict[str, Any], ...]] = {
    "cuda": (
        {"geometry": "qwen2-vl-2b", "recipe": "r1", **_VLM, **_NF4},
        {"geometry": "qwen2-vl-2b", "recipe": "r2", **_VLM},
        {"geometry": "qwen2-vl-2b", "recipe": "r4", **_VLM, **_NF4},
        {"geometry": "qwen2-vl-7b", "recipe": "r1", **_VLM, **_NF4},
        {"geometry": "qwen2-vl-7b", "recipe": "r2", **_VLM},
        {"geometry": "qwen2-vl-7b", "recipe": "r4", **_VLM, **_NF4},
        # The same sentences one at a time and eight at once: how much of a step is launches.
        {"geometry": "qwen2.5-7b", "recipe": "lora", "max_length": 256, "micro_batch": 8},
        {"geometry": "qwen2.5-7b", "recipe": "lora", "max_length": 256, "micro_batch": 1},
        # As others publish it: full sequences of 4,096 tokens.
        {"geometry": "qwen2.5-7b", "recipe": "lora", "max_length": 4096, "micro_batch": 2},
        {"geometry": "qwen2-1.5b-x2", "recipe": "full", "max_length": 512, "micro_batch": 8},
        {"geometry": "qwen2-1.5b-x2", "recipe": "full", "max_length": 512, "micro_batch": 1},
        {"geometry": "qwen2-vl-7b", "recipe": "r1", **_VLM},
        {"geometry": "qwen2-vl-7b", "recipe": "r1", **_VLM, **_NF4, "checkpointing": False},
    ),
    "cpu": tuple(
        {"max_length": 96, "max_pixels": 112 * 112, "micro_batch": 2, "optimizer": "adamw_torch", **setting}
        for setting in (
            {"geometry": "qwen2-vl-tiny", "recipe": "r1", **_NF4},
            {"geometry": "qwen2-vl-tiny", "recipe": "r2", "checkpointing": False},
            {"geometry": "qwen2-vl-tiny", "recipe": "r4"},
            {"geometry": "qwen2.5-tiny", "recipe": "lora"},
            {"geometry": "qwen1.5-moe-tiny", "recipe": "full"},
        )
    ),
}
"""Fields of a Setting (tools/calibrate/settings.py)."""

ANSWERING: dict[Kind, tuple[dict[str, Any], ...]] = {
    "cuda": (
        {"geometry": "qwen2-vl-2b", "batch_size": 16, "prompt": 1344, "new_tokens": 64},
        {"geometry": "qwen2-vl-7b", "batch_size": 16, "prompt": 1344, "new_tokens": 64},
        {"geometry": "qwen2.5-7b", "batch_size": 16, "prompt": 256, "new_tokens": 256},
        {"geometry": "qwen2-1.5b-x2", "batch_size": 16, "prompt": 384, "new_tokens": 128},
    ),
    "cpu": (
        {"geometry": "qwen2-vl-tiny", "batch_size": 2, "prompt": 64, "new_tokens": 4, "max_pixels": 112 * 112},
        {"geometry": "qwen1.5-moe-tiny", "batch_size": 2, "prompt": 16, "new_tokens": 4},
    ),
}


def _speed(device: Device) -> Iterator[Piece]:
    for setting in TIMED[device.kind]:
        words = [setting["geometry"], setting["recipe"], setting.get("quantization", ""), f"x{setting['micro_batch']}"]
        words += [f"of {setting['max_length']:,}", "" if setting.get("checkpointing", True) else "not checkpointed"]
        task = {**setting, "precision": "bf16" if device.has_bf16 else "fp16"}
        yield Piece(step="speed", name=" ".join(filter(None, words)), task=task)


def _answers(device: Device) -> Iterator[Piece]:
    for setting in ANSWERING[device.kind]:
        task = {**setting, "precision": "bf16" if device.has_bf16 else "fp16"}
        yield Piece(step="answers", name=f"{setting['geometry']} x{setting['batch_size']}", task=task)


def catalogue(device: Device, *, paged: bool) -> list[Piece]:
    """All of it, in order of worth. paged: with the calibration's settings that use managed memory."""
    return [
        Piece(step="facts", name="device"),
        *_recipes(device),
        *_repeats(device),
        # It starts nothing after the time left, and has processes of its own, each with a time limit.
        Piece(step="memory", name="calibration", task={"paged": paged}, timeout_s=6 * 3600),
        *_speed(device),
        *_answers(device),
    ]
