"""The pieces of work that are measured, in order of worth, each by a process of its own. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal

from stages.core.params.schema import Attention, Optimizer
from tools.gpu.device import Kind

Step = Literal["facts", "recipes", "predictions", "trainings", "answers"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    step: Step
    name: str
    task: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of the step's job (child.py), as JSON."""
    needs: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Further arguments, by name: keys of pieces whose data they are."""

    @property
    def key(self) -> str:
        return f"{self.step}: {self.name}"

    @property
    def is_alone(self) -> bool:
        """Whether it needs the device for itself: all that is timed, and the launcher, which leases it. The others are
        tiny trainings, of which a GPU takes several, and predictions, which see none."""
        return self.step not in ("recipes", "predictions") or bool(self.task.get("launched"))


FACTS = Piece(step="facts", name="device")


def catalogue(
    device: Kind, facts: Mapping[str, Any] | None, *, paged: bool = False, flash: bool | None = None
) -> list[Piece]:
    """All pieces. A piece comes after those that it needs.

    facts: result of the first piece, if there is one. paged: with trainings whose optimizer uses managed memory, which
    not every machine allows. flash: with those of flash-attn; None: where it is installed.
    """
    flash = find_spec("flash_attn") is not None if flash is None else flash
    # From compute capability 8.0 on in hardware.
    has_bf16 = device == "cpu" or facts is None or tuple(facts["capability"]) >= (8, 0)
    precision: Any = {} if has_bf16 else {"precision": "fp16"}
    settings = [
        replace(setting, **precision if setting.precision == "bf16" else {})
        for setting in SETTINGS[device]
        if (paged or not setting.optimizer.startswith("paged_")) and (flash or setting.attn != "flash_attention_2")
    ]
    tasks = {setting.name: {"setting": asdict(setting)} for setting in settings}
    answers = {f"{task['geometry']} x{task['batch_size']}": {**task, **precision} for task in ANSWERS[device]}
    return [
        FACTS,
        *_recipes(device, has_bf16=has_bf16),
        *(Piece(step="predictions", name=name, task=task, needs={"facts": FACTS.key}) for name, task in tasks.items()),
        *(
            Piece(step="trainings", name=name, task=task, needs={"prediction": f"predictions: {name}"})
            for name, task in tasks.items()
        ),
        *(Piece(step="answers", name=name, task=task, needs={"facts": FACTS.key}) for name, task in answers.items()),
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

VARIANTS: dict[str, dict[str, Any]] = {
    "nf4": {"precision": "bf16", "quantization": None},
    "bf16": {"precision": "bf16", "quantization": "none"},
    "fp16": {"precision": "fp16", "quantization": None},
}
"""By name, settings of profiles.tiny.memory. nf4 is for the recipes that ask for it."""

TARGETS = {
    "r1": "r1-llm-only",
    "r2": "r2-vision-only",
    "r3": "r3-two-stage",
    "r4": "r4-joint",
    "AMR": "amr-baseline",
    "mixture": "moe-finetune",
}
"""Recipes that go all the way, with all that they start from: r3's first stage, the mixture's experts and gates."""

QUANTIZED = ("r1", "r3", "r4")
REPEATED = (("r1", "nf4"), ("r2", "bf16"), ("r1", "fp16"), ("AMR", "bf16"), ("mixture", "bf16"))
"""Recipes in variants whose own training is also repeated, killed and starved of memory."""


def _recipes(device: Kind, *, has_bf16: bool) -> Iterator[Piece]:
    variants = [name for name, memory in VARIANTS.items() if has_bf16 or memory["precision"] != "bf16"]
    for variant in variants:
        for name, recipe in TARGETS.items():
            if variant == "nf4" and name not in QUANTIZED:
                continue
            optimizer = "adamw_8bit" if (name, variant) == ("r1", "fp16") else "adamw_torch_fused"
            memory = {
                **VARIANTS[variant],
                "attn": "auto",
                "optimizer": optimizer if device == "cuda" else "adamw_torch",
            }
            task = {
                "recipe": recipe,
                "memory": memory,
                # One of them as `dvc repro` would start it: launcher, lease of the GPU, provenance.
                "launched": (name, variant) == ("r1", variants[0]),
                "repeated": (name, variant) in REPEATED,
            }
            yield Piece(step="recipes", name=f"{name} {variant}", task=task)


# --- Trainings of random weights in the known geometries, at full width on a GPU

Recipe = Literal["r1", "r2", "r4", "lora", "full"]
"""r1, r2 and r4 of params.yaml; for a text model: LoRA, all weights."""


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
    fused_kernels: bool = True
    padding_free: bool = True
    """Both where a GPU's profile has it so (planning/plan.py)."""
    features: bool = False
    """Whether features of pictures are kept, and computed by no step."""
    max_length: int = 2048
    max_pixels: int = 1003520

    @property
    def name(self) -> str:
        """The word for each field that is not as usual, e.g. "qwen2-vl-7b r1 nf4 bf16 x2 of 2,048"."""
        words = (
            *(self.geometry, self.recipe, self.quantization, self.precision),
            *(f"x{self.micro_batch} of {self.max_length:,}", self.optimizer, self.attn),
            "" if self.checkpointing else "not checkpointed",
            "" if self.fused_kernels else "torch's kernels",
            "" if self.padding_free else "padded",
            "from features" if self.features else "",
        )
        return " ".join(word for word in words if word not in ("", "none", "adamw_torch_fused", "sdpa"))


