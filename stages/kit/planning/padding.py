"""Whether a plan's micro-batches are padded, or have their samples behind one another in one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.kit.planning.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from stages.core.params.schema import PaddingFree

FAMILIES = ("qwen2", "qwen2_moe", "qwen2_vl")
"""model_type of those whose loss and gradients are tested to be those of a padded batch, part by part."""


def without_padding(plan: Plan, wanted: PaddingFree, config: PreTrainedConfig) -> tuple[bool, str]:
    """(whether micro-batches are without padding, why). wanted: memory.padding_free. config: of the base."""
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    if wanted == "off":
        return False, "as memory.padding_free says"
    if config.model_type not in FAMILIES:
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
