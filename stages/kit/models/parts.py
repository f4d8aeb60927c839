"""The parts of a model that a recipe freezes or trains: vision tower, projector, language model.

Works on real and on meta-device models alike, with or without adapters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.core.params.schema import PARTS, LoraParams, Part, PartsParams
from stages.kit.families import all_families, family_of

ALL_LINEAR = "all-linear"
"""In lora.targets: the linear layers of the part, by whichever names the base's family has for them."""


@cache
def _places() -> tuple[tuple[Part, re.Pattern[str]], ...]:
    """Projectors and then vision towers of all families; the rest of a model is its language model.

    No family's language model has the names of another's vision tower.
    """
    visions = [family.vision for family in all_families().values() if family.vision]
    places: list[tuple[Part, str]] = [("projector", vision.projector) for vision in visions]
    places += [("vision", vision.tower) for vision in visions]
    return tuple((part, re.compile(where)) for part, where in dict.fromkeys(places))


@dataclass(frozen=True, kw_only=True)
class TrainableCounts:
    vision: int
    projector: int
    llm: int
    total: int
    """Trainable parameters of all parts."""
    all: int
    """Parameters of the model with its adapters, trainable or not."""

    def __str__(self) -> str:
        by_part = ", ".join(f"{part} {getattr(self, part):,}" for part in PARTS)
        return f"trainable={self.total:,} of {self.all:,} ({by_part})"


def part_of(name: str) -> Part:
    """The part that a parameter or module belongs to, by its full name, PEFT's prefixes and infixes allowed."""
    name = plain_name(name)
    return next((part for part, where in _places() if where.match(name)), "llm")


def plain_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def is_idle(model: nn.Module, name: str) -> bool:
    """Whether a parameter or module belongs to the shared expert of a mixture that was built here: all zero, so that it
    adds nothing and no gradient ever reaches it (kit/mixture/merge.py)."""
    config = getattr(model, "config", None)
    return getattr(config, "neutral_shared_expert", False) and ".mlp.shared_expert" in name


def apply_recipe(
    model: PreTrainedModel,
    parts: PartsParams,
    lora: LoraParams | None,
    full_targets: Mapping[Part, Sequence[str]] | None = None,
) -> PreTrainedModel | PeftModel:
    """Freeze and unfreeze by part, attach LoRA adapters where asked, keep trained weights in fp32.

    full_targets: of parts trained in full, ends of the names of modules that alone are trained.
    Returns the model itself, or a PeftModel around it. Raises UserError where the model lacks a part or a target.
    """
    present = {part_of(name) for name, _ in model.named_parameters()}
    for part in parts.trained():
        if part not in present:
            raise UserError(f"parts.{part} is to be trained, but {type(model).__name__} has no {part}")
    full = _full_parameters(model, parts, full_targets or {})
    model.requires_grad_(False)
    adapted: PreTrainedModel | PeftModel = model
    if parts.trained("lora"):
        assert lora is not None
        is_meta = any(parameter.is_meta for parameter in model.parameters())
        adapted = get_peft_model(model, lora_config(model, lora), low_cpu_mem_usage=is_meta)
    for name, parameter in adapted.named_parameters():
        if plain_name(name) in full:
            parameter.requires_grad_(True)
        if parameter.requires_grad:
            # fp16 needs fp32 weights under GradScaler, and small updates to bf16 weights are lost to rounding.
            parameter.data = parameter.data.to(torch.float32)
    return adapted


def _full_parameters(
    model: PreTrainedModel, parts: PartsParams, full_targets: Mapping[Part, Sequence[str]]
) -> set[str]:
    """Names of the parameters that are trained in full. Raises UserError for a target without any."""
    found: set[str] = set()
    for part in parts.trained("full"):
        names = [name for name, _ in model.named_parameters() if part_of(name) == part and not is_idle(model, name)]
        targets = full_targets.get(part)
        if targets is None:
            found.update(names)
            continue
        for target in targets:
            # A module's parameters and those of the modules within it.
            chosen = [name for name in names if f".{target}." in f".{name}"]
            if not chosen:
                endings = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in names})
                raise UserError(
                    f"full_targets.{part}: {target!r} names no module with weights; the {part}'s end in "
                    f"{', '.join(endings)}"
                )
            found.update(chosen)
    return found


def lora_config(model: PreTrainedModel, lora: LoraParams) -> LoraConfig:
    """PEFT's configuration, whose targets are what the recipe names and nothing else.

    Raises UserError for a target that matches no linear layer of its part.
    """
    linears = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and not is_idle(model, name)
    ]
    targets = {part: _named(model, part, suffixes) for part, suffixes in lora.targets.items()}
    for part, suffixes in targets.items():
        for suffix in suffixes:
            if not any(part_of(name) == part and _ends_with(name, suffix) for name in linears):
                endings = sorted({name.rsplit(".", 1)[-1] for name in linears if part_of(name) == part})
                raise UserError(
                    f"lora.targets.{part}: {suffix!r} names no linear layer; the {part}'s end in {', '.join(endings)}; "
                    f"{ALL_LINEAR} names those of any family"
                )
    names = [name for name in linears if any(_ends_with(name, suffix) for suffix in targets.get(part_of(name), ()))]
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=names,
    )


def _named(model: PreTrainedModel, part: Part, suffixes: Sequence[str]) -> Sequence[str]:
    """ALL_LINEAR as the names that the model's family has."""
    if ALL_LINEAR not in suffixes:
        return suffixes
    family = family_of(model.config.model_type)
    linears = {"llm": family.linears, "vision": family.vision.linears if family.vision else ()}.get(part, ())
    if not linears:
        raise UserError(f"lora.targets.{part}: {ALL_LINEAR} is known of vision tower and llm alone; name the layers")
    return linears


def count_trainable(model: nn.Module) -> TrainableCounts:
    counts = dict.fromkeys(PARTS, 0)
    everything = 0
    for name, parameter in model.named_parameters():
        packed = getattr(parameter, "quant_state", None)  # bitsandbytes packs two 4-bit weights in a byte
        size = parameter.numel() if packed is None else int(torch.Size(packed.shape).numel())
        everything += size
        if parameter.requires_grad:
            counts[part_of(name)] += size
    return TrainableCounts(**counts, total=sum(counts.values()), all=everything)


def trained_modules(model: nn.Module) -> set[str]:
    """Plain names of the modules whose weights a recipe changes."""
    return {
        re.sub(r"\.lora_.*$", "", plain_name(name)) if ".lora_" in name else plain_name(name).rpartition(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _ends_with(name: str, suffix: str) -> bool:
    """Whole dotted components only: `attn.proj` ends `blocks.0.attn.proj`, `proj` does not end `o_proj`."""
    return name == suffix or name.endswith(f".{suffix}")
