"""Private parts of PEFT, for peft 0.21.2."""

from __future__ import annotations

from collections.abc import Collection

from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING


def expert_names(model_type: str) -> Collection[str]:
    """Ends of names that PEFT takes for a mixture's fused experts or its router, wherever they stand in the model.

    They are those of transformers 4: PEFT converts its adapters, and refuses dropout on them.
    """
    return _MOE_TARGET_MODULE_MAPPING.get(_MODEL_TO_CONVERSION_PATTERN.get(model_type, ""), {})
