"""Which device holds what of a model: layers spread over GPUs (balanced), or a share of every weight in each of several
processes (sharded, torch's FSDP2).

Sharded, a layer's weights are gathered when it is due, forward and backward, and its gradients summed and shared out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from peft import PeftModel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.accelerate import _get_device_map
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from stages.kit.models.load import DTYPES, auto_class, nf4_config
from stages.kit.planning.plan import Plan

_UNLIMITED = 1 << 60
"""Bytes: more than any GPU has."""


def balanced_gpus(plan: Plan, config: PreTrainedConfig) -> dict[str, int] | None:
    """The GPU of modules by name, counted from 0; submodules go with their module. None with another placement.

    It is transformers' own device_map "balanced" for the plan's weights, on GPUs that hold any amount: each gets about
    as many bytes of weights as the others, layers stay whole, and weights that are tied stay together. Unlike
    `from_pretrained(device_map="balanced")` it does not depend on a GPU's free memory, so that the plan predicts what
    is loaded. The prediction refuses a share that a GPU cannot hold; nothing moves to a CPU.
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
    logger = logging.getLogger("accelerate.utils.modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of each GPU in the map that this machine does not have
    try:
        gpus: dict[str, int] = _get_device_map(model, "balanced", limits, quantizer)
    finally:
        logger.setLevel(level)
    assert set(gpus.values()) <= limits.keys(), gpus
    return gpus


def gpu_of(name: str, gpus: Mapping[str, int]) -> int | None:
    """The GPU of a module or parameter by its full name; None for a module that is itself spread over several."""
    while name and name not in gpus:
        name = name.rpartition(".")[0]
    return gpus.get(name)


def process_mesh(plan: Plan) -> DeviceMesh:
    """All processes of the training, in a row. Starts their group where there is none yet."""
    return init_device_mesh(plan.device.kind, (plan.device.total,))


def shard(model: PreTrainedModel | PeftModel, plan: Plan, mesh: DeviceMesh) -> None:
    """Leave this process its share of the model's weights, on its device, layer by layer.

    Every process calls it with the same weights, on a CPU so that a device never holds them all. They stay in fp32
    where they are trained, are gathered in the plan's precision, and their gradients summed in fp32. The embeddings are
    a group of their own, freed after use like a layer. The head goes with the last norm, as TRL's loss takes its weight
    without calling it, and stays gathered from there to the end of backward; so do weights outside of all layers.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    policy = MixedPrecisionPolicy(
        param_dtype=None if plan.precision == "fp32" else DTYPES[plan.precision],
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # autocast decides, as in a process on its own
    )
    layers = set(base._no_split_modules or ())  # noqa: SLF001 - what transformers keeps on one device
    for module in base.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    if embeddings.weight is not head.weight:  # tied, both stay with the rest
        fully_shard(embeddings, mesh=mesh, mp_policy=policy)
        norm = base.get_decoder().norm
        fully_shard([norm, head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(base, mesh=mesh, mp_policy=policy)
    # transformers' Trainer then leaves placement and gradients alone, and accelerate with them.
    base._is_distributed_loading_by_transformers = True  # noqa: SLF001


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's share of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, gathered from the processes, which all have to ask at once.

    Its gradient is the processes' mean, like that of weights which FSDP gathers.
    """
    return tensor.full_tensor(grad_placements=[Partial("avg")]) if isinstance(tensor, DTensor) else tensor
