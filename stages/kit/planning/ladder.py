"""What a run gives up, rung by rung, where memory does not suffice.

First what keeps the trajectory within float error: a smaller micro-batch with more accumulation, gradient
checkpointing, and where a profile gives ddp several devices, sharding over them. Then what changes the arithmetic a
little: optimizer states of 8 bits. Last nf4 for frozen weights, only where the recipe itself asks for it. Within each
of these the cheapest comes first. Never touched are the pixels, the length, the rank, the precision of trained weights,
the effective batch and the seed.

The costs are assumed, not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from stages.kit.planning.plan import DATA_PARALLEL, Plan


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One step down the ladder."""

    plan: Plan
    """With the step taken."""
    change: str
    """The step in the plan's words, e.g. "micro_batch 2 -> 1, grad_accumulation 8 -> 16"."""
    step_cost: float
    """The time of an optimizer step, relative to the rung above. Assumed."""


def rungs(plan: Plan) -> Iterator[Rung]:
    """The whole ladder below a plan, from the top."""
    while (rung := next_rung(plan)) is not None:
        yield rung
        plan = rung.plan


def next_rung(plan: Plan) -> Rung | None:
    """The cheapest step down from a plan, or None where nothing is left to give up."""
    return next((rung for step in _STEPS if (rung := step(plan)) is not None), None)


def lowered(plan: Plan, attempt: int) -> Plan | None:
    """The plan so many rungs down: 0 is the plan itself. None below the last rung."""
    return next(islice((plan, *(rung.plan for rung in rungs(plan))), attempt, None), None)


def lowered_batch_size(batch_size: int, attempt: int) -> int | None:
    """An evaluation's batch size, halved so many times; None below 1."""
    return batch_size >> attempt or None


def batch_size_changes(batch_size: int) -> list[str]:
    """What each rung of an evaluation changes."""
    sizes = [batch_size >> attempt for attempt in range(batch_size.bit_length())]
    return [f"batch_size {before} -> {after}" for before, after in pairwise(sizes)]


def settings(plan: Plan) -> dict[str, str]:
    """What the ladder may change, as text."""
    placement = {"placement": f"{plan.placement} over {plan.device.count}"} if plan.placement in DATA_PARALLEL else {}
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
    plan = replace(plan, optimizer="adamw_torch_fused") if "8bit" in plan.optimizer else plan
    if plan.schedule.effective_batch % at_once or not can_be_sharded(plan):
        return None
    schedule = replace(plan.schedule, grad_accumulation=plan.schedule.effective_batch // at_once)
    return replace(plan, placement="sharded", device=replace(plan.device, count=count), schedule=schedule)


def _rung(before: Plan, after: Plan, step_cost: float) -> Rung:
    return Rung(plan=after, change=", ".join(changes_between(before, after)), step_cost=step_cost)


def _fuse_optimizer(plan: Plan) -> Rung | None:
    """The fused step has no temporaries of the size of the trained weights (torch.optim.AdamW, `foreach`)."""
    if plan.device.kind != "cuda" or plan.optimizer != "adamw_torch":
        return None
    return _rung(plan, replace(plan, optimizer="adamw_torch_fused"), 1.0)


def _divide_micro_batch(plan: Plan) -> Rung | None:
    """To the next divisor of a device's share of the effective batch, at most half.

    No jump to 1: an attempt that fails costs a minute, as the largest samples go through first, and a micro-batch that
    is smaller than it has to be costs time in every step.
    """
    schedule = plan.schedule
    share = schedule.micro_batch * schedule.grad_accumulation
    micro_batch = next((size for size in range(schedule.micro_batch // 2, 0, -1) if share % size == 0), None)
    if micro_batch is None:
        return None
    divided = replace(schedule, micro_batch=micro_batch, grad_accumulation=share // micro_batch)
    return _rung(plan, replace(plan, schedule=divided), 1.1)


def _checkpoint_gradients(plan: Plan) -> Rung | None:
    """One more forward pass where there were a forward and a backward, which is twice a forward."""
    if plan.gradient_checkpointing:
        return None
    return _rung(plan, replace(plan, gradient_checkpointing=True), 1.33)


def _shard(plan: Plan) -> Rung | None:
    """Over the devices that there are: each layer's weights are sent round twice a micro-batch, and once its gradients.

    Not where the recipe itself asks for nf4, which shrinks more and cannot be sharded, nor with an optimizer that
    cannot be.
    """
    if plan.placement != "ddp" or plan.may_quantize or not can_be_sharded(plan):
        return None
    return _rung(plan, replace(plan, placement="sharded"), 1.25)


def can_be_sharded(plan: Plan) -> bool:
    """bitsandbytes' nf4 weights and 8-bit optimizers know no DTensor, which FSDP's shares of a weight are."""
    return plan.quantization == "none" and "8bit" not in plan.optimizer


def _shrink_optimizer(plan: Plan) -> Rung | None:
    if plan.placement == "sharded":
        return None
    if plan.device.kind != "cuda" or plan.optimizer not in ("adamw_torch", "adamw_torch_fused"):
        return None
    return _rung(plan, replace(plan, optimizer="adamw_8bit"), 1.05)


def _page_optimizer(plan: Plan) -> Rung | None:
    """Its states move to the machine's memory while the GPU's is short."""
    if plan.device.kind != "cuda" or plan.optimizer != "adamw_8bit":
        return None
    return _rung(plan, replace(plan, optimizer="paged_adamw_8bit"), 1.2)


def _quantize(plan: Plan) -> Rung | None:
    if plan.placement == "sharded" or plan.parts.trained("full"):
        return None
    if not plan.may_quantize or plan.quantization == "nf4":
        return None
    return _rung(plan, replace(plan, quantization="nf4"), 1.3)


_STEPS = (
    *(_fuse_optimizer, _divide_micro_batch, _checkpoint_gradients, _shard),  # the trajectory stays
    *(_shrink_optimizer, _page_optimizer),
    _quantize,
)
