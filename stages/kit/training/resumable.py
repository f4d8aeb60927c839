"""A trainer that can stop after any step, and goes on from there bit for bit as if it never had.

transformers' Trainer knows when to save, which samples to skip, and when to restore what. What it would write is not
used: whole models, in their final place, and pickles. Each of its hooks that saves or restores has a form of its own
here: trained weights, the optimizer's states, schedule, scaler, random numbers, and the counts that lie between two
lines of the log, as safetensors, in a checkpoint that is complete or absent.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from trl import SFTTrainer

from stages.core.errors import UserError
from stages.core.params.schema import CheckpointParams
from stages.core.signals import ENDING, SAME_REQUEST_S, handling
from stages.kit.internals.accelerate_internals import set_last_batch
from stages.kit.models.load import local, whole
from stages.kit.training.checkpoints import Checkpoints
from stages.kit.training.record import Trace
from stages.kit.training.seed import random_state, set_random_state
from stages.kit.training.states import load_state, save_state

log = logging.getLogger(__name__)


class ResumableTrainer(SFTTrainer):
    """Without checkpoints and a trace, which `train_to_the_end` gives it, it does nothing of its own.

    The order of the samples is no part of a checkpoint: accelerate's sampler draws it from (seed, epoch) alone. Nor are
    the random numbers of a data loader's workers: a collator that draws has to do it from the sample and the epoch.
    """

    checkpoints: Checkpoints | None = None
    trace: Trace | None = None
    saved_step: int | None = None
    """The last step of which there is a checkpoint."""

    _restored: dict[str, Any] | None = None
    """The rest of the checkpoint that is gone on from, still to be put in its place."""
    _step_losses: list[torch.Tensor]
    """() of each micro-batch of the step under way."""
    _began = 0.0
    """When the first step would have begun, had nothing interrupted the training; on this process's clock."""

    @property
    def seconds(self) -> float:
        """Time spent on the steps so far, in this process and those whose checkpoints it went on from."""
        return time.monotonic() - self._began

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._began = time.monotonic()
        return super().train(*args, **kwargs)

    def agreed(self, *values: int) -> tuple[int, ...]:
        """The largest of each value over all processes, which have to ask at once."""
        if self.args.world_size == 1:
            return values
        tensor = torch.tensor(values, device=self.args.device)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return tuple(tensor.tolist())

    # The trace. Reading it waits for the GPU once a step, as SFTTrainer does for every micro-batch.

    def get_batch_samples(self, iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[Any, Any]:
        self._step_losses = []  # a rehearsal may have left some
        return super().get_batch_samples(iterator, num_batches, device)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.trace is not None:
            self._step_losses.append(loss)
        return loss

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        grad_norm = super()._get_grad_norm(model, grad_norm)
        if self.trace is not None:
            loss = sum(self._step_losses[1:], start=self._step_losses[0])
            loss_bits, norm_bits = map(float.hex, torch.stack((loss, whole(grad_norm).to(loss))).tolist())
            self.trace.append((loss_bits, norm_bits))
        return grad_norm

    # Saving.

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """A checkpoint of the step that has just ended, each process its part.

        A failure is warned of, and the training goes on: a full disk, say, costs the insurance, not the work.
        """
        checkpoints, step, began = self.checkpoints, self.state.global_step, time.monotonic()
        assert checkpoints is not None
        aside, first = checkpoints.aside(step), self.args.process_index == 0
        self.store_flos()

        def write() -> None:
            aside.mkdir(exist_ok=True)
            save_state(self._captured(), aside / _file_of(self.args.process_index))
            if first:
                self.state.save_to_json(str(aside / TRAINER_STATE_NAME))

        def complete() -> None:
            names = [TRAINER_STATE_NAME, *map(_file_of, range(self.args.world_size))]
            size_bytes = checkpoints.complete(step, names)
            log.info("saved at step %d: %.1f MB in %.1f s", step, size_bytes / 1e6, time.monotonic() - began)

        if self._went_well(write) and self._went_well(complete if first else None):
            self.saved_step = step
        elif first:
            checkpoints.abandon(step)

    def _went_well(self, what: Callable[[], None] | None) -> bool:
        """Whether it did in every process; each waits for all."""
        failed = False
        try:
            if what is not None:
                what()
        except OSError as error:
            failed = True
            log.warning("step %d could not be saved: %s", self.state.global_step, error)
        return self.agreed(int(failed)) == (0,)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: each for name, each in self.model.named_parameters() if each.requires_grad}

    def _captured(self) -> dict[str, Any]:
        """The state of this process. Without sharding, weights and optimizer are the same everywhere."""
        trained, scaler = self._trained(), self.accelerator.scaler
        state = {
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "random": random_state(),
            "loss": self._tr_loss,
            "logged_loss": self._total_loss_scalar,
            "logged_step": self._globalstep_last_logged,
            "metrics": self._metrics["train"],
            "tokens": self._total_train_tokens,
            "seconds": self.seconds,
            "trace": self.trace,
        }
        if self.args.process_index == 0 or any(isinstance(each, DTensor) for each in trained.values()):
            state |= {"weights": trained, "optimizer": self.optimizer.state_dict()}
        return state

    # Restoring, in the order in which Trainer asks for it.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        restored = load_state(folder / _file_of(self.args.process_index))
        if "weights" not in restored:
            of_first = load_state(folder / _file_of(0))
            restored |= {name: of_first[name] for name in ("weights", "optimizer")}
        weights, trained = restored.pop("weights"), self._trained()
        assert trained.keys() == weights.keys(), trained.keys() ^ weights.keys()
        for name, parameter in trained.items():
            local(parameter.data).copy_(weights[name])
        self.trace = [(loss, norm) for loss, norm in restored.pop("trace")]
        self._restored = restored

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        assert self._restored is not None
        state = self._restored.pop("optimizer")
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state["state"] = {
            int(index): {name: _shared_like(parameters[int(index)], value) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        if getattr(optimizer, "is_paged", False):
            load_paged(optimizer, state)
        else:
            optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(self._restored.pop("scheduler"))

    def _load_scaler(self, checkpoint: str | None) -> None:
        assert self._restored is not None
        if (state := self._restored.pop("scaler")) is not None:
            self.accelerator.scaler.load_state_dict(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The last that is restored, once Trainer's loop has set its counts to 0 and fetched the first samples."""
        restored, self._restored = self._restored, None
        assert restored is not None
        set_random_state(restored["random"])
        self._tr_loss = restored["loss"].to(self.args.device)
        self._total_loss_scalar = restored["logged_loss"]
        self._globalstep_last_logged = restored["logged_step"]
        self._initial_global_step = 0  # the mean loss is that of all steps
        self._metrics["train"].update(restored["metrics"])
        self._total_train_tokens = restored["tokens"]
        self._began -= restored["seconds"]
        self.saved_step = self.state.global_step
        set_last_batch(self.accelerator, len(self.train_dataset) % (self.args.train_batch_size * self.args.world_size))

    # The samples.

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader = super().get_train_dataloader()
        loader.base_dataloader.worker_init_fn = partial(_ignore_signals, loader.base_dataloader.worker_init_fn)
        return loader


def _file_of(process_index: int) -> str:
    return f"process-{process_index}.safetensors"


def _shared_like(parameter: torch.Tensor, value: Any) -> Any:
    """A restored state of a parameter, as the optimizer had it: where the parameter is a DTensor, so is a state of its
    shape, and not the count of steps."""
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return DTensor.from_local(
        value.to(local(parameter).device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def load_paged(optimizer: Any, state: dict[str, Any]) -> None:
    """Load the state of one of bitsandbytes' paged optimizers, moments into managed memory as it makes them itself: its
    own loading would leave them on the GPU for good. Its first step moves what else belongs there."""
    optimizer.load_state_dict(state, move_to_device=False)
    for parameter, values in optimizer.state.items():
        for name in values.keys() & {"state1", "state2"}:
            moments = optimizer.get_state_buffer(parameter, dtype=values[name].dtype)
            moments.copy_(values[name])
            values[name] = moments


def _ignore_signals(then: Callable[[int], None], worker: int) -> None:
    """Begins a data-loader worker, which ends with the trainer alone.

    torchrun and Slurm ask all processes to end, and a trainer whose data ends at once could not finish its step.
    """
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    then(worker)


def train_to_the_end(trainer: ResumableTrainer, checkpoints: Checkpoints, params: CheckpointParams) -> Trace:
    """Train from the newest checkpoint on, or from the start; returns the trace.

    Every process of a training calls it. A signal that asks to end lets the step under way finish and be saved; then
    all of them raise SystemExit with 128 + its number. Another one, a while later, ends this process at once.
    Raises UserError where training stops early unasked.
    """
    first = trainer.args.process_index == 0
    (newest,) = trainer.agreed((checkpoints.newest() or 0) if first else 0)
    trainer.checkpoints, trainer.trace = checkpoints, []
    num_steps = trainer.args.max_steps
    if newest:
        log.info("goes on from step %d of %d", newest, num_steps)
    saving = SaveInTime(trainer, params)
    with handling(saving.on_signal):
        trainer.add_callback(saving)
        trainer.train(resume_from_checkpoint=str(checkpoints.at(newest)) if newest else None)
    ended = trainer.state.global_step
    if saving.ended_by:
        if trainer.saved_step == ended:
            said = f"saved at step {ended} of {num_steps}; the same command goes on from there"
        else:
            again = f"goes on from step {trainer.saved_step}" if trainer.saved_step else "starts anew"
            said = f"ended at step {ended} of {num_steps}, which could not be saved; the same command {again}"
        log.info("%s: %s", signal.Signals(saving.ended_by).name, said)
        raise SystemExit(128 + saving.ended_by)
    if ended != num_steps:
        raise UserError(f"training stopped at step {ended} of {num_steps}")
    return trainer.trace


class SaveInTime(TrainerCallback):
    """Has the trainer save after a step where that is due, and stop where a signal asked this process to end.

    The processes of a training agree on the step: each has its own clock, and is asked to end at a moment of its own.
    """

    asked_by = 0
    """The signal that asked to end; 0 where none did."""
    ended_by = 0
    """The signal that ended the training before its last step; 0 where none did."""

    def __init__(self, trainer: ResumableTrainer, params: CheckpointParams) -> None:
        self.trainer = trainer
        self.params = params

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self.asked_by:
            self.asked_by, self._asked_at = number, time.monotonic()
            # No logging, nor any other lock that whatever was interrupted may hold.
            with suppress(OSError):  # of a terminal that was closed, or a pipe that nobody reads any more
                os.write(2, f"{signal.Signals(number).name}: ends after this step; asked again, at once\n".encode())
        elif time.monotonic() - self._asked_at > SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._since = time.monotonic()

    on_save = on_train_begin

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            return  # it has ended anyway, and its outputs are next
        minutes, steps = self.params.every_minutes, self.params.every_steps
        due = minutes is not None and time.monotonic() - self._since >= 60 * minutes
        due |= steps is not None and state.global_step % steps == 0
        self.ended_by, save = self.trainer.agreed(self.asked_by, int(due))
        control.should_save |= bool(self.ended_by or save)
        control.should_training_stop |= bool(self.ended_by)
