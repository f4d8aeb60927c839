"""The pieces of work that are measured, in order of worth, each by a process of its own. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal

from stages.core.params.schema import Attention, Optimizer
from tools.gpu.device import Kind

Step = Literal["facts", "recipes", "repeats", "predictions", "memory", "speed", "answers"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    step: Step
    name: str
    task: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the step's job (child.py), as JSON."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Further arguments, by name: keys of pieces whose data they are."""

    @property
    def key(self) -> str:
        return f"{self.step}: {self.name}"

    @property
    def is_alone(self) -> bool:
        """Whether it needs the device for itself: all that is timed, and the launcher, which leases it. The others are
        tiny trainings, of which a GPU takes several, and predictions, which see none."""
        return self.step not in ("recipes", "repeats", "predictions") or bool(self.task.get("launched"))


FACTS = Piece(step="facts", name="device")


def catalogue(
    device: Kind, facts: Mapping[str, Any] | None, *, paged: bool = False, flash: bool | None = None
) -> list[Piece]:
    """All pieces. A piece comes after those that it needs.

    facts: result of the first piece, if there is one. paged: with memory settings whose optimizer uses managed memory,
    which not every machine allows. flash: with those of flash-attn; None: where it is installed.
    """
    flash = find_spec("flash_attn") is not None if flash is None else flash
    has_bf16 = facts is None or facts["has_bf16"]
    memory = {
        setting.name: {"setting": asdict(setting)}
        for setting in _settings(MEMORY[device], has_bf16=has_bf16)
        if (paged or not setting.optimizer.startswith("paged_")) and (flash or setting.attn != "flash_attention_2")
    }
    speed = {setting.name: {"setting": asdict(setting)} for setting in _settings(SPEED[device], has_bf16=has_bf16)}
    answers = {
        f"{task['geometry']} x{task['batch_size']}": {**task, "precision": "bf16" if has_bf16 else "fp16"}
        for task in ANSWERS[device]
    }
    return [
        FACTS,
        *_recipes(device, has_bf16=has_bf16),
        *_repeats(device, has_bf16=has_bf16),
        *(Piece(step="predictions", name=name, task=task, needs={"facts": FACTS.key}) for name, task in memory.items()),
        *(
            Piece(step="memory", name=name, task=task, needs={"prediction": f"predictions: {name}"})
            for name, task in memory.items()
        ),
        *(Piece(step="speed", name=name, task=task) for name, task in speed.items()),
        *(Piece(step="answers", name=name, task=task) for name, task in answers.items()),
    ]


def chosen(pieces: Sequence[Piece], parts: Sequence[str]) -> list[Piece]:
    """Pieces whose keys contain one of the parts, and those that they need; all of them where there are no parts."""
    found: list[Piece] = []
    for piece in reversed(pieces):
        needed = any(piece.key in other.needs.values() for other in found)
        if needed or not parts or any(part in piece.key for part in parts):
            found.append(piece)
    return found[::-1]


# --- Recipes at tiny size, through the stages

VARIANTS: dict[str, dict[str, str]] = {
    "nf4": {"precision": "bf16", "quantization": "as-recipe"},
    "bf16": {"precision": "bf16", "quantization": "none"},
    "fp16": {"precision": "fp16", "quantization": "as-recipe"},
}
"""By name, settings of profiles.tiny.memory. nf4 is for the recipes that ask for it."""

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

MIXTURE_BASE = {"recipes.moe-finetune.base": "bases/dense", "profiles.tiny.bases.dense": "random:qwen1.5-moe-tiny"}
"""Settings that make the last training of the mixture start from a mixture that nobody has to build."""

REPEATED: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("r1 nf4", "r1-llm-only", "nf4", {}),
    ("r2 bf16", "r2-vision-only", "bf16", {}),
    ("r1 fp16, 8-bit optimizer", "r1-llm-only", "fp16", {"profiles.tiny.memory.optimizer": "adamw_8bit"}),
    ("AMR bf16", "amr-baseline", "bf16", {}),
    ("mixture bf16", "moe-finetune", "bf16", MIXTURE_BASE),
)
"""Name, recipe, variant, further settings."""


