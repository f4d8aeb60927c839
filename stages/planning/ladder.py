"""The fallback ladder: the settings that a run gives up, one after the other, if memory does not suffice.

First come settings that keep the trajectory within float error: fused AdamW, a smaller micro-batch with more
accumulation, gradient checkpointing, and sharding over the devices that a profile gives to ddp. Then optimizer states
of 8 bits, which change the arithmetic a little. Last nf4 for frozen weights, only if the recipe itself specifies it.
Within each group the cheapest comes first; costs are assumed, not measured. Pixels, length, rank, the precision of
trained weights, the effective batch and the seed never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from typing import Literal

from stages.core.errors import UserError
from stages.core.params.schema import OPTIMIZERS
from stages.planning.plan import Plan, read_plan

MAX_BATCH_SIZE = 128
"""Largest generation batch if evaluation.batch_size is auto. A step of it reads more keys and values than weights, so
a larger batch is hardly faster. Without a prediction, a baseline and a merge's few samples begin with it: the
launcher halves it if memory runs out."""
LOGIT_ROWS = 256
"""Tokens of answers with logits in memory at once, to compute likelihoods: 390 MB for a vocabulary of 152 thousand."""


def rungs(plan: Plan) -> Iterator[Plan]:
    """The plan itself and the plans below it, each one step down: the cheapest that is left."""
    rung: Plan | None = plan
    while rung is not None:
        yield rung
        rung = next((below for step in _STEPS if (below := step(rung)) is not None), None)


def rung_changes(plan: Plan) -> list[str]:
    """The changes of each rung, e.g. "micro_batch 2 -> 1, grad_accumulation 8 -> 16"."""
    return [", ".join(changes_between(above, below)) for above, below in pairwise(rungs(plan))]


def planned(recipe: str, attempt: int) -> Plan:
    """The plan of a recipe so many rungs down. Raises UserError if it is missing, damaged, or has fewer rungs."""
    plan = lowered(read_plan(recipe), attempt)
    if plan is None:
        raise UserError(f"the plan of {recipe} has fewer than {attempt} settings to lower")
    return plan


def lowered(plan: Plan, attempt: int) -> Plan | None:
    """The plan `attempt` rungs down: 0 is the plan itself. None below the last rung."""
    return next(islice(rungs(plan), attempt, None), None)


def lowered_batch_size(batch_size: int, attempt: int) -> int | None:
    """An evaluation's batch size, halved `attempt` times; None below 1."""
    return batch_size >> attempt or None


def prefill_batch_size(batch_size: int) -> int:
    """Prompts of an evaluation's batch that are read in one pass."""
    return max(1, batch_size // 8)


def batch_size_changes(batch_size: int | Literal["auto"]) -> list[str]:
    """The changes of each rung of an evaluation. With `auto` only the stage itself knows the last one."""
    if batch_size == "auto":
        return [f"batch_size auto / {1 << attempt}" for attempt in range(1, MAX_BATCH_SIZE.bit_length())]
    sizes = [batch_size >> attempt for attempt in range(batch_size.bit_length())]
    return [f"batch_size {before} -> {after}" for before, after in pairwise(sizes)]


def settings(plan: Plan) -> dict[str, str]:
    """The settings that the ladder may change, as text."""
    placement = {"placement": f"{plan.memory.placement} over {plan.device.total}"} if plan.is_data_parallel else {}
    return placement | {
        "micro_batch": str(plan.memory.micro_batch),
        "grad_accumulation": str(plan.schedule.grad_accumulation),
        "gradient_checkpointing": "on" if plan.memory.gradient_checkpointing else "off",
        "optimizer": plan.memory.optimizer,
        "quantization": plan.quantization,
    }


def changes_between(before: Plan, after: Plan) -> tuple[str, ...]:
    """For example ("micro_batch 16 -> 4", "grad_accumulation 1 -> 4")."""
    pairs = zip(settings(before).items(), settings(after).values(), strict=True)
    return tuple(f"{name} {old} -> {new}" for (name, old), new in pairs if old != new)


def _fuse_optimizer(plan: Plan) -> Plan | None:
    """The next smaller optimizer, if its states are the same."""
    smaller = _shrink_optimizer(plan)
    if smaller is None:
        return None
    before, after = OPTIMIZERS[plan.memory.optimizer], OPTIMIZERS[smaller.memory.optimizer]
    return smaller if (before.bits, before.paged) == (after.bits, after.paged) else None


def _divide_micro_batch(plan: Plan) -> Plan | None:
    """Take the next divisor of a device's share of the effective batch, at most half.

    It does not jump to 1: a failing attempt costs a minute, since the largest samples go through first, and a
    micro-batch that is smaller than necessary costs time in every step.
    """
    share = plan.samples_per_step
    sizes = (size for size in range(plan.memory.micro_batch // 2, 0, -1) if share % size == 0)
    return next((plan.with_micro_batch(size) for size in sizes), None)


def _checkpoint_gradients(plan: Plan) -> Plan | None:
    return None if plan.memory.gradient_checkpointing else plan.with_memory(gradient_checkpointing=True)


def _shard(plan: Plan) -> Plan | None:
    """Shard over ddp's devices, which sends each layer's weights twice per micro-batch, and its gradients once.

    Not if the recipe itself specifies nf4, which saves more. FSDP's shares of a weight are DTensors, which neither nf4
    weights nor some optimizers support.
    """
    if plan.memory.placement != "ddp" or plan.may_be_quantized or not OPTIMIZERS[plan.memory.optimizer].shardable:
        return None
    return replace(plan.with_memory(placement="sharded"), features_bytes=0)


def _shrink_optimizer(plan: Plan) -> Plan | None:
    """The next smaller optimizer: states of 8 bits, then paged ones."""
    smaller = OPTIMIZERS[plan.memory.optimizer].smaller
    if not plan.on_gpu or smaller is None:
        return None
    if plan.is_sharded and not OPTIMIZERS[smaller].shardable:
        return None
    return plan.with_memory(optimizer=smaller)


def _quantize(plan: Plan) -> Plan | None:
    allowed = plan.may_quantize and not plan.is_quantized and not plan.is_sharded
    return replace(plan, quantization="nf4") if allowed else None


_STEPS = (
    *(_fuse_optimizer, _divide_micro_batch, _checkpoint_gradients, _shard),  # the trajectory stays
    _shrink_optimizer,
    _quantize,
)
