"""A training that is saved as it goes, and when it is asked to end: the same command then goes on from there."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.core.errors import UserError
from stages.core.params.schema import CheckpointParams
from stages.core.signals import SAME_REQUEST_S, handled_signals
from stages.kit.training.checkpoints import Checkpoints
from stages.kit.training.resumable import ResumableTrainer
from stages.kit.training.trace import StepBits

log = logging.getLogger(__name__)


def train_to_the_end(trainer: ResumableTrainer, checkpoints: Checkpoints, params: CheckpointParams) -> list[StepBits]:
    """Train from the newest checkpoint on, or from the start; returns what every step came to.

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
    with asked_to_end() as request:
        saving = SaveInTime(trainer, request, params)
        trainer.add_callback(saving)
        trainer.train(resume_from_checkpoint=str(checkpoints.at(newest)) if newest else None)
    ended = trainer.state.global_step
    if saving.ends_by:
        log.info("%s: %s", signal.Signals(saving.ends_by).name, _last_words(ended, num_steps, trainer.saved_step))
        raise SystemExit(128 + saving.ends_by)
    if ended != num_steps:
        raise UserError(f"training stopped at step {ended} of {num_steps}")
    return trainer.trace


def _last_words(step: int, num_steps: int, saved_step: int | None) -> str:
    if saved_step == step:
        return f"saved at step {step} of {num_steps}; the same command goes on from there"
    again = f"goes on from step {saved_step}" if saved_step else "starts anew"
    return f"ended at step {step} of {num_steps}, which could not be saved; the same command {again}"


class EndRequest:
    """Whether somebody asked this process to end."""

    number: int = 0
    """The signal; 0 where nobody did."""
    _at = 0.0

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._at = number, time.monotonic()
            # No logging, nor any other lock that whatever was interrupted may hold.
            with suppress(OSError):  # of a terminal that was closed, or a pipe that nobody reads any more
                os.write(2, f"{signal.Signals(number).name}: ends after this step; asked again, at once\n".encode())
        elif time.monotonic() - self._at > SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def asked_to_end() -> Iterator[EndRequest]:
    """Takes the signals that ask to end, and tells of them."""
    request = EndRequest()
    before = {number: signal.signal(number, request.on_signal) for number in handled_signals()}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SaveInTime(TrainerCallback):
    """Has the trainer save after a step where it is due, and stop where it was asked to end.

    The processes of a training agree on the step: each has its own clock, and is told to end at a moment of its own.
    """

    def __init__(self, trainer: ResumableTrainer, request: EndRequest, params: CheckpointParams) -> None:
        self.trainer = trainer
        self.request = request
        self.params = params
        self.ends_by = 0
        """The signal that ended the training before its last step; 0 where none did."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._since = time.monotonic()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._since = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            return  # it has ended anyway, and its outputs are next
        self.ends_by, due = self.trainer.agreed(self.request.number, int(self._is_due(state.global_step)))
        control.should_save |= bool(self.ends_by or due)
        control.should_training_stop |= bool(self.ends_by)

    def _is_due(self, step: int) -> bool:
        minutes, steps = self.params.every_minutes, self.params.every_steps
        return (minutes is not None and time.monotonic() - self._since >= 60 * minutes) or (
            steps is not None and step % steps == 0
        )