_NF4: Any = {"quantization": "nf4"}
_TINY: Any = {"optimizer": "adamw_torch", "micro_batch": 2, "max_length": 96, "max_pixels": 112 * 112}

# The most telling first: a budget may end the run before the last.
SETTINGS: dict[Kind, tuple[Setting, ...]] = {
    "cuda": (
        Setting("qwen2-vl-7b", "r1", **_NF4, micro_batch=2),
        Setting("qwen2-vl-7b", "r2", micro_batch=2),
        Setting("qwen2-vl-7b", "r4", **_NF4, micro_batch=2),
        Setting("qwen2-vl-7b", "r1", **_NF4, micro_batch=2, features=True),
        Setting("qwen2-vl-7b", "r1", **_NF4, micro_batch=2, fused_kernels=False),
        Setting("qwen2-vl-7b", "r1", micro_batch=2, attn="flash_attention_2"),
        # A picture of 1 MP is 1,280 tokens; question and answer have some hundred more.
        Setting("qwen2-vl-2b", "r1", **_NF4, micro_batch=4, max_length=1408),
        Setting("qwen2-vl-2b", "r1", checkpointing=False),
        Setting("qwen2-vl-2b", "r1", precision="fp16", micro_batch=2),
        Setting("qwen2-vl-2b", "r1", precision="fp32"),
        Setting("qwen2-vl-2b", "r2", checkpointing=False, optimizer="adamw_torch"),
        Setting("qwen2-vl-2b", "r2", micro_batch=4, max_length=1408, optimizer="adamw_8bit"),
        Setting("qwen2-vl-2b", "r4", checkpointing=False, optimizer="adamw_torch"),
        Setting("qwen2.5-7b", "full", optimizer="adamw_torch"),
        Setting("qwen2.5-7b", "full"),
        # The same sentences one at a time and eight at once: how much of a step is launches.
        Setting("qwen2.5-7b", "lora", micro_batch=8, max_length=256),
        Setting("qwen2.5-7b", "lora", micro_batch=1, max_length=256),
        # As others publish it: full sequences of 4,096 tokens.
        Setting("qwen2.5-7b", "lora", micro_batch=2, max_length=4096),
        Setting("qwen2.5-7b", "lora", micro_batch=2, max_length=4096, fused_kernels=False),
        Setting("qwen2.5-7b", "lora", **_NF4, checkpointing=False),
        Setting("qwen1.5-moe-a2.7b", "lora"),
        Setting("qwen1.5-moe-a2.7b", "full"),
        Setting("qwen2-1.5b-x2", "full", micro_batch=8, max_length=512),
        Setting("qwen2-1.5b-x2", "full", micro_batch=1, max_length=512),
        Setting("qwen2-vl-7b", "r1", micro_batch=4, max_length=1408),
        Setting("qwen2-vl-7b", "r1", checkpointing=False),
        Setting("qwen2-vl-7b", "r1", **_NF4, optimizer="paged_adamw_8bit"),
        Setting("qwen2-vl-7b", "r2", optimizer="paged_adamw_8bit"),
        Setting("qwen2-vl-7b", "r4", micro_batch=2),
        Setting("qwen2-vl-7b", "r1", **_NF4, precision="fp16", checkpointing=False),
    ),
    "cpu": (
        Setting("qwen1.5-moe-tiny", "full", **_TINY, precision="fp32"),
        Setting("qwen2-vl-tiny", "r1", **_TINY, **_NF4),
        Setting("qwen2-vl-tiny", "r1", **_TINY, **_NF4, features=True),
        Setting("qwen2-vl-tiny", "r2", **_TINY, precision="fp32", checkpointing=False),
        Setting("qwen2-vl-tiny", "r4", **_TINY),
        Setting("qwen2.5-tiny", "lora", **_TINY),
    ),
}
"""Trainings whose memory is predicted and measured, and which are timed."""

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
