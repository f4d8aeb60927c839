"""A trainer that can stop after any step, and goes on from there bit for bit as if it never had.

transformers' Trainer knows when to save, which samples to skip, and when to restore what. What it would write is not
used: whole models, in their final place, and pickles. Each of its hooks that saves or restores has a form of its own
here: what is trained, the optimizer's states, schedule, scaler, random numbers, and the counts that lie between two
lines of the log, as safetensors and JSON, in a checkpoint that is complete or absent.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers.trainer import TRAINER_STATE_NAME
from trl import SFTTrainer

from stages.core.signals import ENDING
from stages.kit.models.sharding import local, whole
from stages.kit.training.checkpoints import Checkpoints
from stages.kit.training.seed import random_state, set_random_state
from stages.kit.training.states import SUFFIXES, load_state, save_state
from stages.kit.training.trace import TRACE_FILE, StepBits, read_trace, write_trace

log = logging.getLogger(__name__)


class ResumableTrainer(SFTTrainer):
    """Without checkpoints and a trace, which preemption.py gives it, it does nothing of its own.

    The order of the samples is no part of a checkpoint: accelerate's sampler draws it from (seed, epoch) alone. Nor is
    what a data loader's workers may have drawn: a collator that draws has to do it from the sample and the epoch.
    """

    checkpoints: Checkpoints | None = None
    trace: list[StepBits] | None = None
    saved_step: int | None = None
    """The last step of which there is a checkpoint."""

    _restored: dict[str, Any] | None = None
    """Of the checkpoint that is gone on from, what is still to be put in its place."""
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

    # What each step came to. Reading it waits for the GPU once a step, as SFTTrainer does for every micro-batch.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        self._step_losses = []  # a rehearsal may have left some
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.trace is not None:
            self._step_losses.append(loss)
        return loss

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        grad_norm = super()._get_grad_norm(model, grad_norm)
        if self.trace is not None:
            loss = sum(self._step_losses[1:], start=self._step_losses[0])
            self.trace.append(StepBits.of(*torch.stack((loss, whole(grad_norm).to(loss))).tolist()))
        return grad_norm

    # Saving.

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """A checkpoint of the step that has just ended, each process its part.

        A failure is warned of, and the training goes on: a full disk, say, costs the insurance, not the work.
        """
        checkpoints, step, began = self.checkpoints, self.state.global_step, time.monotonic()
        assert checkpoints is not None
        first = self.args.process_index == 0
        self.store_flos()

        def write() -> None:
            aside = checkpoints.aside(step)
            save_state(self._captured(), aside / _stem(self.args.process_index))
            if first:
                self.state.save_to_json(str(aside / TRAINER_STATE_NAME))
                write_trace(self.trace or [], aside / TRACE_FILE)

        def complete() -> None:
            parts = [f"{_stem(rank)}{suffix}" for rank in range(self.args.world_size) for suffix in SUFFIXES]
            size_bytes = checkpoints.complete(step, [*parts, TRAINER_STATE_NAME, TRACE_FILE])
            log.info("saved at step %d: %.1f MB in %.1f s", step, size_bytes / 1e6, time.monotonic() - began)

        def nothing() -> None: ...

        in_turn = (partial(checkpoints.begin, step) if first else nothing, write, complete if first else nothing)
        if all(self._went_well(what) for what in in_turn):
            self.saved_step = step
        elif first:
            checkpoints.abandon(step)

    def _went_well(self, what: Callable[[], None]) -> bool:
        """Whether it did in every process; each waits for all."""
        failed = False
        try:
            what()
        except OSError as error:
            failed = True
            log.warning("step %d could not be saved: %s", self.state.global_step, error)
        return self.agreed(int(failed)) == (0,)

    def _captured(self) -> dict[str, Any]:
        """What this process alone has. Without sharding, weights and optimizer are the same everywhere."""
        trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        scaler = self.accelerator.scaler
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
        }
        if self.args.process_index == 0 or any(isinstance(each, DTensor) for each in trained.values()):
            state |= {"weights": trained, "optimizer": self.optimizer.state_dict()}
        return state

    # Restoring, in the order in which Trainer asks for it.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        restored = load_state(folder / _stem(self.args.process_index))
        if "weights" not in restored:
            whole_state = load_state(folder / _stem(0))
            restored |= {name: whole_state[name] for name in ("weights", "optimizer")}
        weights = restored.pop("weights")
        trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        assert trained.keys() == weights.keys(), trained.keys() ^ weights.keys()
        for name, parameter in trained.items():
            local(parameter.data).copy_(weights[name])
        self.trace = read_trace(folder / TRACE_FILE)
        self._restored = restored

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        assert self._restored is not None
        state = self._restored.pop("optimizer")
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, values in state["state"].items():
            values |= {name: _shared_like(parameters[index], value) for name, value in values.items()}
        self.optimizer.load_state_dict(state)
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
        loader = self.accelerator.gradient_state.active_dataloader
        if loader is not None:  # begun after some batches, accelerate's does not know how many samples its last one has
            loader.remainder = len(self.train_dataset) % (self.args.train_batch_size * self.args.world_size)

    # The samples.

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader = super().get_train_dataloader()
        loader.base_dataloader.worker_init_fn = partial(_deaf_worker, loader.base_dataloader.worker_init_fn)
        return loader


def _stem(process_index: int) -> str:
    return f"process-{process_index}"


def _shared_like(parameter: torch.Tensor, value: Any) -> Any:
    """A restored state of a parameter, as the optimizer had it: where the parameter is a DTensor, so is what has its
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


def _deaf_worker(then: Callable[[int], None], worker: int) -> None:
    """Begins a data-loader worker, which ends with the trainer alone.

    torchrun and Slurm ask all processes to end, and a trainer whose data ends at once could not finish its step.
    """
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    then(worker)
