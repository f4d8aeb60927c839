"""A trainer that can stop after any step, and resumes from there bit for bit as if it never had.

Trainer decides when to save and restore (internals/transformers_internals.py). A checkpoint holds trained weights,
optimizer states, schedule, scaler, random numbers, and the sums between two lines of the log. It resumes a training
with the same identity (identity.py).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import IntervalStrategy
from trl import SFTTrainer

from stages.core.errors import UserError
from stages.core.params.schema import OPTIMIZERS, CheckpointParams
from stages.core.signals import ENDING, SAME_REQUEST_S, handling
from stages.internals.accelerate_internals import set_last_batch
from stages.internals.torch_internals import tree_map_only
from stages.internals.transformers_internals import CheckpointHooks
from stages.internals.trl_internals import metric_sums, set_metric_sums
from stages.models.load import full_tensor, to_local
from stages.planning.plan import Plan
from stages.training.checkpoints import Checkpoints
from stages.training.randomness import random_state, set_random_state
from stages.training.records import Trace, best_step, is_over

log = logging.getLogger(__name__)


def train_to_the_end(trainer: ResumableTrainer, checkpoints: Checkpoints, params: CheckpointParams) -> None:
    """Train from the newest checkpoint, or from the start.

    Every process of a training calls it. A signal that asks to end lets the current step finish and be saved; then all
    processes raise SystemExit with 128 + its number. A second one, a while later, ends this process at once.
    Raises UserError if training stops early without a signal.
    """
    first = trainer.args.process_index == 0
    (newest,) = trainer.max_over_ranks((checkpoints.newest() or 0) if first else 0)
    trainer.checkpoints, trainer.trace = checkpoints, []
    num_steps = trainer.args.max_steps
    if trainer.plan.validation is not None:
        trainer.args.eval_on_start, trainer.args.eval_strategy = not newest, IntervalStrategy.STEPS
        trainer.args.eval_steps = trainer.plan.validation.every_steps  # and the last step
    if newest:
        log.info("resuming from step %d/%d", newest, num_steps)
    saving = SaveInTime(trainer, params)
    with handling(saving.on_signal):
        trainer.add_callback(saving)
        trainer.train(resume_from_checkpoint=str(checkpoints.at(newest)) if newest else None)
    ended, history = trainer.state.global_step, trainer.state.log_history
    stopped = is_over(history, trainer.plan.validation)
    if saving.ended_by and not stopped:
        log.info(
            "%s: stopped at step %d/%d, saved at step %d; run the same command to resume",
            *(signal.Signals(saving.ended_by).name, ended, num_steps, trainer.saved_step or 0),
        )
        raise SystemExit(128 + saving.ended_by)
    if trainer.has_diverged:
        log.warning("training diverged: the gradients of step %d/%d are not finite", ended, num_steps)
        if trainer.best_step() is None:
            raise UserError(
                f"recipe {trainer.plan.name}: training diverged at step {ended}/{num_steps}; lower its "
                "learning_rate, lengthen its warm-up, or let it keep: best"
            )
    elif ended != num_steps and not stopped:
        raise UserError(f"training stopped at step {ended}/{num_steps}")
    elif stopped:
        assert trainer.plan.validation is not None
        best = best_step(history, trainer.plan.validation, first=0)
        log.info(
            "stopped early at step %d/%d: the last %d validations are no better by %s than that of step %s",
            *(ended, num_steps, trainer.plan.validation.patience, trainer.plan.validation.by, best or "0, untrained"),
        )
    trainer.keep_best()


class SaveInTime(TrainerCallback):
    """Has the trainer save after a step when that is due, and stop if a signal asked this process to end.

    The processes of a training agree on the step: each has its own clock, and gets the signal at its own moment.
    """

    requested_by = 0
    """The signal that asked to end; 0 for none."""
    ended_by = 0
    """The signal that ended the training before its last step; 0 for none."""

    def __init__(self, trainer: ResumableTrainer, params: CheckpointParams) -> None:
        self.trainer = trainer
        self.params = params

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self.requested_by:
            self.requested_by, self._requested_at = number, time.monotonic()
            # Without logging: the interrupted code may hold its lock.
            with suppress(OSError):  # a closed terminal, or a pipe without a reader
                line = f"{signal.Signals(number).name}: stopping after this step (send again to stop now)\n"
                os.write(2, line.encode())
        elif time.monotonic() - self._requested_at > SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._since = time.monotonic()

    on_save = on_train_begin

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.trainer.has_diverged:
            control.should_training_stop, control.should_evaluate = True, False
        if state.global_step >= state.max_steps or self.trainer.has_diverged:
            return  # the training has ended, and its outputs are next
        minutes, steps = self.params.every_minutes, self.params.every_steps
        due = minutes is not None and time.monotonic() - self._since >= 60 * minutes
        due |= steps is not None and state.global_step % steps == 0
        self.ended_by, save = self.trainer.max_over_ranks(self.requested_by, int(due))
        control.should_save |= bool(self.ended_by or save)
        control.should_training_stop |= bool(self.ended_by)


class ResumableTrainer(CheckpointHooks, SFTTrainer):
    """Without checkpoints and a trace, which `train_to_the_end` sets, it adds nothing.

    The order of the samples is not part of a checkpoint: accelerate's sampler draws it from (seed, epoch) alone. Nor
    are the random numbers of data-loader workers: a collator that draws must do so from the sample and the epoch.
    """

    plan: Plan
    checkpoints: Checkpoints | None = None
    trace: Trace | None = None
    saved_step: int | None = None
    """The last step that has a checkpoint."""
    kept_step: int | None = None
    """The step of the weights that the training leaves, once it has ended."""

    _restored: dict[str, Any]
    """The part of a checkpoint that `restore_progress` takes; its tensors keep the whole file mapped."""
    _step_losses: list[torch.Tensor]
    """() of each micro-batch of the current step."""
    _began = 0.0
    """Start of the first step on this process's clock, had nothing interrupted the training."""

    @property
    def seconds(self) -> float:
        """Time of the steps so far, in this process and those that it resumes."""
        return time.monotonic() - self._began

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._began, self._step_losses = time.monotonic(), []
        self.current_gradient_accumulation_steps = 1  # of what is computed before the first step sets its own
        return super().train(*args, **kwargs)

    def max_over_ranks(self, *values: int) -> tuple[int, ...]:
        """The largest of each value over all processes, which must call it together."""
        if self.args.world_size == 1:
            return values
        tensor = torch.tensor(values, device=self.args.device)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return tuple(tensor.tolist())

    # The trace. Reading it waits for the GPU once a step, as SFTTrainer does for every micro-batch.

    def get_batch_samples(self, iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[Any, Any]:
        self._step_losses = []  # the rehearsal may have left some
        return super().get_batch_samples(iterator, num_batches, device)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.trace is not None:
            self._step_losses.append(loss)
        return loss

    def on_grad_norm(self, grad_norm: torch.Tensor) -> None:
        if self.trace is not None:
            loss = sum(self._step_losses[1:], start=self._step_losses[0])
            loss_bits, norm_bits = map(float.hex, torch.stack((loss, full_tensor(grad_norm).to(loss))).tolist())
            self.trace.append((loss_bits, norm_bits))

    @property
    def has_diverged(self) -> bool:
        """Whether the last step's gradients are not finite, and its weights with them: fp16 skips such a step."""
        if not self.trace or self.plan.memory.precision == "fp16":
            return False
        _, grad_norm = self.trace[-1]
        return not isfinite(float.fromhex(grad_norm))

    # Saving.

    def save_checkpoint(self) -> None:
        """Each process writes its part. A failure, as on a full disk, is a warning: the training goes on without it."""
        checkpoints, step, began = self.checkpoints, self.state.global_step, time.monotonic()
        assert checkpoints is not None
        folder, first, best = checkpoints.partial(step), self.args.process_index == 0, self.best_step()

        def write() -> None:
            folder.mkdir(exist_ok=True)
            save_state(self._captured(), folder / _file_of(self.args.process_index))
            if first:
                self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

        def complete() -> None:
            names = [TRAINER_STATE_NAME, *map(_file_of, range(self.args.world_size))]
            size_bytes = checkpoints.complete(step, names, best=best)
            log.info("saved at step %d: %.1f MB in %.1f s", step, size_bytes / 1e6, time.monotonic() - began)

        if self._succeeded_on_all_ranks(write) and self._succeeded_on_all_ranks(complete if first else None):
            self.saved_step = step
        else:
            if first:
                shutil.rmtree(folder, ignore_errors=True)
            if best == step:
                raise UserError(f"step {step} is the best so far and could not be saved; make room, and run it again")

    def _succeeded_on_all_ranks(self, action: Callable[[], None] | None) -> bool:
        """Whether the action raised no OSError in any process; each waits for all."""
        failed = False
        try:
            if action is not None:
                action()
        except OSError as error:
            failed = True
            log.warning("step %d could not be saved: %s", self.state.global_step, error)
        return self.max_over_ranks(int(failed)) == (0,)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: each for name, each in self.model.named_parameters() if each.requires_grad}

    def _captured(self) -> dict[str, Any]:
        """The state of this process. Without sharding, weights and optimizer are the same in all of them."""
        trained, scaler = self._trained(), self.accelerator.scaler
        state = {
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "random": random_state(),
            "totals": self.running_totals(),
            "metrics": metric_sums(self),
            "seconds": self.seconds,
            "trace": self.trace,
        }
        if self.args.process_index == 0 or any(isinstance(each, DTensor) for each in trained.values()):
            state |= {"weights": trained, "optimizer": self.optimizer.state_dict()}
        return state

    def best_step(self) -> int | None:
        """The step of the best validation so far, if the training leaves its weights."""
        validation = self.plan.validation
        return best_step(self.state.log_history, validation) if validation and validation.keep_best else None

    def keep_best(self) -> None:
        """At the end of a training: take the weights that it leaves from their checkpoint, if they are not the last."""
        self.kept_step = self.best_step() or self.state.global_step
        if self.kept_step != self.state.global_step:
            assert self.checkpoints is not None
            self._load_weights(self.checkpoints.at(self.kept_step))
            log.info("the weights kept are those of step %d, the best validation", self.kept_step)

    # Restoring, in Trainer's order.

    def _load_weights(self, checkpoint: Path) -> dict[str, Any]:
        """Copies the trained weights of a checkpoint into the model, and returns the rest of it."""
        state = load_state(checkpoint / _file_of(self.args.process_index))
        if "weights" not in state:
            first = load_state(checkpoint / _file_of(0))
            state |= {name: first[name] for name in ("weights", "optimizer")}
        weights, trained = state.pop("weights"), self._trained()
        assert trained.keys() == weights.keys(), trained.keys() ^ weights.keys()
        for name, parameter in trained.items():
            to_local(parameter.data).copy_(weights[name])
        return state

    def restore_state(self, checkpoint: Path) -> None:
        self._restored = restored = self._load_weights(checkpoint)
        self.trace, state = restored.pop("trace"), restored.pop("optimizer")
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state["state"] = {
            index: {name: _shared_like(parameters[index], value) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        if OPTIMIZERS[self.plan.memory.optimizer].paged:
            load_paged(optimizer, state)
        else:
            optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(restored.pop("scheduler"))
        if (scaler := restored.pop("scaler")) is not None:
            self.accelerator.scaler.load_state_dict(scaler)

    def restore_progress(self) -> None:
        restored = self._restored
        del self._restored
        set_random_state(restored["random"])
        self.set_running_totals(restored["totals"])
        set_metric_sums(self, restored["metrics"])
        self._began -= restored["seconds"]
        self.saved_step = self.state.global_step
        set_last_batch(self.accelerator, len(self.train_dataset) % (self.args.train_batch_size * self.args.world_size))

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader = super().get_train_dataloader()
        loader.base_dataloader.worker_init_fn = partial(_ignore_signals, loader.base_dataloader.worker_init_fn)
        return loader


def _file_of(process_index: int) -> str:
    return f"process-{process_index}.pt"


def _shared_like(parameter: torch.Tensor, value: Any) -> Any:
    """A restored optimizer state of a parameter: a DTensor if the parameter is one and the state has its shape, which
    the count of steps has not."""
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return DTensor.from_local(
        value.to(to_local(parameter).device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def load_paged(optimizer: Any, state: dict[str, Any]) -> None:
    """Load the state of one of bitsandbytes' paged optimizers, its moments into managed memory as the optimizer makes
    them: its own loading would leave them on the GPU for good. Its first step moves what else belongs there."""
    optimizer.load_state_dict(state, move_to_device=False)
    for parameter, values in optimizer.state.items():
        for name in values.keys() & {"state1", "state2"}:
            moments = optimizer.get_state_buffer(parameter, dtype=values[name].dtype)
            moments.copy_(values[name])
            values[name] = moments


def _ignore_signals(then: Callable[[int], None], worker: int) -> None:
    """Starts a data-loader worker that ends with the trainer alone.

    torchrun and Slurm signal all processes, and a trainer without its data could not finish its step.
    """
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    then(worker)


def save_state(state: Any, path: Path) -> None:
    """Write nested values to a file, a tensor in several places once; of a DTensor this process's share.

    Raises OSError, as on a full disk.
    """
    with path.open("wb") as file:  # given a path, torch raises RuntimeError for whatever goes wrong
        torch.save(tree_map_only(torch.Tensor, _own_memory, state), file)


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Without what else lies in the tensor's storage, which torch would write too."""
    tensor = to_local(tensor.detach())
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def load_state(path: Path) -> Any:
    """The state that `save_state` wrote, its tensors on the CPU. Only tensors and plain values are read."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
