"""Killed anywhere and started again, a training ends as if nothing had been: weights, trace, curves, totals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.kit.params import CheckpointParams
from stages.kit.plan import Plan
from stages.kit.training import checkpoints as on_disk
from stages.kit.training.checkpoints import Checkpoints, kept_checkpoints
from stages.kit.training.preemption import train_to_the_end
from stages.kit.training.progress import LiveMetrics, MetricFiles
from stages.kit.training.trace import StepBits
from stages.kit.training.trainer import RecipeTrainer
from tests.kit.training.test_trainer import PARAMS, build, plan_for, weights

__all__ = ["build"]  # the fixture

EVERY_STEP = CheckpointParams(every_minutes=None, every_steps=1, keep=2)
SELDOM = CheckpointParams(every_minutes=None, every_steps=None)

Build = Callable[..., RecipeTrainer]


class Killed(BaseException):
    """As SIGKILL: nothing of ours runs after it."""


class At(TrainerCallback):
    """Does something when a step has been taken, before it is saved."""

    def __init__(self, step: int, what: Callable[[], Any]) -> None:
        self.step, self.what = step, what

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.what()


def kill() -> None:
    raise Killed


class Outcome:
    """What a training leaves."""

    def __init__(self, trainer: RecipeTrainer, trace: list[StepBits], curves_dir: Path) -> None:
        self.weights = weights(trainer)
        self.trace = trace
        self.curves = {path.name: path.read_text() for path in sorted(curves_dir.rglob("*.tsv"))}
        self.logs = [
            {name: value for name, value in logs.items() if not name.endswith(("_runtime", "_per_second"))}
            for logs in trainer.state.log_history
        ]
        self.samples: list[list[int]] = []

    def is_that_of(self, other: Outcome) -> bool:
        assert self.trace == other.trace
        assert self.curves == other.curves
        assert self.logs == other.logs
        assert self.weights.keys() == other.weights.keys()
        return all(torch.equal(tensor, other.weights[name]) for name, tensor in self.weights.items())


class Workplace:
    """Trains in fresh trainers, over the same checkpoints."""

    def __init__(self, build: Build, folder: Path) -> None:
        self.build, self.folder = build, folder
        self.runs = 0

    def train(
        self, plan: Plan, params: CheckpointParams = EVERY_STEP, *, at: At | None = None, name: str = "this"
    ) -> Outcome:
        """name: by which the training is known."""
        self.runs += 1
        curves_dir = self.folder / f"curves-{self.runs}"
        trainer = self.build(plan)
        trainer.add_callback(LiveMetrics(MetricFiles(curves_dir)))
        if at is not None:
            trainer.add_callback(at)
        with kept_checkpoints(self.folder / "checkpoints", {"name": name}, keep=params.keep) as checkpoints:
            trace = train_to_the_end(trainer, checkpoints, params)
        return Outcome(trainer, trace, curves_dir)

    def checkpoints(self, name: str = "this") -> Checkpoints:
        return Checkpoints(folder=self.folder / "checkpoints" / on_disk.digest_of({"name": name}), keep=2)

    def steps(self, name: str = "this") -> list[str]:
        folder = self.checkpoints(name).folder
        return sorted(path.name for path in folder.glob("step-*")) if folder.exists() else []


@pytest.fixture
def workplace(build: Build, tmp_path: Path) -> Workplace:
    return Workplace(build, tmp_path)


@pytest.fixture
def elsewhere(build: Build, tmp_path: Path) -> Workplace:
    return Workplace(build, tmp_path / "elsewhere")


def lora_with_dropout() -> Plan:
    """Three epochs of 2 steps, the second of each smaller; a rate for each part; warm-up, cosine."""
    changes = {"part_learning_rates": {"vision": 3e-5}, "warmup_ratio": 0.3, "epochs": 3}
    plan = plan_for("r4-joint", micro_batch=2, samples=7, **changes)
    assert plan.lora is not None
    assert plan.lora.dropout > 0
    return plan


def full_with_accumulation() -> Plan:
    return plan_for("r2-vision-only", micro_batch=1, weight_decay=0.1)


@pytest.mark.parametrize("kind", [lora_with_dropout, full_with_accumulation])
def test_killed_at_any_step_a_training_ends_as_if_nothing_had_been(
    workplace: Workplace, elsewhere: Workplace, kind: Callable[[], Plan]
) -> None:
    plan = kind()
    undisturbed = elsewhere.train(plan, SELDOM)
    assert len(undisturbed.trace) == plan.schedule.num_steps
    # In the middle of an epoch and at its end, and again before anything new was saved.
    for step in (2, 3, 4, 4):
        with pytest.raises(Killed):
            workplace.train(plan, at=At(step, kill))
    assert workplace.train(plan).is_that_of(undisturbed)
