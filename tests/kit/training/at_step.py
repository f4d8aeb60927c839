"""Something that happens to a training at a step."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class At(TrainerCallback):
    """Does it when a step has been taken, before it is saved."""

    def __init__(self, step: int, what: Callable[[], Any]) -> None:
        self.step, self.what = step, what

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.what()
