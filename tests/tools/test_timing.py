"""The time of a training on a CPU: what is measured, and how it is scaled. No test asserts a duration."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedConfig

from stages.core.params.schema import DeviceParams
from stages.memory import predict
from stages.memory.fakes import fake_batch
from stages.memory.predict import BatchOf, MemoryPredictor, depth_of
from stages.planning.plan import Plan, Validation
from tests.memory.small import R1, config_of, plan_of, processor_of
from tests.memory.test_fit import predicted
from tests.plans import changed
from tools import timing
from tools.timing import Speed, measured_speed, measured_time, training_time

SPEED = Speed(micro_batch_s=4.0, update_s=1.0, loss_s=2.0, prompts_s=3.0, token_s=0.5)
WITHOUT: dict[str, Any] = {"keep_best": False, "patience": None, "by": "loss", "split": "val", "max_length": None}


def plan_with(**settings: Any) -> Plan:
    return changed(plan_of(**R1), **settings)


@given(st.integers(1, 500), st.integers(1, 500), *[st.integers(1, 40)] * 3, st.integers(0, 40), st.integers(1, 99))
def test_the_time_is_that_of_all_steps_and_of_every_validation_with_completions_of_full_length(
    num_steps: int, every: int, micro_batch: int, accumulation: int, samples: int, scored: int, tokens: int
) -> None:
    validation = Validation(every_steps=every, samples=samples, score_samples=scored, max_new_tokens=tokens, **WITHOUT)
    settings: dict[str, Any] = {"num_steps": num_steps, "grad_accumulation": accumulation, "validation": validation}
    time = training_time(plan_with(micro_batch=micro_batch, **settings), SPEED, has_data=True)
    assert (time.num_steps, time.step_s) == (num_steps, accumulation * 4.0 + 1.0)
    assert time.hours == {"this machine": pytest.approx(num_steps * time.step_s / 3600)}
    validated_at = {0, *range(every, num_steps, every), num_steps}
    losses, answers = (len(range(0, number, micro_batch)) for number in (samples, scored))
    assert time.validation_s == pytest.approx(len(validated_at) * (losses * 2.0 + answers * (3.0 + tokens * 0.5)))
    assert f"step{'s' if num_steps > 1 else ''} of " in str(time)
    assert ", and up to " in str(time)


def test_without_data_it_is_a_step_and_without_validation_none_is_named() -> None:
    without = training_time(plan_with(num_steps=9), SPEED, has_data=False)
    assert without.num_steps is None
    assert without.hours["this machine"] * 3600 == pytest.approx(without.step_s)
    assert str(without).startswith("no data yet: a step of about ")
    assert "validation" not in str(training_time(plan_with(validation=None), SPEED, has_data=True))


def predictor_of(config: PreTrainedConfig) -> MemoryPredictor:
    batch_of = partial(fake_batch, config, max_length=32, max_pixels=None)
    return MemoryPredictor(config=config, processor=processor_of("text"), batch_of=batch_of)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, PreTrainedConfig, BatchOf]]:
    """The arguments of each measurement; nothing runs."""
    asked: list[tuple[Plan, PreTrainedConfig, BatchOf]] = []

    def speed_of(*arguments: Any) -> tuple[Speed, dict[str, int]]:
        asked.append(arguments)
        return SPEED, {"total": 10, "all": 100}

    monkeypatch.setattr(timing, "measured_speed", speed_of)
    return asked


def test_a_micro_batch_of_mean_length_runs_or_of_a_large_one_a_short_sample_in_few_layers(
    measured: list[tuple[Plan, PreTrainedConfig, BatchOf]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "predict", lambda *_: replace(predicted(1), flops=3200.0))
    monkeypatch.setattr(timing, "record_step", lambda *_: SimpleNamespace(flops=2 * 100))  # of two micro-batches
    config = config_of("text", (12, 0))
    settings = {"micro_batch": 2, "effective_batch": 4, "grad_accumulation": 2}
    plan = plan_with(**settings, trainable={"total": 30, "all": 500})
    predictor = predictor_of(config)
    whole = measured_time(plan, predictor, [32, 20, 20, 20])
    ((_, asked_config, batch_of),) = measured
    assert depth_of(asked_config) == (12, 0)
    assert batch_of(micro_batch=2)["input_ids"].shape == (2, 26)  # the mean of 32 and 20
    assert whole is not None
    assert whole.step_s == 2 * SPEED.micro_batch_s + SPEED.update_s

    measured.clear()
    monkeypatch.setattr(timing, "WHOLE_FLOPS", 1000)
    part = measured_time(plan, predictor, [32, 32])
    ((one, few, batch_of),) = measured
    assert depth_of(few) == (2, 0)
    assert batch_of(micro_batch=one.memory.micro_batch)["input_ids"].shape == (1, timing.SHORT)
    assert part is not None
    assert part.step_s == pytest.approx(2 * SPEED.micro_batch_s * 32 + SPEED.update_s * 3)
    monkeypatch.setattr(timing, "WHOLE_FLOPS", 1)
    assert measured_time(plan, predictor, [32]) is None


def test_no_time_is_measured_of_a_gpu_or_of_processes_that_share_the_cpu(
    measured: list[tuple[Plan, PreTrainedConfig, BatchOf]],
) -> None:
    config = config_of("text")
    for device, placement in ((DeviceParams(kind="cuda"), "single"), (DeviceParams(kind="cpu", count=2), "ddp")):
        plan = changed(plan_of(**R1), device=device, placement=placement)
        assert measured_time(plan, predictor_of(config), [32]) is None
    assert measured == []


def test_every_part_of_a_training_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a small model, and completions by its adapters."""
    monkeypatch.setattr(timing, "ENOUGH_S", 0.0)
    validation = Validation(every_steps=1, samples=2, score_samples=1, max_new_tokens=4, **WITHOUT)
    plan, config = plan_with(micro_batch=2, validation=validation), config_of("text")
    speed, counts = measured_speed(plan, config, predictor_of(config).batch_of)
    assert min(astuple(replace(speed, token_s=1.0))) > 0
    assert speed.micro_batch_s > speed.loss_s
    assert 0 < counts["total"] < counts["all"]
