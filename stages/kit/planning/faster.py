"""What a plan has computed in a faster way, with the same result: rows without padding, and fused kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stages.kit.families import family_of
from stages.kit.planning.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from stages.core.params.schema import Kernels, MemoryParams, PaddingFree


def made_faster(plan: Plan, memory: MemoryParams, config: PreTrainedConfig) -> tuple[Plan, tuple[str, ...]]:
    """The plan as its profile and its base allow, and what was chosen and why, a line each. config: of the base."""
    padding_free, why_row = without_padding(plan, memory.padding_free, config)
    fused_kernels, why_fused = with_fused_kernels(plan, memory.kernels, config)
    return replace(plan, padding_free=padding_free, fused_kernels=fused_kernels), (
        f"micro-batches are {'without padding' if padding_free else 'padded'}, {why_row}",
        f"norms, gated products and rotations run by {'Liger' if fused_kernels else 'torch'}'s kernels, {why_fused}",
    )


def with_fused_kernels(plan: Plan, wanted: Kernels, config: PreTrainedConfig) -> tuple[bool, str]:
    """(whether Liger's kernels are used, why). wanted: memory.kernels."""
    if wanted == "off":
        return False, "as memory.kernels says"
    if plan.device.kind == "cpu":
        return False, "as the others need a GPU"
    if not family_of(config.model_type).same_with_fused_kernels:
        return False, f"as no test shows that a {config.model_type} computes the same by others"
    return True, "as the device is a GPU"


def without_padding(plan: Plan, wanted: PaddingFree, config: PreTrainedConfig) -> tuple[bool, str]:
    """(whether micro-batches are without padding, why). wanted: memory.padding_free."""
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    if wanted == "off":
        return False, "as memory.padding_free says"
    if not family_of(config.model_type).same_without_padding:
        return False, f"as no test shows that a {config.model_type} computes the same without"
    if other := {*layer_types} - {"full_attention"}:
        return False, f"as no test shows that {', '.join(sorted(other))} computes the same without"
    if wanted == "on":
        return True, "as memory.padding_free says"
    if plan.device.kind == "cpu":
        return False, "as the published results of a CPU are of padded ones"
    if plan.attn == "eager":
        return False, "as eager attention computes what it masks"
    if plan.precision != "bf16":  # a GPU with bf16 is an Ampere or newer
        return False, f"as not every GPU for {plan.precision} has attention of variable lengths"
    return True, "as the GPU has attention of variable lengths"
