"""Which GPU each module goes to, where one process spreads a model's layers over several (placement balanced).

The plan of memory and the load take the map from here, so that what is predicted is what is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from transformers import PreTrainedConfig
from transformers.integrations.accelerate import _get_device_map
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from stages.kit.models.load import DTYPES, auto_class, nf4_config
from stages.kit.planning.plan import Plan

_UNLIMITED = 1 << 60
"""Bytes: more than any GPU has."""


def balanced_gpus(plan: Plan, config: PreTrainedConfig) -> dict[str, int] | None:
    """The GPU of modules by name, counted from 0; what is within a module goes with it. None with another placement.

    It is transformers' own device_map "balanced" for the plan's weights, on GPUs that hold any amount: each gets about
    as many bytes of weights as the others, layers stay whole, and weights that are tied stay together. It does not
    depend on what is free on a GPU, unlike `from_pretrained(device_map="balanced")`. The prediction refuses a share
    that a GPU cannot hold; nothing moves to a CPU.
    """
    if plan.placement != "balanced":
        return None
    dtype = DTYPES[plan.precision]
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype)
    quantizer = None
    if plan.quantization == "nf4":
        quantizer = Bnb4BitHfQuantizer(nf4_config(plan.precision), pre_quantized=False)
        quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
    limits = dict.fromkeys(range(plan.device.count), _UNLIMITED)
    with _without_looking_for_gpus():
        gpus: dict[str, int] = _get_device_map(model, "balanced", limits, quantizer)
    assert set(gpus.values()) <= limits.keys(), gpus
    return gpus


def gpu_of(name: str, gpus: Mapping[str, int]) -> int | None:
    """That of a module or parameter by its full name; None for a module that is itself spread over several."""
    while name and name not in gpus:
        name = name.rpartition(".")[0]
    return gpus.get(name)


@contextmanager
def _without_looking_for_gpus() -> Iterator[None]:
    """accelerate warns of each GPU in the map that this machine does not have."""
    logger = logging.getLogger("accelerate.utils.modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
