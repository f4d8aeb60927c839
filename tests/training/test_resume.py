"""A training that is killed anywhere and started again ends as if nothing had been: weights, trace, curves, log."""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes.optim import PagedAdamW8bit
from torch.utils._pytree import tree_leaves

from stages.core.errors import UserError
from stages.core.lineage import json_digest
from stages.core.params.schema import CheckpointParams, LoraParams, PartsParams
from stages.core.signals import ENDING, handling
from stages.evaluation.validation import Validator, choose_samples
from stages.mixture.build import merge_experts
from stages.planning.plan import Plan
from stages.training import checkpoints as on_disk
from stages.training.checkpoints import Checkpoints, kept_checkpoints
from stages.training.randomness import random_state
from stages.training.records import TrainingSummary, write_curves
from stages.training.resume import (
    SaveInTime,
    load_state,
    save_state,
    train_to_the_end,
)
from stages.training.trainer import RecipeTrainer
from tests.mixture.dense import conversation, save_base, save_expert, set_routers
from tests.plans import changed
from tests.training.small import At, Killed, kill, log_of, plan_for, trainer_on, validation, weights

EVERY_STEP = CheckpointParams(every_minutes=None, every_steps=1)
ON_SIGNALS = CheckpointParams(every_minutes=None)

IN_FULL: dict[str, Any] = {"parts": PartsParams(llm="full"), "lora": None, "quantization": "none"}
FULL = plan_for("r1-llm-only", micro_batch=1, weight_decay=0.1, **IN_FULL)
"""Two epochs of 2 steps of 4 micro-batches."""

LORA = changed(
    plan_for("r4-joint", micro_batch=2, samples=7, part_learning_rates={"vision": 3e-5}, warmup_ratio=0.3),
    precision="fp16",
)
"""Images, dropout, a base in nf4, fp16 with its scaler, which halves its scale after an overflow. Two epochs of 2
steps, the second of each smaller; a rate for each part; warm-up, cosine."""

SAMPLES = [conversation(f"Question {'so then ' * (number % 5)}{number}?", f"{number}.") for number in range(8)]

Build = Callable[[Plan], RecipeTrainer]


def request_end() -> None:
    signal.raise_signal(signal.SIGTERM)


class Outcome:
    """Everything that a training leaves."""

    def __init__(self, trainer: RecipeTrainer, curves_dir: Path) -> None:
        assert trainer.trace is not None
        self.weights = weights(trainer)
        self.trace = trainer.trace
        curves = curves_dir / "plots/metrics"
        self.curves = {f"{path.parent.name}/{path.name}": path.read_text() for path in sorted(curves.rglob("*.tsv"))}
        self.log = log_of(trainer)

    def assert_same(self, other: Outcome) -> None:
        assert self.trace == other.trace
        assert self.curves == other.curves
        assert self.log == other.log
        assert self.weights.keys() == other.weights.keys()
        assert all(torch.equal(tensor, other.weights[name]) for name, tensor in self.weights.items())


