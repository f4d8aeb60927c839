"""Killed anywhere and started again, a training ends as if nothing had been: weights, trace, curves, logs."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.core.params.schema import CheckpointParams, DeviceParams, PartsParams
from stages.core.signals import ENDING, handling
from stages.kit.mixture.build import merge_experts
from stages.kit.mixture.trainer import make_trainer
from stages.kit.models.adapters import apply_recipe, count_trainable
from stages.kit.models.load import load_model
from stages.kit.models.prompts import load_processor
from stages.kit.planning.plan import Plan
from stages.kit.training import checkpoints as on_disk
from stages.kit.training import resume
from stages.kit.training.batches import ConversationCollator
from stages.kit.training.checkpoints import Checkpoints, kept_checkpoints
from stages.kit.training.progress import Curves
from stages.kit.training.records import Trace
from stages.kit.training.resume import SaveInTime, load_state, save_state, seed_everything, train_to_the_end
from stages.kit.training.trainer import RecipeTrainer
from tests.kit.mixture.dense import conversation, save_base, save_expert, set_routers
from tests.kit.training import two_processes
from tests.kit.training.small import plan_for, weights
from tests.kit.training.two_processes import At

EVERY_STEP = CheckpointParams(every_minutes=None, every_steps=1)
WHEN_ASKED = CheckpointParams(every_minutes=None)

FULL = plan_for("r1-llm-only", micro_batch=1, parts=PartsParams(llm="full"), lora=None, weight_decay=0.1)
"""Two epochs of 2 steps of 4 micro-batches."""

LORA = replace(
    plan_for("r4-joint", micro_batch=2, samples=7, part_learning_rates={"vision": 3e-5}, warmup_ratio=0.3),
    precision="fp16",
)
"""Pictures, dropout, a base in nf4, the scale of fp16's gradients, which it halves after an overflow. Two epochs of 2
steps, the second of each smaller; a rate for each part; warm-up, cosine."""

SAMPLES = [conversation(f"Question {'so then ' * (number % 5)}{number}?", f"{number}.") for number in range(8)]

Build = Callable[[Plan], RecipeTrainer]


class Killed(BaseException):
    """Nothing catches it."""


def kill() -> None:
    raise Killed


def ask_to_end() -> None:
    signal.raise_signal(signal.SIGTERM)


class Outcome:
    """What a training leaves."""

    def __init__(self, trainer: RecipeTrainer, trace: Trace, curves_dir: Path) -> None:
        self.weights = weights(trainer)
        self.trace = trace
        self.curves = {path.name: path.read_text() for path in sorted(curves_dir.rglob("*.tsv"))}
        self.logs = [
            {name: value for name, value in logs.items() if not name.endswith(("_runtime", "_per_second"))}
            for logs in trainer.state.log_history
        ]

    def assert_same(self, other: Outcome) -> None:
        assert self.trace == other.trace
        assert self.curves == other.curves
        assert self.logs == other.logs
        assert self.weights.keys() == other.weights.keys()
        assert all(torch.equal(tensor, other.weights[name]) for name, tensor in self.weights.items())


class Workplace:
    """Trains in fresh trainers, over the same checkpoints."""

    def __init__(self, build: Build, folder: Path) -> None:
        self.build, self.folder = build, folder
        self.runs = 0

    def train(self, plan: Plan, params: CheckpointParams = EVERY_STEP, *, at: At | None = None) -> Outcome:
        self.runs += 1
        curves_dir = self.folder / f"curves-{self.runs}"
        trainer = self.build(plan)
        trainer.args.logging_steps = 3  # most checkpoints lie between two lines of the log
        trainer.add_callback(Curves(curves_dir))
        if at is not None:
            trainer.add_callback(at)
        with kept_checkpoints(self.folder / "checkpoints", {}, keep=params.keep) as checkpoints:
            return Outcome(trainer, train_to_the_end(trainer, checkpoints, params), curves_dir)

    def interrupt(self, plan: Plan, params: CheckpointParams = EVERY_STEP, *, at: At) -> None:
        with pytest.raises(Killed):
            self.train(plan, params, at=at)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(folder=self.folder / "checkpoints" / on_disk.digest_of({}), keep=2)

    @property
    def steps(self) -> list[int]:
        return [int(path.name.removeprefix("step-")) for path in sorted(self.checkpoints.folder.glob("step-*"))]


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of text alone, which takes milliseconds a step."""
    return save_base(tmp_path_factory.mktemp("models") / "base")


def text_trainer(folder: Path, plan: Plan, scratch_dir: Path) -> RecipeTrainer:
    seed_everything(plan.seed)
    model = load_model(folder, device=DeviceParams(kind="cpu"), precision="fp32")
    model.config.router_aux_loss_coef = 3.0  # of a mixture
    model = apply_recipe(model, plan.parts, plan.lora)
    processor = load_processor(folder, None)
    return make_trainer(
        replace(plan, trainable=asdict(count_trainable(model))),
        model=model,
        processor=processor,
        collator=ConversationCollator(processor, SAMPLES, lambda x: x, loss=plan.loss, max_length=2048),
        callbacks=[],
        report_to="none",
    )