def _recipes(device: Kind, *, has_bf16: bool) -> Iterator[Piece]:
    variants = _variants(has_bf16=has_bf16)
    for variant in variants:
        for name, recipe in TARGETS.items():
            if variant != "nf4" or name in QUANTIZED:
                # One of them as `dvc repro` would start it: launcher, lease of the GPU, provenance.
                launched = (name, variant) == ("r1", variants[0])
                task = {"recipe": recipe, "params": _params(variant, device), "launched": launched}
                yield Piece(step="recipes", name=f"{name} {variant}", task=task)


def _repeats(device: Kind, *, has_bf16: bool) -> Iterator[Piece]:
    variants = _variants(has_bf16=has_bf16)
    for name, recipe, variant, more in REPEATED:
        if variant in variants:
            task = {"recipe": recipe, "params": _params(variant, device, **more), "exhausted": False}
            yield Piece(step="repeats", name=name, task=task)
    task = {"recipe": "r2-vision-only", "params": _params(variants[-1], device), "exhausted": True}
    yield Piece(step="repeats", name="end of memory", task=task)


def _variants(*, has_bf16: bool) -> list[str]:
    return [name for name, memory in VARIANTS.items() if has_bf16 or memory["precision"] != "bf16"]


def _params(variant: str, device: Kind, **more: str) -> dict[str, str]:
    """Settings of params.yaml, by dotted path."""
    on_cpu = device == "cpu"
    memory = {**VARIANTS[variant], "attn": "auto", "optimizer": "adamw_torch" if on_cpu else "adamw_torch_fused"}
    return {
        **{f"profiles.tiny.memory.{name}": value for name, value in memory.items()},
        **{path: value for path, value in more.items() if not (on_cpu and "8bit" in value)},
    }


# --- Trainings of random weights in the known geometries, at full width on a GPU

Recipe = Literal["r1", "r2", "r4", "lora", "full", "attention-lora"]
"""r1, r2 and r4 of params.yaml; for a text model: LoRA, all weights, LoRA beside experts."""


@dataclass(frozen=True)
class Setting:
    """A training. Written out here, not read from params.yaml: measurements stay comparable whatever a person tries
    there. The limits are those of the shipped one."""

    geometry: str
    recipe: Recipe
    _: KW_ONLY
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
        """The word for each field that is not as usual, e.g. "qwen2-vl-7b r1 nf4 bf16 x2 of 2,048"."""
        words = (
            *(self.geometry, self.recipe, self.quantization, self.precision),
            *(f"x{self.micro_batch} of {self.max_length:,}", self.optimizer, self.attn),
            "" if self.checkpointing else "not checkpointed",
        )
        return " ".join(word for word in words if word not in ("", "none", "adamw_torch_fused", "sdpa", "auto"))


def _settings(settings: Sequence[Setting], *, has_bf16: bool) -> list[Setting]:
    """Without bf16 in fp16, each once."""
    if has_bf16:
        return list(settings)
    in_fp16 = (replace(each, precision="fp16") if each.precision == "bf16" else each for each in settings)
    return list(dict.fromkeys(in_fp16))


_NF4: Any = {"quantization": "nf4"}
_TINY: Any = {"optimizer": "adamw_torch", "micro_batch": 2}
_TINY_MEMORY = {**_TINY, "precision": "fp32", "max_length": 128, "max_pixels": 224 * 224}

