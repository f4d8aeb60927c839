"""Model families, a module each, named after the `model_type` of a config.json; docs/extending.md has a table of them.

A module says what the rest of the code cannot read from a model's own files. No other place knows a family by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Literal

from stages.core.documents import shown
from stages.core.errors import UserError

PAGE = "docs/extending.md#a-model-family"
"""Describes how to add a family."""

LLM_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a language model, as Llama and most families after it name them."""

PROMPT_OPTIONS = {"enable_thinking": False, "date_string": "26 Jul 2024"}
"""Options that some chat templates have: an answer without thinking aloud (Qwen3), and a date that is not today's (that
of Llama 3.2's writes today's otherwise; this one is what Llama 3.1's writes)."""


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """How a family writes boxes."""

    form: Literal["grounding", "json"]
    """`(x0,y0),(x1,y1)` between special tokens, or a JSON list of `bbox_2d` and `label`. x comes before y in both."""
    steps: int | None
    """Steps on either side of the picture; None where a step is a pixel of the resized picture."""


@dataclass(frozen=True, kw_only=True)
class Vision:
    """A family's way with pictures."""

    tower: str
    """Its modules, as a regular expression over the beginning of their full names."""
    projector: str
    """Likewise; wins over `tower`."""
    linears: tuple[str, ...]
    """Ends of the names of the tower's linear layers: `all-linear` of lora.targets.vision."""
    tokens: tuple[str, ...]
    """Special tokens that stand for pictures; they never count in a loss."""
    video_processor: str
    """transformers' class. A saved processor names it, and transformers does not tell without torchvision."""
    boxes: Boxes | None
    same_from_features: bool
    """Whether a test shows that features which a frozen tower was asked for once train alike (training/features.py)."""


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    """As its makers write it."""
    vision: Vision | None = None
    linears: tuple[str, ...] = LLM_LINEARS
    """Ends of the names of the language model's linear layers: `all-linear` of lora.targets.llm."""
    answer_marks: Mapping[str, str] = field(default_factory=dict)
    """Parts of its chat template, and the same as they have to be for it to mark answers by `{% generation %}`; for a
    template that has all of these parts. TRL's marks are for the others."""
    overflows_in_fp16: bool = False
    """Whether what its layers compute may leave the range of fp16."""
    same_without_padding: bool
    """Whether a test shows that rows without padding give the same loss and gradients, part by part."""
    same_with_fused_kernels: bool
    """Likewise, Liger's kernels."""


@cache
def family_names() -> tuple[str, ...]:
    """The model_type of every family there is."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py")))


def family_of(model_type: str) -> Family:
    """Raises UserError for a model_type that no module is named after."""
    if model_type not in family_names():
        raise UserError(
            f"no model family is called {shown(model_type)} (model_type of config.json); there are: "
            f"{', '.join(family_names())}; {PAGE} says how to add one"
        )
    family: Family = import_module(f"{__name__}.{model_type}").FAMILY
    return family


def all_families() -> dict[str, Family]:
    """By model_type."""
    return {name: family_of(name) for name in family_names()}


def vision_tokens() -> list[str]:
    """Tokens that stand for pictures in any family: nothing to learn in predicting them."""
    return sorted({token for family in all_families().values() if family.vision for token in family.vision.tokens})


def require_precision(model_type: str, precision: str) -> None:
    """Raises UserError where models of this family give no numbers in it. precision: of params.yaml."""
    family = family_of(model_type)
    if precision == "fp16" and family.overflows_in_fp16:
        raise UserError(f"{family.name} overflows in fp16: set memory.precision of the profile to bf16 or fp32")


def require_text(model_type: str, task: str) -> None:
    """Raises UserError unless models of this family take text alone. task: named in the message."""
    if family_of(model_type).vision is not None:
        texts = [name for name, family in all_families().items() if family.vision is None]
        raise UserError(f"{task} trains text models of {', '.join(texts)}; the base is a {model_type}")