def text_workplace(model_dir: Path, folder: Path) -> Workplace:
    return Workplace(lambda plan: text_trainer(model_dir, plan, folder), folder)


@pytest.fixture
def workplace(text_dir: Path, tmp_path: Path) -> Workplace:
    return text_workplace(text_dir, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Of FULL."""
    return text_workplace(text_dir, tmp_path_factory.mktemp("undisturbed")).train(FULL, WHEN_ASKED)


def test_a_full_training_killed_again_and_again_ends_as_if_nothing_had_been(
    workplace: Workplace, undisturbed: Outcome
) -> None:
    assert len(undisturbed.trace) == FULL.schedule.num_steps == 4
    # In the middle of an epoch and at its end, and once before anything new was saved.
    for step in (2, 3, 4, 4):
        workplace.interrupt(FULL, at=At(step, kill))
    workplace.train(FULL).assert_same(undisturbed)


def test_so_does_one_with_pictures_and_dropout_on_weights_in_4_bits(build: Build, tmp_path: Path) -> None:
    assert LORA.lora is not None
    assert LORA.lora.dropout > 0
    assert LORA.quantization == "nf4"
    workplace = Workplace(build, tmp_path)
    workplace.interrupt(LORA, at=At(4, kill))
    folder = workplace.checkpoints.at(3)
    assert {path.name for path in folder.iterdir()} == {
        *("process-0.safetensors", "trainer_state.json", "manifest.json")
    }
    saved = load_state(folder / "process-0.safetensors")
    resumed = workplace.train(LORA)
    assert saved["weights"].keys() == resumed.weights.keys()  # of what is trained alone
    assert len(resumed.trace) == 4
    resumed.assert_same(Workplace(build, tmp_path / "elsewhere").train(LORA, WHEN_ASKED))


def test_so_does_a_mixture_whose_experts_are_kept_in_balance(text_dir: Path, tmp_path: Path) -> None:
    """Its routers are far from balanced, so that the auxiliary loss matters."""
    experts = {name: save_expert(tmp_path / name, text_dir, seed=seed) for seed, name in enumerate("abc", 1)}
    (tmp_path / "moe").mkdir()
    merge_experts(text_dir, experts, tmp_path / "moe", top_k=2)
    set_routers(tmp_path / "moe", torch.randn(2, 3, 32))
    plan = replace(FULL, schedule=replace(FULL.schedule, micro_batch=2, grad_accumulation=2))
    undisturbed = text_workplace(tmp_path / "moe", tmp_path / "undisturbed").train(plan, WHEN_ASKED)
    assert all("aux_loss" in logs for logs in undisturbed.logs if "loss" in logs)
    workplace = text_workplace(tmp_path / "moe", tmp_path / "disturbed")
    workplace.interrupt(plan, at=At(3, kill))
    workplace.train(plan).assert_same(undisturbed)


def test_the_order_of_samples_is_drawn_from_seed_and_epoch_alone(text_dir: Path, tmp_path: Path) -> None:
    taken: list[int] = []

    def build(plan: Plan) -> RecipeTrainer:
        trainer = text_trainer(text_dir, plan, tmp_path)
        trainer.remove_callback(trainer.rehearsal)
        collator = trainer.data_collator

        def collate(examples: Any) -> Any:
            taken.extend(example["sample"] for example in examples)
            return collator(examples)

        trainer.data_collator = collate
        return trainer

    def draw() -> None:
        random.random()
        np.random.rand(5)  # noqa: NPY002
        torch.rand(7)

    def order(seed: int, at: At | None = None) -> list[int]:
        taken.clear()
        Workplace(build, tmp_path / str(seed)).train(replace(FULL, seed=seed), WHEN_ASKED, at=at)
        return [*taken]

    plain = order(1)
    assert sorted(plain[:8]) == sorted(plain[8:]) == list(range(8))
    assert plain[:8] != plain[8:]
    assert order(1, At(1, draw)) == plain
    assert order(2) != plain
    Workplace(build, tmp_path).interrupt(replace(FULL, seed=1), at=At(4, kill))
    taken.clear()
    Workplace(build, tmp_path).train(replace(FULL, seed=1))
    assert taken == plain[12:]


def test_asked_to_end_it_saves_after_the_step_says_so_and_fails(
    workplace: Workplace, undisturbed: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="stages")
    with pytest.raises(SystemExit) as end:
        workplace.train(FULL, WHEN_ASKED, at=At(3, ask_to_end))
    assert end.value.code == 128 + signal.SIGTERM
    assert "SIGTERM: saved at step 3/4; run the same command to resume" in caplog.messages
    assert workplace.steps == [3]
    assert not (workplace.checkpoints.folder / on_disk.FINISHED).exists()
    workplace.train(FULL, WHEN_ASKED).assert_same(undisturbed)
    assert "resuming from step 3/4" in caplog.messages
    assert (workplace.checkpoints.folder / on_disk.FINISHED).exists()


def test_asked_to_end_in_its_last_step_it_finishes(workplace: Workplace, undisturbed: Outcome) -> None:
    workplace.train(FULL, WHEN_ASKED, at=At(4, ask_to_end)).assert_same(undisturbed)
    assert workplace.steps == []


@contextmanager
def asked_to_end() -> Iterator[SaveInTime]:
    """What a training does with signals."""
    request = SaveInTime(Any, WHEN_ASKED)  # type: ignore[arg-type]
    with handling(request.on_signal):
        yield request


@pytest.mark.parametrize("number", ENDING)
def test_signals_of_one_request_are_one_and_a_later_one_ends_it_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    with asked_to_end() as request:
        assert request.requested_by == 0
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGHUP)
        assert request.requested_by == number
    assert signal.getsignal(number) == before
    assert capfd.readouterr().err == f"{number.name}: stopping after this step (send again to stop now)\n"
    monkeypatch.setattr(resume, "SAME_REQUEST_S", -1.0)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    with asked_to_end():
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert signal.getsignal(number) == signal.SIG_DFL
    assert sent == [(os.getpid(), number)]


def test_a_closed_stderr_is_no_error() -> None:
    """`dvc repro 2>&1 | tee log`, and Ctrl-C ends tee first; a terminal that was closed is the same."""
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.dup(2)
    os.dup2(writer, 2)
    try:
        with asked_to_end() as request:
            signal.raise_signal(signal.SIGHUP)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(writer)
    assert request.requested_by == signal.SIGHUP


def test_by_the_clock_it_saves_when_that_is_due(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def later() -> None:
        nonlocal now
        now += 600

    monkeypatch.setattr(time, "monotonic", lambda: now)
    workplace.train(FULL, CheckpointParams(every_minutes=10), at=At(2, later))
    assert workplace.steps == [2]


def test_a_damaged_checkpoint_is_passed_over_its_file_named_and_the_one_before_used(
    workplace: Workplace, undisturbed: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    workplace.interrupt(FULL, at=At(4, kill))
    assert workplace.steps == [2, 3]
    damaged = workplace.checkpoints.at(3) / "process-0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    caplog.set_level(logging.INFO, logger="stages")
    workplace.train(FULL).assert_same(undisturbed)
    assert (
        f"{damaged} differs from its digest in {damaged.parent.name}/manifest.json; skipping this checkpoint"
        in caplog.messages
    )
    assert "resuming from step 2/4" in caplog.messages


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_the_checkpoint_and_not_the_training(
    workplace: Workplace, undisturbed: Outcome, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved = []

    def full_at_step_2(state: Any, path: Path) -> None:
        saved.append(path)
        save_state(state, path)
        if len(saved) == 2:
            full_disk()

    monkeypatch.setattr(resume, "save_state", full_at_step_2)
    workplace.train(FULL).assert_same(undisturbed)
    assert "step 2 could not be saved: [Errno 28] No space left on device" in caplog.text
    assert workplace.steps == [1, 3]
    assert not list(workplace.checkpoints.folder.glob(".*"))


def test_asked_to_end_on_a_full_disk_it_says_from_where_it_goes_on(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workplace.interrupt(FULL, at=At(3, kill))
    monkeypatch.setattr(on_disk, "_sync", full_disk)
    caplog.set_level(logging.INFO, logger="stages")
    with pytest.raises(SystemExit) as end:
        workplace.train(FULL, WHEN_ASKED, at=At(3, ask_to_end))
    assert end.value.code == 128 + signal.SIGTERM
    last_words = "step 3/4 could not be saved; the same command resumes from step 2"
    assert f"SIGTERM: {last_words}" in caplog.messages


@pytest.mark.timeout(1200)  # both wait for each other, on a busy machine for their turns too
def test_processes_that_train_together_end_and_go_on_together(tmp_path: Path) -> None:
    """Placements ddp and sharded. Only the second process is asked, and the worker that loads its data."""
    server = multiprocessing.get_context("forkserver")  # imports torch once for both
    server.set_forkserver_preload([two_processes.__name__])
    processes = [server.Process(target=two_processes.main, args=(rank, tmp_path)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    for rank in range(2):
        for placement, found in json.loads((tmp_path / f"found-{rank}.json").read_text()).items():
            assert found["codes"] == [128 + signal.SIGTERM, 0]
            assert found["steps"] == [3, 3]
            assert found["resumed"] == found["undisturbed"]
            alone = {"weights", "optimizer"} if rank == 0 or placement == "sharded" else set()
            assert {"weights", "optimizer", "random"} & set(found["saved"]) == {"random", *alone}