class Workplace:
    """Trains in fresh trainers, over the same checkpoints."""

    trainer: RecipeTrainer
    """The last one."""

    def __init__(self, build: Build, folder: Path) -> None:
        self.build, self.folder = build, folder
        self.runs = 0

    def train(self, plan: Plan, params: CheckpointParams = EVERY_STEP, *, at: At | None = None) -> Outcome:
        self.runs += 1
        curves_dir = self.folder / f"curves-{self.runs}"
        self.trainer = trainer = self.build(plan)
        trainer.args.logging_steps = 3  # most checkpoints lie between two lines of the log
        if at is not None:
            trainer.add_callback(at)
        with kept_checkpoints(self.folder / "checkpoints", {}, keep=params.keep) as checkpoints:
            train_to_the_end(trainer, checkpoints, params)
            assert "_restored" not in vars(trainer), "a checkpoint that was restored stays mapped"
            write_curves(trainer.state.log_history, curves_dir)
            return Outcome(trainer, curves_dir)

    def interrupt(self, plan: Plan, params: CheckpointParams = EVERY_STEP, *, at: At) -> None:
        with pytest.raises(Killed):
            self.train(plan, params, at=at)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(folder=self.folder / "checkpoints" / json_digest({}), keep=2)

    @property
    def steps(self) -> list[int]:
        return [int(path.name.removeprefix("step-")) for path in sorted(self.checkpoints.folder.glob("step-*"))]


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of text alone, which takes milliseconds a step."""
    return save_base(tmp_path_factory.mktemp("models") / "base")


DROPOUT = LoraParams(rank=4, alpha=8, dropout=0.2, targets={"llm": ("all-linear",)})
UNSEEN = plan_for("r1-llm-only", micro_batch=1, quantization="none", lora=DROPOUT)
VALIDATED = replace(UNSEEN, validation=validation(every_steps=1, samples=5, score_samples=2))
"""UNSEEN with validation."""


def draw(model: Any) -> float:
    """A score that leaves traces where it can: of its model, in random numbers, and in what the model caches."""
    assert not model.training
    random.random()
    np.random.rand(5)  # noqa: NPY002
    torch.rand(7)
    model(torch.tensor([[1, 2, 3]]), use_cache=True)
    return float(next(each for each in model.parameters() if each.requires_grad).double().sum())


def text_trainer(folder: Path, plan: Plan, scores: Mapping[int, float] | None = None) -> RecipeTrainer:
    """scores: of validations by step, in place of `draw`."""
    trainer = trainer_on(folder, SAMPLES, plan, aux_loss=3.0)
    if plan.validation is not None:
        collator = trainer.data_collator
        score = draw if scores is None else lambda _: scores[trainer.state.global_step]
        trainer.validator = Validator(collator=collator, chosen=choose_samples(collator, plan), score=score)
    return trainer


def text_workplace(model_dir: Path, folder: Path, scores: Mapping[int, float] | None = None) -> Workplace:
    return Workplace(lambda plan: text_trainer(model_dir, plan, scores), folder)


@pytest.fixture
def workplace(text_dir: Path, tmp_path: Path) -> Workplace:
    return text_workplace(text_dir, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The outcome of FULL."""
    return text_workplace(text_dir, tmp_path_factory.mktemp("undisturbed")).train(FULL, ON_SIGNALS)


def test_a_full_training_killed_again_and_again(workplace: Workplace, undisturbed: Outcome) -> None:
    assert len(undisturbed.trace) == FULL.schedule.num_steps == 4
    # Within an epoch and at its end, and once before anything new was saved.
    for step in (2, 4, 4):
        workplace.interrupt(FULL, at=At(step, kill))
    workplace.train(FULL).assert_same(undisturbed)