# The most telling first: a budget may end the run before the last.
MEMORY: dict[Kind, tuple[Setting, ...]] = {
    "cuda": (
        Setting("qwen2-vl-7b", "r1", **_NF4, micro_batch=2),
        Setting("qwen2-vl-7b", "r2", micro_batch=2),
        Setting("qwen2-vl-7b", "r4", **_NF4, micro_batch=2),
        Setting("qwen2-vl-7b", "r1", micro_batch=2, attn="flash_attention_2"),
        Setting("qwen2-vl-2b", "r1", **_NF4, micro_batch=2),
        Setting("qwen2-vl-2b", "r1", checkpointing=False),
        Setting("qwen2-vl-2b", "r1", precision="fp16", micro_batch=2),
        Setting("qwen2-vl-2b", "r1", precision="fp32"),
        Setting("qwen2-vl-2b", "r2", checkpointing=False, optimizer="adamw_torch"),
        Setting("qwen2-vl-2b", "r2", micro_batch=2, optimizer="adamw_8bit"),
        Setting("qwen2-vl-2b", "r4", checkpointing=False, optimizer="adamw_torch"),
        Setting("qwen2.5-7b", "full", optimizer="adamw_torch"),
        Setting("qwen2.5-7b", "full"),
        Setting("qwen2.5-7b", "lora", micro_batch=2),
        Setting("qwen2.5-7b", "lora", **_NF4, checkpointing=False),
        Setting("qwen1.5-moe-a2.7b", "attention-lora"),
        Setting("qwen1.5-moe-a2.7b", "full"),
        Setting("qwen2-vl-7b", "r1", checkpointing=False),
        Setting("qwen2-vl-7b", "r1", **_NF4, optimizer="paged_adamw_8bit"),
        Setting("qwen2-vl-7b", "r2", optimizer="paged_adamw_8bit"),
        Setting("qwen2-vl-7b", "r4", micro_batch=2),
        Setting("qwen2-vl-7b", "r1", **_NF4, precision="fp16", checkpointing=False),
    ),
    "cpu": (
        Setting("qwen1.5-moe-tiny", "full", **_TINY_MEMORY),
        Setting("qwen2-vl-tiny", "r1", **_TINY_MEMORY, checkpointing=False),
        Setting("qwen2-vl-tiny", "r2", **_TINY_MEMORY),
    ),
}
"""Trainings whose memory is predicted and measured."""

_FASTEST: Any = {"attn": "auto"}
# A picture of 1 MP is 1,280 tokens; question and answer have some hundred more.
_VLM: Any = {**_FASTEST, "max_length": 1408, "micro_batch": 4}
_TINY_SPEED = {**_TINY, **_FASTEST, "max_length": 96, "max_pixels": 112 * 112}

SPEED: dict[Kind, tuple[Setting, ...]] = {
    "cuda": (
        Setting("qwen2-vl-2b", "r1", **_VLM, **_NF4),
        Setting("qwen2-vl-2b", "r2", **_VLM),
        Setting("qwen2-vl-2b", "r4", **_VLM, **_NF4),
        Setting("qwen2-vl-7b", "r1", **_VLM, **_NF4),
        Setting("qwen2-vl-7b", "r2", **_VLM),
        Setting("qwen2-vl-7b", "r4", **_VLM, **_NF4),
        # The same sentences one at a time and eight at once: how much of a step is launches.
        Setting("qwen2.5-7b", "lora", **_FASTEST, max_length=256, micro_batch=8),
        Setting("qwen2.5-7b", "lora", **_FASTEST, max_length=256, micro_batch=1),
        # As others publish it: full sequences of 4,096 tokens.
        Setting("qwen2.5-7b", "lora", **_FASTEST, max_length=4096, micro_batch=2),
        Setting("qwen2-1.5b-x2", "full", **_FASTEST, max_length=512, micro_batch=8),
        Setting("qwen2-1.5b-x2", "full", **_FASTEST, max_length=512, micro_batch=1),
        Setting("qwen2-vl-7b", "r1", **_VLM),
        Setting("qwen2-vl-7b", "r1", **_VLM, **_NF4, checkpointing=False),
    ),
    "cpu": (
        Setting("qwen2-vl-tiny", "r1", **_TINY_SPEED, **_NF4),
        Setting("qwen2-vl-tiny", "r2", **_TINY_SPEED, checkpointing=False),
        Setting("qwen2-vl-tiny", "r4", **_TINY_SPEED),
        Setting("qwen2.5-tiny", "lora", **_TINY_SPEED),
        Setting("qwen1.5-moe-tiny", "full", **_TINY_SPEED),
    ),
}
"""Trainings that are timed, with the fastest attention that there is, as profiles have it."""

ANSWERS: dict[Kind, tuple[dict[str, Any], ...]] = {
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
"""Batches of answers that are timed."""
