"""The largest batch first: memory that does not suffice is known in the first minute, not hours into the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.kit.internals.trl_internals import unchanged_counts
from stages.kit.models.load import local
from stages.kit.planning.plan import Schedule
from stages.kit.training.collators import IGNORED, ConversationCollator
from stages.kit.training.peak import cpu_peak
from stages.kit.training.seed import random_state, set_random_state

if TYPE_CHECKING:
    from trl import SFTTrainer


def largest_samples(collator: ConversationCollator, count: int) -> list[int]:
    """The `count` longest samples in tokens, the longest first; all if there are fewer.

    A picture takes tokens by its pixels, so these are also the most pixels, if all or none have pictures.
    """
    longest_first = sorted(range(len(collator.lengths)), key=lambda sample: (-collator.lengths[sample], sample))
    return longest_first[:count]


def largest_batch(collator: ConversationCollator, micro_batch: int) -> dict[str, Any]:
    return collator([{"sample": sample} for sample in largest_samples(collator, micro_batch)])


class Rehearsal(TrainerCallback):
    """Sends the largest micro-batch forward and backward once, right after the first step of the optimizer.

    Before that step the optimizer has no states. With accumulation it goes twice, as all micro-batches but a step's
    first find gradients already there. Trained weights stay the same, bit for bit. Under ddp and sharded each process
    does it, with the same samples.
    """

    def __init__(self, trainer: SFTTrainer, schedule: Schedule) -> None:
        self.trainer = trainer
        self.schedule = schedule
        self.done = False
        self.cpu_peak_bytes = 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self.done and self.trainer.optimizer.state:  # fp16 may skip the first steps
            self.cpu_peak_bytes = rehearse(self.trainer, self.schedule)
            self.done = True


def rehearse(trainer: SFTTrainer, schedule: Schedule) -> int:
    """Returns the peak of tensors in bytes on a CPU; 0 on a GPU, whose allocator keeps the account."""
    on_cpu = trainer.args.device.type == "cpu"
    inputs = largest_batch(trainer.data_collator, schedule.micro_batch)
    measured = cpu_peak((*inputs.values(), *held_tensors(trainer))) if on_cpu else nullcontext()
    with unchanged(trainer), trainer.accelerator.no_sync(trainer.model_wrapped), measured as peak:
        for _ in range(min(2, schedule.grad_accumulation)):
            trainer.training_step(trainer.model_wrapped, dict(inputs), inputs["labels"].ne(IGNORED).sum())
    return peak.size_bytes if peak is not None else 0


def held_tensors(trainer: SFTTrainer) -> list[torch.Tensor]:
    """All tensors that stay between two steps."""
    model = trainer.model
    return [*map(local, model.parameters()), *model.buffers(), *optimizer_states(trainer)]


def optimizer_states(trainer: SFTTrainer) -> Iterator[torch.Tensor]:
    for state in trainer.optimizer.state.values():
        yield from (local(value) for value in state.values() if isinstance(value, torch.Tensor))


@contextmanager
def unchanged(trainer: SFTTrainer) -> Iterator[None]:
    """Puts back what a forward and a backward pass change: random numbers, gradients, buffers, TRL's counts."""
    model = trainer.model
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    drawn = random_state()
    with unchanged_counts(trainer):
        yield
    set_random_state(drawn)
    for parameter in model.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
