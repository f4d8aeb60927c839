"""Sharded data parallel: each process keeps its share of every weight, gradient and optimizer state (torch's FSDP2).

A layer's weights are gathered when it is due, forward and backward, and its gradients summed and shared out again.
"""

from __future__ import annotations

import torch
from peft import PeftModel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel

from stages.kit.models.load import DTYPES
from stages.kit.planning.plan import Plan


def process_mesh(plan: Plan) -> DeviceMesh:
    """All processes of the training, in a row. Starts their group where there is none yet."""
    return init_device_mesh(plan.device.kind, (plan.device.count,))


def shard(model: PreTrainedModel | PeftModel, plan: Plan, mesh: DeviceMesh) -> None:
    """Leave this process its share of the model's weights, on its device, layer by layer.

    Every process calls it with the same weights, on a CPU so that a device never holds them all. They stay in fp32
    where they are trained, are gathered in the plan's precision, and their gradients summed in fp32. The embeddings are
    a group of their own, freed after use like a layer. The head goes with the last norm, as TRL's loss takes its weight
    without calling it, and stays gathered from there to the end of backward; so does what belongs to no layer.
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
    # What transformers' Trainer calls a model whose placement and gradients are not accelerate's to handle.
    base._is_distributed_loading_by_transformers = True  # noqa: SLF001


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of it this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, gathered from the processes, which all have to ask at once.

    Computed with, it has the processes' mean gradient, as what FSDP gathers has.
    """
    return tensor.full_tensor(grad_placements=[Partial("avg")]) if isinstance(tensor, DTensor) else tensor
