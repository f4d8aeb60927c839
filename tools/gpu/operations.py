"""Counts a micro-batch's operators, waits of the host, bytes and arithmetic on a GPU, by a CPU and without weights.

The real trainer runs on the real widths with a few layers, as for a memory prediction; the rest of the layers is one
layer's count times their number. Counted is one micro-batch more in a step, forward and backward, so that the
optimizer does not count, but all that Trainer does for a micro-batch. A kernel of Liger's or of TRL's loss counts once,
like an operator that may be several kernels (attention, a product with a weight in 4 bits).

Run   python -m tools.gpu.operations    a line for each of the trainings that the docs show (docs/memory.md)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from stages.core.errors import configure_logging
from stages.kit.internals.torch_internals import (
    READ_SCALAR,
    aten,
    flops_of,
    storage_key,
    tree_leaves,
    writes_in_place,
)
from stages.kit.internals.trl_internals import NoKernel
from stages.kit.memory.predict import Depth, MemoryPredictor, depth_of, sample_depths, with_depth
from stages.kit.memory.recorder import Recorder
from stages.kit.memory.stand_in import KERNELS
from stages.kit.memory.step import record_step
from stages.kit.planning.cards import named_card
from stages.kit.planning.plan import Plan
from tools.gpu.measure import Setting, planned, training_batch

_R1: Setting = {"profile": "qwen2-vl-2b-24gb", "recipe": "r1-llm-only"}
_7B: Setting = {"profile": "qwen25-7b-80gb", "recipe": "amr-baseline", "max_length": 4096}
_CHECKPOINTED, _OPEN = {"gradient_checkpointing": True}, {"gradient_checkpointing": False}
TRAININGS: dict[str, Setting] = {
    "r1, Qwen2-VL-2B, nf4, 2 x 2,048, checkpointed": {**_R1, **_CHECKPOINTED, "micro_batch": 2},
    "the same, 16 x 2,048, not checkpointed": {**_R1, **_OPEN, "micro_batch": 16},
    "LoRA, Qwen2.5-7B, bf16, 2 x 4,096, not checkpointed": {**_7B, **_OPEN, "micro_batch": 2},
    "mixture, full, 16 x 512, checkpointed": {
        "profile": "moe-80gb",
        "recipe": "moe-finetune",
        "micro_batch": 16,
        **_CHECKPOINTED,
    },
}
"""Settings by a name for the table."""

PRODUCTS_FLOPS, MEMORY_BYTES, LAUNCH_S = 600e12, 3e12, 8e-6
"""An H100: products and memory a second as large kernels reach them, and the host's time for an operator. Assumed, not
measured here."""

SYNCS = {READ_SCALAR, aten.nonzero.default, aten.repeat_interleave.Tensor, aten.masked_select.default}
SYNCS |= {aten.equal.default}
"""Operators for whose result the host waits."""


@dataclass(frozen=True)
class Counts:
    launches: float = 0
    syncs: float = 0
    moved_bytes: float = 0
    """Operands read and results written, of all operators."""
    product_bytes: float = 0
    """The part of matrix products and attention."""
    flops: float = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(one + more for one, more in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, factor: float) -> Counts:
        return Counts(*(factor * each for each in vars(self).values()))

    def seconds(self) -> float:
        """Time on an H100 by arithmetic: its own work, or the host's where that takes longer."""
        own = self.flops / PRODUCTS_FLOPS + (self.moved_bytes - self.product_bytes) / MEMORY_BYTES
        return max(own, self.launches * LAUNCH_S)


@contextmanager
def counted() -> Iterator[Callable[[], Counts]]:
    """Counts the operators that a Recorder sees, and the kernels that only allocate there; gives the sum so far."""
    total, at_work = Counts(), False
    recorded, tolist = Recorder.recorded, torch.Tensor.tolist

    def add(counts: Counts) -> None:
        nonlocal total
        total = total + counts

    def dispatched(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        nonlocal at_work
        at_work = True
        output = recorded(recorder, func, args, kwargs)
        add(counts_of(func, args, kwargs, output))
        at_work = False
        return output

    def listed(tensor: torch.Tensor) -> Any:
        add(Counts(syncs=not at_work))  # those of the recorder are none of the step's
        return tolist(tensor)

    def launched(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            output = kernel(*args, **kwargs)
            add(Counts(launches=1, moved_bytes=bytes_of((args, kwargs)) + bytes_of(output)))
            return output

        return launch

    with ExitStack() as stack:
        stack.enter_context(patch.object(Recorder, "recorded", dispatched))
        stack.enter_context(patch.object(torch.Tensor, "tolist", listed))
        stack.enter_context(patch.object(NoKernel, "launch", launched(NoKernel.launch)))
        for kind in KERNELS:
            for name in ("forward", "backward"):
                stack.enter_context(patch.object(kind, name, staticmethod(launched(getattr(kind, name)))))
        yield lambda: total


def counts_of(func: Any, args: Any, kwargs: Any, output: Any) -> Counts:
    """The counts of one operator; a view, or memory without contents, is none."""
    waits = func in SYNCS or (func is aten.index.Tensor and any(is_mask(index) for index in args[1]))
    given = {storage_key(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
    made = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
    is_view = not writes_in_place(func) and all(storage_key(each) in given for each in made)
    if is_view or "empty" in func.__name__ or func.namespace == "prim":
        return Counts(syncs=waits)
    flops, moved = flops_of(func, args, kwargs, output), bytes_of((args, kwargs)) + bytes_of(output)
    return Counts(1, waits, moved, moved if flops else 0, flops)


def is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def bytes_of(values: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tree_leaves(values) if isinstance(each, torch.Tensor))


def of_micro_batch(plan: Plan, predictor: MemoryPredictor) -> Counts:
    batch, config = training_batch(plan, predictor), predictor.config
    base, *deeper = sample_depths(config)
    start = total = further_micro_batch(plan, predictor, batch, base)
    for more in deeper:
        layers = sum((all_ - few) * (many - few) for all_, few, many in zip(depth_of(config), base, more, strict=True))
        total += (further_micro_batch(plan, predictor, batch, more) + start * -1) * layers
    return total


def further_micro_batch(plan: Plan, predictor: MemoryPredictor, batch: Mapping[str, Any], depth: Depth) -> Counts:
    """The difference of a step of two micro-batches and a step of one."""

    def of_step(accumulation: int) -> Counts:
        samples = accumulation * plan.schedule.micro_batch
        schedule = replace(
            plan.schedule, grad_accumulation=accumulation, effective_batch=samples, train_samples=samples
        )
        config, own = with_depth(predictor.config, depth), copy.deepcopy(dict(batch))
        with counted() as so_far:
            record_step(replace(plan, schedule=schedule), config, predictor.processor, own)
            return so_far()

    return of_step(2) + of_step(1) * -1


def main() -> None:
    configure_logging("operations")
    peak = named_card("H100").tflops * 1e12
    print("| training | operators | waits | GB moved | in products | TFLOP | share of an H100's peak |")
    print("|---|---|---|---|---|---|---|")
    for name, setting in TRAININGS.items():
        plan, predictor = planned(setting, "cuda")
        counts = of_micro_batch(plan, predictor)
        # Without what is computed twice to save memory.
        needed = of_micro_batch(replace(plan, gradient_checkpointing=False), predictor).flops
        print(
            f"| {name} | {counts.launches:,.0f} | {counts.syncs:,.0f} | {counts.moved_bytes / 1e9:,.0f} "
            f"| {counts.product_bytes / 1e9:,.0f} | {counts.flops / 1e12:,.1f} "
            f"| {needed / counts.seconds() / peak:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
