"""The measurements of `make gpu`, as far as a CPU can run them."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerControl

from stages.memory.predict import depth_of, with_depth
from stages.training.randomness import seed_everything
from tests import ROOT
from tests.benchmarks import speed
from tests.gpu import measure
from tests.gpu.measure import (
    TIMED_STEPS,
    StepMeter,
    measure_generation,
    planned,
)
from tests.gpu.test_gpu import TRAININGS, Measuring
from tools.timing import random_trainer, training_batch, with_contents


@pytest.fixture(autouse=True)
def _checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


# --- Arithmetic


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("r4-joint", {"padding_free": True}),
        ("r2-vision-only", {"gradient_checkpointing": True}),
        ("moe-finetune", {}),
    ],
)
def test_the_arithmetic_counted_without_weights_is_that_of_a_training(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own counter counts a step of one micro-batch, by hand those products that it has no rule for."""
    monkeypatch.setattr(measure, "ACCUMULATION", 1)
    small = {"profile": "tiny", "recipe": name, "micro_batch": 2, "max_length": 128, "precision": "fp32"}
    plan, predictor = planned({**small, "gradient_checkpointing": False, "attn": "eager", **changes}, "cpu")
    config = with_depth(predictor.config, (1, min(1, depth_of(predictor.config)[1])))
    plan, predictor = replace(plan, trainable={}), replace(predictor, config=config)
    seed_everything(plan.seed)
    batch = with_contents(training_batch(plan, predictor.config, predictor.batch_of))
    operators = (torch.ops.aten._grouped_mm, torch.ops.aten.addmm_, torch.ops.bitsandbytes.gemm_4bit)
    with random_trainer(plan, predictor.config, batch, num_steps=1) as trainer:
        uncounted = {each: partial(by_hand, each) for each in operators}
        with FlopCounterMode(display=False, custom_mapping=uncounted) as counter:
            trainer.train()
    assert predictor(plan).flops == pytest.approx(counter.get_total_flops(), rel=1e-3)


def by_hand(operator: Any, *shapes: Any, out_shape: Any, **_: Any) -> int:
    """2 for each number of the result and each number that is multiplied for it; of groups, each row has its own."""
    factors = shapes[1] if operator is torch.ops.aten.addmm_ else shapes[0]
    own = out_shape[0] if len(out_shape) == 3 and operator is torch.ops.aten._grouped_mm else 1
    return 2 * prod(out_shape) * factors[-1] // own


@pytest.mark.parametrize("name", TRAININGS)
def test_every_training_can_be_planned(name: str) -> None:
    setting, _ = TRAININGS[name]
    plan, _ = planned({**setting, "gpu": "Quadro RTX 6000"}, "cuda")
    assert (plan.memory.precision, plan.device.card) == ("fp16", "Quadro RTX 6000")


# --- Measurements


def test_the_peak_is_that_of_the_step_that_finds_the_optimizers_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda's functions as they behave; `peak` is what the allocator saw since the last reset."""
    peak = {"allocated": 0, "reserved": 0}
    for name, function in {
        "is_available": lambda: True,
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: peak.update(allocated=10, reserved=100),
        "max_memory_allocated": lambda: peak["allocated"],
        "max_memory_reserved": lambda: peak["reserved"],
        "memory_reserved": lambda: 120,
        "mem_get_info": lambda: (1000 - 170, 1000),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    trainer: Any = SimpleNamespace(optimizer=SimpleNamespace(state={}))
    monkeypatch.setattr(measure, "lasting_tensors", lambda _: ())
    meter, control = StepMeter(trainer, {}), TrainerControl()
    for allocated in (900, 800, 70, *[600] * (1 + TIMED_STEPS)):
        assert not control.should_training_stop
        peak.update(allocated=allocated, reserved=2 * allocated)
        trainer.optimizer.state = {} if allocated == 900 else {"weight": 1}
        meter.on_step_end(None, None, control)
    total = 140 + (170 - 120)
    assert meter.memory == {"allocated_bytes": 70, "reserved_bytes": 140, "total_bytes": total}
    assert control.should_training_stop
    assert len(meter.seconds) == TIMED_STEPS


def test_generation_takes_the_predicted_memory() -> None:
    setting = {"profile": "tiny", "recipe": "amr-baseline", "max_length": 16, "precision": "fp32"}
    found = measure_generation("cpu", setting=setting, batch_size=16, new_tokens=4)
    assert abs(found["error"]) < 0.05
    assert found["samples_per_s"] > 0


@pytest.mark.parametrize(
    ("weights", "twice", "resumed"), [("aaa", True, True), ("aab", True, False), ("aba", False, True)]
)
def test_bytes_are_compared_after_a_second_training_and_after_a_kill(
    weights: str, twice: bool, resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, pending = list[str](), iter(weights)

    def run(stage: str, item: str, folder: Path, *, kill: bool = False) -> None:
        killed.extend([stage] * kill)
        run_dir = folder / "data/runs/r1-llm-only"
        for path in (run_dir / "training", run_dir / "trained", folder / ".bakeoff"):
            path.mkdir(parents=True, exist_ok=True)
        if stage == "train" and not kill:
            (run_dir / "trained/weights").write_text(next(pending))
        for name, fields in {
            "memory": {"prediction": {"allocated_bytes": 2**30}},
            "merge": {"logit_deviation": 0.0},
            "training/training": {"final_loss": 1.0, "peak_memory_bytes": 2**30},
        }.items():
            (run_dir / f"{name}.json").write_text(json.dumps(fields))

    monkeypatch.setattr(measure, "_run", run)
    found = measure.run_recipe("cpu", recipe="r1-llm-only", memory={})
    assert (found["same_bytes_twice"], found["same_bytes_after_a_kill"], found["error"]) == (twice, resumed, 0)
    assert killed == ["train"]


def test_a_step_without_padding_is_compared_with_a_plain_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TURNS": 1, "STEPS": 2, "SAMPLES": 32}.items():
        monkeypatch.setattr(speed, name, value)
    found = speed.compare_speed("cpu", recipe="amr-baseline", ours={"padding_free": True}, other=None)
    assert found["times_as_fast"] > 0


PROGRAM = """
import json, os, sys
job, device, task, answer = sys.argv[1:]
task = json.loads(task)
if "code" in task: sys.exit(task["code"])
found = {"gpu": os.environ["CUDA_VISIBLE_DEVICES"], "secret": os.environ.get("SECRET"), "task": task}
open(answer, "w").write(json.dumps(found))
"""


def test_each_measurement_is_a_line_whatever_became_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements are a small program here. A prediction sees no GPU."""
    run = subprocess.run
    small = lambda command, **options: run([sys.executable, "-c", PROGRAM, *command[3:]], **options)  # noqa: E731
    monkeypatch.setattr(subprocess, "run", small)
    monkeypatch.setenv("SECRET", "token")
    measured = Measuring("cuda", None, "GPU-1", tmp_path / "gpu/results.jsonl")
    found = measured.training({})
    assert (found["gpu"], found["task"]["gpu"], found["secret"]) == ("GPU-1", "", None)
    for code, status in ((1, "failed"), (79, "out of memory")):
        with pytest.raises(AssertionError, match=f"generation: {status}"):
            measured("generation", code=code)
    lines = [json.loads(line) for line in measured.results.read_text().splitlines()]
    assert [(line["job"], line["status"], bool(line["data"])) for line in lines] == [
        ("trainings", "done", True),
        ("generation", "failed", False),
        ("generation", "out of memory", False),
    ]
