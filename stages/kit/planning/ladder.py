"""What a run gives up, rung by rung, where memory does not suffice.

First what keeps the trajectory within float error: a smaller micro-batch with more accumulation, gradient
checkpointing, and where a profile gives ddp several devices, sharding over them. Then what changes the arithmetic a
little: optimizer states of 8 bits. Last nf4 for frozen weights, only where the recipe itself asks for it. Within each
of these the cheapest comes first. Never touched are the pixels, the length, the rank, the precision of trained weights,
the effective batch and the seed.

What is cheaper is assumed, not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from typing import Literal

from stages.core.params.schema import OPTIMIZERS
from stages.kit.planning.plan import DATA_PARALLEL, Plan

AT_ONCE = 128
"""Most answers at once where evaluation.batch_size is auto. By then a step reads more of keys and values than of
weights, so a larger batch is hardly faster."""


def rungs(plan: Plan) -> Iterator[Plan]:
    """The plan itself, and the plans below it: one step down at a time, the cheapest that is left."""
    rung: Plan | None = plan
    while rung is not None:
        yield rung
        rung = next((below for step in _STEPS if (below := step(rung)) is not None), None)


def climbs(plan: Plan) -> list[list[Plan]]:
    """The plan with other micro-batches of the same result, from the least memory up: without gradient checkpointing,
    and with it where the plan has it."""
    schedule = plan.schedule
    share = schedule.micro_batch * schedule.grad_accumulation
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    schedules = [replace(schedule, micro_batch=size, grad_accumulation=share // size) for size in sizes]
    return [
        [replace(plan, gradient_checkpointing=checkpointing, schedule=each) for each in schedules]
        for checkpointing in {False, plan.gradient_checkpointing}
    ]


TOKENS_TO_FILL_A_GPU = 2048
"""Tokens of a micro-batch that take twice the time that their share of a large one's would. Assumed, not measured."""


def assumed_time(plan: Plan) -> float:
    """Of a step, relative to one of large micro-batches without checkpointing, which repeats every forward pass."""
    work = 4 / 3 if plan.gradient_checkpointing else 1.0
    return work * (1 + TOKENS_TO_FILL_A_GPU / (plan.schedule.micro_batch * plan.max_length))


def rung_changes(plan: Plan) -> list[str]:
    """What each rung changes, in the plan's words, e.g. "micro_batch 2 -> 1, grad_accumulation 8 -> 16"."""
    return [", ".join(changes_between(above, below)) for above, below in pairwise(rungs(plan))]


def lowered(plan: Plan, attempt: int) -> Plan | None:
    """The plan so many rungs down: 0 is the plan itself. None below the last rung."""
    return next(islice(rungs(plan), attempt, None), None)


def lowered_batch_size(batch_size: int, attempt: int) -> int | None:
    """An evaluation's batch size, halved so many times; None below 1."""
    return batch_size >> attempt or None


