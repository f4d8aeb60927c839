"""Progress and curves of a running training: a bar or lines for a person, DVCLive's files for tools."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

from dvclive import Live
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

log = logging.getLogger(__name__)

CURVES = ("loss", "grad_norm", "learning_rate", "mean_token_accuracy", "router_accuracy")


def progress_callback() -> TrainerCallback:
    """transformers' bar on a terminal, lines elsewhere; training arguments say disable_tqdm, or it would show twice."""
    return ProgressCallback() if sys.stderr.isatty() else LineProgress()


class LineProgress(TrainerCallback):
    """One line a logging interval, for logs and pipes."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.started, self.first = time.monotonic(), state.global_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, logs: dict[str, float], **_: Any
    ) -> None:
        if "loss" not in logs or not state.is_world_process_zero:
            return
        rate = (state.global_step - self.first) / (time.monotonic() - self.started)
        left = (state.max_steps - state.global_step) / rate
        log.info(
            "step %d/%d  loss %.4f  %.2f steps/s  %d:%02d left",
            *(state.global_step, state.max_steps, logs["loss"], rate, left // 60, left % 60),
        )


class CurveFiles(Live):
    """DVCLive without DVC: it would look for a DVC repository, make one where there is only git, and write to its
    .dvc/tmp, which no stage may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), dvcyaml=None, save_dvc_exp=False, report=None)

    def _init_dvc(self) -> None:
        self._dvc_file = self._init_dvc_file()


class Curves(TrainerCallback):
    """Writes training metrics into DVCLive's files, for `dvc plots` and the report.

    transformers' own DVCLiveCallback also writes all training arguments, which hold paths of this machine.
    """

    def __init__(self, folder: Path) -> None:
        self.live = CurveFiles(folder)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for logs in state.log_history:  # from before the checkpoint that this training resumes from
            self._write(int(logs["step"]), logs)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, logs: dict[str, float], **_: Any
    ) -> None:
        self._write(state.global_step, logs)

    def _write(self, step: int, logs: dict[str, float]) -> None:
        if "loss" not in logs:
            return
        self.live.step = step
        for name in CURVES:
            if name in logs:
                self.live.log_metric(f"train/{name}", float(logs[name]), timestamp=False)
