"""Private parts of transformers, for transformers 5.23.0."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel, ProcessorMixin, Trainer
from transformers.integrations.accelerate import _get_device_map
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

_UNLIMITED = 1 << 60
"""Bytes: more than any GPU has."""


def on_device(trainer: Trainer, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A batch on the trainer's device."""
    return dict(trainer._prepare_inputs(dict(inputs)))  # noqa: SLF001


def balanced_device_map(
    model: PreTrainedModel, dtype: torch.dtype, num_gpus: int, nf4: BitsAndBytesConfig | None
) -> dict[str, int]:
    """GPU by module name, as device_map "balanced" spreads this model over GPUs that hold any amount.

    model: on the meta device, its linear layers replaced in place where they are to be quantized.
    """
    quantizer = None
    if nf4 is not None:
        quantizer = Bnb4BitHfQuantizer(nf4, pre_quantized=False)
        quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
    limits = dict.fromkeys(range(num_gpus), _UNLIMITED)
    logger = logging.getLogger("accelerate.utils.modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about each GPU in the map that this machine does not have
    try:
        gpus: dict[str, int] = _get_device_map(model, "balanced", limits, quantizer)
    finally:
        logger.setLevel(level)
    assert set(gpus.values()) <= limits.keys(), gpus
    return gpus


def layer_classes(model: PreTrainedModel) -> set[str]:
    """Names of the classes that transformers keeps whole on one device."""
    return set(model._no_split_modules or ())  # noqa: SLF001


def mark_distributed(model: PreTrainedModel) -> None:
    """Make transformers' Trainer, and accelerate with it, leave placement and gradients alone."""
    model._is_distributed_loading_by_transformers = True  # noqa: SLF001


def num_image_tokens(processor: ProcessorMixin, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Tokens of each image by its (height, width), as vLLM counts them too."""
    counts: list[int] = processor._get_num_multimodal_tokens(sizes)["num_image_tokens"]  # noqa: SLF001
    return counts