def read_at_once(batch_size: int) -> int:
    """Of an evaluation's batch, the questions that are read in one pass."""
    return max(1, batch_size // 8)


def batch_size_changes(batch_size: int | Literal["auto"]) -> list[str]:
    """What each rung of an evaluation changes. With `auto` the stage itself knows where it ends."""
    if batch_size == "auto":
        return [f"batch_size auto / {1 << attempt}" for attempt in range(1, AT_ONCE.bit_length())]
    sizes = [batch_size >> attempt for attempt in range(batch_size.bit_length())]
    return [f"batch_size {before} -> {after}" for before, after in pairwise(sizes)]


def settings(plan: Plan) -> dict[str, str]:
    """What the ladder may change, as text."""
    placement = {"placement": f"{plan.placement} over {plan.device.total}"} if plan.placement in DATA_PARALLEL else {}
    return placement | {
        "micro_batch": str(plan.schedule.micro_batch),
        "grad_accumulation": str(plan.schedule.grad_accumulation),
        "gradient_checkpointing": "on" if plan.gradient_checkpointing else "off",
        "optimizer": plan.optimizer,
        "quantization": plan.quantization,
    }


def changes_between(before: Plan, after: Plan) -> tuple[str, ...]:
    """For example ("micro_batch 16 -> 4", "grad_accumulation 1 -> 4")."""
    pairs = zip(settings(before).items(), settings(after).values(), strict=True)
    return tuple(f"{name} {old} -> {new}" for (name, old), new in pairs if old != new)


def sharded_over(plan: Plan, count: int) -> Plan | None:
    """The plan sharded over so many devices, its effective batch kept. None where that does not divide, or it cannot.

    No rung: no run takes more devices than its profile has.
    """
    at_once = plan.schedule.micro_batch * count
    plan = plan if OPTIMIZERS[plan.optimizer].shardable else replace(plan, optimizer="adamw_torch_fused")
    if plan.schedule.effective_batch % at_once or not can_be_sharded(plan):
        return None
    schedule = replace(plan.schedule, grad_accumulation=plan.schedule.effective_batch // at_once)
    device = replace(plan.device, count=count, nodes=1)
    return replace(plan, placement="sharded", device=device, schedule=schedule, features_bytes=0)


def _fuse_optimizer(plan: Plan) -> Plan | None:
    """The next smaller optimizer, if its states are the same."""
    smaller = _shrink_optimizer(plan)
    if smaller is None:
        return None
    before, after = OPTIMIZERS[plan.optimizer], OPTIMIZERS[smaller.optimizer]
    return smaller if (before.bits, before.paged) == (after.bits, after.paged) else None


def _divide_micro_batch(plan: Plan) -> Plan | None:
    """To the next divisor of a device's share of the effective batch, at most half.

    No jump to 1: an attempt that fails costs a minute, as the largest samples go through first, and a micro-batch that
    is smaller than it has to be costs time in every step.
    """
    schedule = plan.schedule
    share = schedule.micro_batch * schedule.grad_accumulation
    micro_batch = next((size for size in range(schedule.micro_batch // 2, 0, -1) if share % size == 0), None)
    if micro_batch is None:
        return None
    return replace(plan, schedule=replace(schedule, micro_batch=micro_batch, grad_accumulation=share // micro_batch))


def _checkpoint_gradients(plan: Plan) -> Plan | None:
    return None if plan.gradient_checkpointing else replace(plan, gradient_checkpointing=True)


def _shard(plan: Plan) -> Plan | None:
    """Over the devices that there are: each layer's weights are sent round twice a micro-batch, and once its gradients.

    Not where the recipe itself asks for nf4, which shrinks more and cannot be sharded, nor with an optimizer that
    cannot be.
    """
    if plan.placement != "ddp" or plan.may_quantize or not can_be_sharded(plan):
        return None
    return replace(plan, placement="sharded", features_bytes=0)


def can_be_sharded(plan: Plan) -> bool:
    """Neither nf4 weights nor some optimizers know DTensor, which FSDP's shares of a weight are."""
    return plan.quantization == "none" and OPTIMIZERS[plan.optimizer].shardable


def _shrink_optimizer(plan: Plan) -> Plan | None:
    """The next smaller optimizer: states of 8 bits, then paged ones."""
    smaller = OPTIMIZERS[plan.optimizer].smaller
    if plan.device.kind != "cuda" or smaller is None:
        return None
    if plan.placement == "sharded" and not OPTIMIZERS[smaller].shardable:
        return None
    return replace(plan, optimizer=smaller)


def _quantize(plan: Plan) -> Plan | None:
    allowed = plan.may_quantize and plan.placement != "sharded" and not plan.parts.trained("full")
    if not allowed or plan.quantization == "nf4":
        return None
    return replace(plan, quantization="nf4")


_STEPS = (
    *(_fuse_optimizer, _divide_micro_batch, _checkpoint_gradients, _shard),  # the trajectory stays
    _shrink_optimizer,
    _quantize,
)