@pytest.fixture(scope="module")
def validated(text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The outcome of VALIDATED."""
    return text_workplace(text_dir, tmp_path_factory.mktemp("validated")).train(VALIDATED, ON_SIGNALS)


def test_validation_changes_nothing_else_and_a_killed_training_has_the_same_curves(
    workplace: Workplace, text_dir: Path, tmp_path: Path, validated: Outcome
) -> None:
    assert [entry["step"] for entry in validated.log if "eval_loss" in entry] == [0, 1, 2, 3, 4]
    assert all(validated.curves[f"validation/{name}.tsv"].count("\n") == 6 for name in ("loss", "score"))
    workplace.interrupt(VALIDATED, at=At(3, kill))
    workplace.train(VALIDATED).assert_same(validated)
    plain = copy(validated)
    plain.log = [entry for entry in validated.log if "eval_loss" not in entry]
    plain.curves = {name: curve for name, curve in validated.curves.items() if name.startswith("train/")}
    plain.assert_same(text_workplace(text_dir, tmp_path / "unseen").train(UNSEEN, ON_SIGNALS))


def chosen(**changes: Any) -> Plan:
    return replace(FULL, validation=validation(every_steps=1, samples=5, score_samples=2, by="score", **changes))


def test_the_best_weights_are_kept_though_it_is_killed_and_loses_them(
    text_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan, scores = chosen(keep_best=True), {0: 1.0, 1: 0.1, 2: 0.9, 3: 0.2, 4: 0.5}
    one_kept = replace(EVERY_STEP, keep=1)
    calm = text_workplace(text_dir, tmp_path / "calm", scores)
    kept = calm.train(plan, replace(ON_SIGNALS, keep=1))
    assert calm.steps == [2]  # the first best one went with the second
    saved = load_state(calm.checkpoints.at(2) / "process-0.pt")
    assert all(torch.equal(saved["weights"][name], tensor) for name, tensor in kept.weights.items())
    killed = text_workplace(text_dir, tmp_path / "killed", scores)
    killed.interrupt(plan, one_kept, at=At(4, kill))
    assert killed.steps == [2, 3]
    killed.train(plan, one_kept).assert_same(kept)
    killed.interrupt(plan, one_kept, at=At(4, kill))
    (killed.checkpoints.at(2) / "process-0.pt").write_bytes(b"damaged")
    killed.train(plan, one_kept).assert_same(kept)
    assert f"{killed.checkpoints.at(2) / 'process-0.pt'} differs" in caplog.text


VARIANTS = {
    **{name: changed(FULL, optimizer=name) for name in ("lion_32bit", "muon", "adafactor")},
    "noise": changed(FULL, neftune_alpha=5.0),
    "DoRA, LoRA+": changed(UNSEEN, lora=replace(DROPOUT, dora=True, loraplus_lr_ratio=9.0)),
    "PiSSA": changed(UNSEEN, lora=replace(DROPOUT, init="pissa", rslora=True)),
    "OLoRA": changed(UNSEEN, lora=replace(DROPOUT, init="olora")),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_killed_in_its_last_step_takes_it_again_alike(
    workplace: Workplace, undisturbed: Outcome, name: str
) -> None:
    plan = VARIANTS[name]
    workplace.interrupt(plan, at=At(4, kill))
    killed = workplace.trainer
    assert workplace.steps[-1] == 3
    resumed = workplace.train(plan)
    assert resumed.trace == killed.trace
    assert resumed.trace[-1] != undisturbed.trace[-1]
    assert all(torch.equal(tensor, resumed.weights[name]) for name, tensor in weights(killed).items())


def test_validation_has_no_noise_and_draws_none(text_dir: Path, tmp_path: Path, validated: Outcome) -> None:
    plan = changed(VALIDATED, neftune_alpha=5.0)
    noisy, unseen = (
        text_workplace(text_dir, tmp_path / name).train(each, ON_SIGNALS)
        for name, each in {"noisy": plan, "unseen": replace(plan, validation=None)}.items()
    )
    assert noisy.log[0]["eval_loss"] == validated.log[0]["eval_loss"]
    assert noisy.trace == unseen.trace != validated.trace


@pytest.mark.parametrize("end", [kill, request_end])
def test_it_stops_early_and_does_not_go_on_when_resumed(
    text_dir: Path, tmp_path: Path, undisturbed: Outcome, end: Callable[[], None]
) -> None:
    plan, scores = chosen(patience=2), {0: 0.1, 1: 0.5, 2: 0.5, 3: 0.4, 4: 0.9}
    workplace = text_workplace(text_dir, tmp_path, scores)
    if end is kill:
        workplace.interrupt(plan, at=At(3, kill))
        stopped = workplace.train(plan)
    else:  # the signal comes in the step after which it stops anyway
        stopped = workplace.train(plan, at=At(3, end))
    assert len(stopped.trace) == 3
    assert workplace.steps[-1] < 3
    assert stopped.trace == undisturbed.trace[:3]


def test_it_stops_early_though_it_gets_better_if_the_untrained_model_was_best(
    text_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="stages")
    scores = {0: 0.9, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    stopped = text_workplace(text_dir, tmp_path, scores).train(chosen(patience=3))
    assert len(stopped.trace) == 3
    assert "the last 3 validations are no better by score than that of step 0, untrained" in caplog.text


def test_a_training_that_diverged_ends_and_leaves_no_weights_but_its_best(text_dir: Path, tmp_path: Path) -> None:
    rates = dict.fromkeys(FULL.schedule.learning_rates, 1e30)
    diverging = replace(FULL, schedule=replace(FULL.schedule, learning_rates=rates))
    last = text_workplace(text_dir, tmp_path / "last")
    for message in ("training diverged at step 3/4", "a training that was resumed has diverged"):
        with pytest.raises(UserError, match=message):
            last.train(diverging)
        assert last.steps == [1, 2]
    asked = {0: 0.5, 1: 0.5}  # the first step's rate is 0, as it warms up; then nothing can be scored
    validated = replace(diverging, validation=chosen(keep_best=True).validation)
    kept = text_workplace(text_dir, tmp_path / "best", asked).train(validated)
    assert kept.curves["validation/score.tsv"].split()[2:] == ["0", "0.5", "1", "0.5", "2", "nan"]
    assert all(bool(tensor.isfinite().all()) for tensor in kept.weights.values())


def test_fp16_skips_and_counts_a_step_that_overflows_and_can_be_interrupted_after_it(
    text_dir: Path, tmp_path: Path
) -> None:
    trainers: list[RecipeTrainer] = []

    def overflowing(plan: Plan) -> RecipeTrainer:
        trainers.append(trainer := text_trainer(text_dir, plan))
        loss = trainer.compute_loss

        def compute_loss(*args: Any, **options: Any) -> torch.Tensor:
            return loss(*args, **options) * (torch.nan if trainer.state.global_step == 1 else 1)

        trainer.compute_loss = compute_loss  # type: ignore[method-assign]
        return trainer

    plan, workplace = changed(UNSEEN, precision="fp16"), Workplace(overflowing, tmp_path)
    with pytest.raises(SystemExit):
        workplace.train(plan, at=At(3, request_end))
    resumed = workplace.train(plan)
    assert [float.fromhex(grad_norm) > 0 for _, grad_norm in resumed.trace] == [True, False, True, True]
    assert "nan" not in resumed.curves["train/loss.tsv"]
    record = TrainingSummary.of(trainers[-1], attempt=0)
    assert record.skipped_steps == 1
    assert "4 steps (1 skipped, as gradients overflowed)" in record.summary()


def test_a_killed_training_with_images_and_dropout_on_weights_in_4_bits(build: Build, tmp_path: Path) -> None:
    assert LORA.recipe.lora is not None
    assert LORA.recipe.lora.dropout > 0
    assert LORA.quantization == "nf4"
    workplace = Workplace(build, tmp_path)
    workplace.interrupt(LORA, at=At(4, kill))
    folder = workplace.checkpoints.at(3)
    files = {"process-0.pt", "trainer_state.json", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == files
    saved = load_state(folder / "process-0.pt")
    resumed = workplace.train(LORA)
    assert saved["weights"].keys() == resumed.weights.keys()  # trained weights alone
    assert len(resumed.trace) == 4
    resumed.assert_same(Workplace(build, tmp_path / "elsewhere").train(LORA, ON_SIGNALS))


def test_a_killed_mixture_whose_experts_are_kept_in_balance(text_dir: Path, tmp_path: Path) -> None:
    """Its routers are far from balanced, so that the auxiliary loss matters."""
    experts = {name: save_expert(tmp_path / name, text_dir, seed=seed) for seed, name in enumerate("abc", 1)}
    (tmp_path / "moe").mkdir()
    merge_experts(text_dir, experts, tmp_path / "moe", top_k=2)
    set_routers(tmp_path / "moe", torch.randn(2, 3, 32))
    plan = FULL.with_micro_batch(2)
    undisturbed = text_workplace(tmp_path / "moe", tmp_path / "undisturbed").train(plan, ON_SIGNALS)
    assert all("aux_loss" in logs for logs in undisturbed.log if "loss" in logs)
    workplace = text_workplace(tmp_path / "moe", tmp_path / "disturbed")
    workplace.interrupt(plan, at=At(3, kill))
    workplace.train(plan).assert_same(undisturbed)


def test_the_order_of_samples_depends_on_seed_and_epoch_alone(text_dir: Path) -> None:
    def order(seed: int, disturbed: Callable[[], Any] | None = None) -> list[int]:
        trainer = text_trainer(text_dir, replace(FULL, seed=seed))
        collator = trainer.data_collator
        taken: list[int] = []

        def collate(examples: Any) -> Any:
            taken.extend(example["sample"] for example in examples)
            return collator(examples)

        trainer.data_collator = collate
        trainer.remove_callback(trainer.rehearsal)
        trainer.add_callback(At(1, disturbed or int))
        trainer.train()
        return taken

    plain = order(1)
    assert sorted(plain[:8]) == sorted(plain[8:]) == list(range(8))
    assert plain[:8] != plain[8:]
    assert order(1, lambda: (random.random(), np.random.rand(5), torch.rand(7))) == plain  # noqa: NPY002
    assert order(2) != plain


def test_on_a_signal_it_saves_after_the_step_and_fails(
    workplace: Workplace, undisturbed: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="stages")
    with pytest.raises(SystemExit) as end:
        workplace.train(FULL, ON_SIGNALS, at=At(3, request_end))
    assert end.value.code == 128 + signal.SIGTERM
    assert "SIGTERM: stopped at step 3/4, saved at step 3" in caplog.text
    assert workplace.steps == [3]
    assert not (workplace.checkpoints.folder / on_disk.FINISHED).exists()
    workplace.train(FULL, ON_SIGNALS).assert_same(undisturbed)
    assert "resuming from step 3/4" in caplog.messages
    assert (workplace.checkpoints.folder / on_disk.FINISHED).exists()


def test_on_a_signal_in_its_last_step_it_finishes(workplace: Workplace, undisturbed: Outcome) -> None:
    workplace.train(FULL, ON_SIGNALS, at=At(4, request_end)).assert_same(undisturbed)
    assert workplace.steps == []


@contextmanager
def signals_handled() -> Iterator[SaveInTime]:
    saving = SaveInTime(Any, ON_SIGNALS)  # type: ignore[arg-type]
    with handling(saving.on_signal):
        yield saving


@pytest.mark.parametrize("number", ENDING)
def test_signals_at_once_are_one_request_and_a_later_one_ends_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    with signals_handled() as saving:
        assert saving.requested_by == 0
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGHUP)
        assert saving.requested_by == number
    assert signal.getsignal(number) == before
    assert capfd.readouterr().err.count(f"{number.name}: stopping after this step") == 1
    monkeypatch.setattr("stages.training.resume.SAME_REQUEST_S", -1.0)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    with signals_handled():
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert signal.getsignal(number) == signal.SIG_DFL
    assert sent == [(os.getpid(), number)]


def test_a_closed_stderr_is_no_error() -> None:
    """`dvc repro 2>&1 | tee log`: Ctrl-C ends tee first; a closed terminal is the same."""
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.dup(2)
    os.dup2(writer, 2)
    try:
        with signals_handled() as saving:
            signal.raise_signal(signal.SIGHUP)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(writer)
    assert saving.requested_by == signal.SIGHUP


def test_by_the_clock_it_saves_when_due(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def later() -> None:
        nonlocal now
        now += 600

    monkeypatch.setattr(time, "monotonic", lambda: now)
    workplace.train(FULL, CheckpointParams(every_minutes=10), at=At(2, later))
    assert workplace.steps == [2]


def test_a_full_disk_costs_the_checkpoint_and_not_the_training(
    workplace: Workplace, undisturbed: Outcome, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved, save = [], torch.save

    def full_at_step_2(state: Any, path: Path) -> None:
        saved.append(path)
        save(state, path)
        if len(saved) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full_at_step_2)
    workplace.train(FULL).assert_same(undisturbed)
    assert "step 2 could not be saved: " in caplog.text
    assert "No space left on device" in caplog.text
    assert workplace.steps == [1, 3]
    assert not list(workplace.checkpoints.folder.glob(".*"))


# States on the disk.


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path, table = tmp_path / "state", torch.arange(1000.0)
    bits = torch.tensor([math.nan, -0.0, math.inf])
    state: dict[str, Any] = {
        "state": {0: {"step": torch.tensor(3.0), "qmap": table}, 10: {"qmap": table, "empty": torch.empty(0, 4)}},
        "kinds": [torch.tensor([1, 2], dtype=kind) for kind in (torch.uint8, torch.int64, torch.bfloat16, torch.bool)],
        "plain": (1, math.inf, None, {"key": [True, "text"]}),
        "random": random_state(),
    }
    save_state({**state, "bits": bits, "view": table[:10]}, path)
    found = load_state(path)
    assert torch.equal(found.pop("bits").view(torch.int32), bits.view(torch.int32))
    assert torch.equal(found.pop("view"), table[:10])
    for one, other in zip(tree_leaves(found), tree_leaves(state), strict=True):
        assert type(one) is type(other)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert path.stat().st_size < 1.5 * table.nbytes + 20_000, "the table is there once, and the view on its own"


def test_moments_of_a_paged_optimizer_stay_in_managed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes' own loading would put them on the GPU."""
    # Fewer than 4,096 weights would have moments of 32 bits.
    weight, other = (torch.nn.Parameter(torch.ones(128, 64)) for _ in range(2))
    before, after = (PagedAdamW8bit([each]) for each in (weight, other))
    before.init_state(before.param_groups[0], weight, 0, 0)
    moments = [before.state[weight][name].random_(256).clone() for name in ("state1", "state2")]
    buffers: list[torch.Tensor] = []

    def managed(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        buffers.append(torch.zeros_like(parameter, dtype=dtype))
        return buffers[-1]

    monkeypatch.setattr(after, "get_state_buffer", managed)
    trainer: Any = SimpleNamespace(
        plan=changed(UNSEEN, optimizer="paged_adamw_8bit"),
        optimizer=SimpleNamespace(optimizer=after, param_groups=after.param_groups),
        lr_scheduler=SimpleNamespace(load_state_dict=lambda _: None),
        _load_weights=lambda _: {"optimizer": before.state_dict(), "scheduler": {}, "scaler": None, "trace": []},
    )
    RecipeTrainer.restore_state(trainer, Path())
    restored = [after.state[other][name] for name in ("state1", "state2")]
    assert {id(tensor) for tensor in restored} == {id(buffer) for buffer in buffers}
    assert all(torch.equal(one, tensor) for one, tensor in zip(restored, moments, strict=True))
    assert torch.equal(after.state[other]["qmap1"], before.state[weight]["qmap1"])
