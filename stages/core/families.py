"""Model families by the `model_type` of a config.json, as data; docs/extending.md has a table of them.

An entry holds what the rest of the code cannot read from a model's own files. No other module knows a family by name.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Literal

from stages.core.errors import UserError

log = logging.getLogger(__name__)

PAGE = "docs/extending.md#a-model-family"
"""Lists families, and describes how to add one."""


TOWER = re.compile(r"model\.(visual|(vision|audio)_\w+)\.")
"""Matches the beginning of the full names of a vision or audio tower's modules, in models with an entry or without.
Those without are trained as text models, so these parts stay frozen; no family's language model has a tower's names."""
PROJECTOR = re.compile(
    r"model\.(visual\.(merger|deepstack_merger_list)|multi_modal_projector|connector|embed_vision|embed_audio|aligner)\."
)
"""Matches those of the projector, which wins over TOWER."""
VISION_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_end|>", "<|vision_pad|>", "<|vision_start|>")
"""Special tokens that stand for images: nothing to learn in predicting them."""


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """Format of a family's boxes."""

    form: Literal["grounding", "json"]
    """`(x0,y0),(x1,y1)` between special tokens, or a JSON list of `bbox_2d` and `label`. x comes before y in both."""
    steps: int | None
    """Steps along either side of the image; None if a step is a pixel of the resized image."""


@dataclass(frozen=True, kw_only=True)
class Vision:
    """A family's image format."""

    video_processor: str = "Qwen2VLVideoProcessor"
    """transformers' class. A saved processor names it, and transformers cannot look it up without torchvision."""
    boxes: Boxes | None = None
    same_from_features: bool = False
    """Whether a test shows that cached features of a frozen tower train alike (training/features.py)."""


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    """Name in its makers' spelling."""
    vision: Vision | None = None
    overflows_in_fp16: Literal["never seen", "sometimes", "always"] = "never seen"
    """Whether its activations leave the range of fp16: sometimes is a warning, always is refused."""
    same_without_padding: bool = False
    """Whether a test shows that rows without padding give the same loss and gradients, part by part."""
    fused_like: str | None = None
    """model_type in Liger's list with the layers of its language model; None until a test shows that Liger's kernels
    give the same loss and gradients (tests/models/interpreted.py)."""


FAMILIES = {
    "gemma3_text": Family(
        name="Gemma 3, text",
        overflows_in_fp16="always",  # its residual stream (transformers#36822)
        # not same_without_padding: layers with sliding attention
        fused_like="gemma3_text",
    ),
    "llama": Family(
        name="Llama 3, 3.1, 3.2, 3.3",
        same_without_padding=True,
        fused_like="llama",
    ),
    "phi3": Family(
        name="Phi-3, Phi-3.5",
        same_without_padding=True,
        fused_like="phi3",
    ),
    "qwen2": Family(
        name="Qwen2, Qwen2.5",
        overflows_in_fp16="sometimes",  # the 7B without fused attention (QwenLM/Qwen3#868, #761, #670)
        same_without_padding=True,
        fused_like="qwen2",
    ),
    "qwen2_5_vl": Family(
        name="Qwen2.5-VL",
        vision=Vision(
            boxes=Boxes(form="json", steps=None),  # its model card's grounding examples
        ),
        same_without_padding=True,
        fused_like="qwen2",
    ),
    "qwen2_moe": Family(
        name="Qwen1.5-MoE, Qwen2-MoE",  # and the mixtures that are built here
        same_without_padding=True,
        fused_like="qwen2",
    ),
    "qwen2_vl": Family(
        name="Qwen2-VL",
        vision=Vision(
            boxes=Boxes(form="grounding", steps=1000),
            same_from_features=True,
        ),
        overflows_in_fp16="sometimes",  # its language model is Qwen2
        same_without_padding=True,
        fused_like="qwen2",
    ),
    "qwen3": Family(
        name="Qwen3",
        same_without_padding=True,
        fused_like="qwen3",
    ),
    "qwen3_vl": Family(
        name="Qwen3-VL",
        vision=Vision(
            video_processor="Qwen3VLVideoProcessor",
            boxes=Boxes(form="json", steps=1000),  # its model card's grounding examples
        ),
        same_without_padding=True,
        fused_like="qwen3",
    ),
}
"""Every family by its model_type."""


def family_of(model_type: str) -> Family:
    """The entry of a model_type; for any other, an entry that promises nothing: a text model, trained by its own
    modules, padded, by torch's kernels."""
    return FAMILIES.get(model_type) or Family(name=model_type)


def unlisted_words(model_type: str) -> str | None:
    """The line of a plan on a base without an entry; None for a base that has one."""
    if model_type in FAMILIES:
        return None
    return (
        f"{model_type} is not among the families: it is trained as a text model by its own modules, in padded rows, by "
        "torch's kernels; docs/extending.md#other-architectures lists what was tried"
    )


def require_precision(model_type: str, precision: str) -> None:
    """Raises UserError if models of this family overflow in it, and warns if some do, or if no one has tried.

    precision: of params.yaml.
    """
    family = family_of(model_type)
    if precision == "fp16" and model_type not in FAMILIES:
        log.warning("whether %s overflows in fp16 was not tried: see skipped_steps in training.json", model_type)
    if precision != "fp16" or family.overflows_in_fp16 == "never seen":
        return
    problem = f"{family.name} {family.overflows_in_fp16} overflows in fp16"
    if family.overflows_in_fp16 == "always":
        raise UserError(f"{problem}: set memory.precision of the profile to bf16 or fp32")
    log.warning("%s: take bf16 where the GPU has it, else see skipped_steps in training.json", problem)


def require_text(model_type: str, task: str) -> None:
    """Raises UserError unless models of this family take text alone. task: named in the message."""
    if family_of(model_type).vision is not None:
        raise UserError(f"{task} trains text models; the base, a {model_type}, is trained with images")
