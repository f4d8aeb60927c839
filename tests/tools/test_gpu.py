"""`make gpu` as far as a CPU can run it: the measurements, their results, the page and the calibration."""

import difflib
import json
import math
import subprocess
import sys
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerControl

from stages.core.errors import UserError
from stages.memory.calibration import SHIPPED_PATH, Calibration, load_calibration
from stages.training.randomness import seed_everything
from tests import ROOT
from tools.gpu import __main__ as gpu
from tools.gpu import bench, measure
from tools.gpu.__main__ import FACTS, Measurement, Results, calibrate, measurements
from tools.gpu.measure import (
    ACCUMULATION,
    TIMED_STEPS,
    StepMeter,
    measure_generation,
    planned,
    random_trainer,
    training_batch,
    with_contents,
)
from tools.gpu.page import FLOOR, comparisons, constants, data, page, recalibrated

MIB = 2**20
DEVICE = {"name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 139 * 2**30, "versions": "torch 2.13.0"}


@pytest.fixture(autouse=True)
def _checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


# --- Arithmetic


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("r1-llm-only", {"gradient_checkpointing": True}),
        ("r4-joint", {"quantization": "none", "padding_free": True}),
        ("r2-vision-only", {"gradient_checkpointing": True}),
        ("moe-finetune", {}),
    ],
)
def test_the_arithmetic_counted_without_weights_is_that_of_a_training(name: str, changes: dict[str, Any]) -> None:
    """Torch's own counter counts it, with rules by hand for the products that it has none for."""
    small = {"profile": "tiny", "recipe": name, "micro_batch": 2, "max_length": 128, "precision": "fp32"}
    plan, predictor = planned({**small, "gradient_checkpointing": False, "attn": "eager", **changes}, "cpu")
    seed_everything(plan.seed)
    batch = with_contents(training_batch(plan, predictor))
    operators = (torch.ops.aten._grouped_mm, torch.ops.aten.addmm_, torch.ops.bitsandbytes.gemm_4bit)
    with random_trainer(plan, predictor.config, batch, num_steps=1) as trainer:
        uncounted = {each: partial(by_hand, each) for each in operators}
        with FlopCounterMode(display=False, custom_mapping=uncounted) as counter:
            trainer.train()
    assert predictor(plan).flops == pytest.approx(counter.get_total_flops() / ACCUMULATION, rel=1e-3)


def by_hand(operator: Any, *shapes: Any, out_shape: Any, **_: Any) -> int:
    """2 for each number of the result and each number that is multiplied for it; of groups, each row has its own."""
    factors = shapes[1] if operator is torch.ops.aten.addmm_ else shapes[0]
    own = out_shape[0] if len(out_shape) == 3 and operator is torch.ops.aten._grouped_mm else 1
    return 2 * prod(out_shape) * factors[-1] // own


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


# --- Results, order and page


def test_facts_come_first_and_then_the_three_trainings_that_ten_minutes_are_for() -> None:
    keys = [each.key for each in measurements("cuda", DEVICE)]
    assert len(set(keys)) == len(keys)
    for key, word in zip(keys, ("qwen25-7b", "qwen2-vl-2b", "moe"), strict=False):
        assert key.startswith(f"trainings: {word}")
    turing = measurements("cuda", {**DEVICE, "capability": [7, 5]})
    assert "bf16" not in json.dumps([dict(each.task) for each in turing])
    for each in measurements("cuda", DEVICE):
        if each.job == "trainings":
            planned(each.task["setting"], "cuda")


@pytest.fixture
def results(tmp_path: Path) -> Results:
    results = Results(tmp_path / "cuda.json")
    keep(results, FACTS.key, DEVICE)
    return results


def keep(results: Results, key: str, found: dict[str, Any], status: str = "done", problem: str = "") -> None:
    results.keep(key, {"status": status, "data": found, "problem": problem, "seconds": 1})


def test_results_are_kept_and_failures_tried_again_last(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Measurement("trainings", name, {}) for name in "abcd"]
    keep(results, "trainings: a", {}, "failed", "no kernel")
    keep(results, "trainings: b", {}, "out of memory", "out of memory")
    keep(results, "trainings: c", {"step_s": 1.5})
    again = Results(results.path)
    assert [each.name for each in again.todo(wanted)] == ["d", "a"]
    assert data(again.by_key, "trainings: c") == {"step_s": 1.5}
    before = Results.of(results.path.parent, "NVIDIA H200").path
    assert Results.of(results.path.parent, "NVIDIA H200").path == before
    monkeypatch.setattr(gpu, "installed_packages", lambda _: {"torch": "2.99"})
    assert Results.of(results.path.parent, "NVIDIA H200").path != before


PROGRAM = """
import json, os, sys
job, device, task, answer = sys.argv[1:]
task = json.loads(task)
found = {"gpu": os.environ["CUDA_VISIBLE_DEVICES"], "secret": os.environ.get("SECRET"), "task": task}
if "code" in task: sys.exit(task["code"])
open(answer, "w").write(json.dumps(found))
"""


def test_each_outcome_is_a_result_and_a_prediction_sees_no_gpu(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measurements are a small program here."""
    run = subprocess.run
    small = lambda command, **options: run([sys.executable, "-c", PROGRAM, *command[3:]], **options)  # noqa: E731
    monkeypatch.setattr(subprocess, "run", small)
    monkeypatch.setenv("SECRET", "token")
    tasks: dict[str, dict[str, Any]] = {"a": {"setting": {}}, "b": {"setting": {}, "code": 79}}
    wanted = [
        *(Measurement("trainings", name, task) for name, task in tasks.items()),
        *(Measurement("generation", str(code), {"code": code}) for code in (1, 79)),
    ]
    results.measure(wanted, "cuda", "GPU-1", deadline=0)
    assert set(results.by_key) == {FACTS.key}, "nothing starts after its time"
    results.measure(wanted, "cuda", "GPU-1", deadline=math.inf)
    found = {key: (each["status"], each["data"].get("gpu")) for key, each in results.by_key.items()}
    assert found == {
        FACTS.key: ("done", None),
        "trainings: a": ("done", "GPU-1"),
        "trainings: b": ("out of memory", None),
        "generation: 1": ("failed", None),
        "generation: 79": ("out of memory", None),
    }
    training = data(results.by_key, "trainings: a")
    assert (training["secret"], training["task"]["gpu"], training["task"]["task"]) == (None, "", {"setting": {}})


def test_the_page_has_every_measurement_whatever_became_of_it(results: Results) -> None:
    keep(results, "recipes: a", {}, "failed", "no kernel *image*")
    keep(results, "recipes: b", {"loss": 1.25, "same_bytes_twice": True, "same_bytes_after_a_kill": False})
    amounts = {"allocated_bytes": 2**34, "reserved_bytes": 2**34, "total_bytes": 2**34}
    speed = {"tokens_per_s": 11264.0, "share_of_peak": 0.349}
    keep(results, "trainings: c", {"predicted": {**amounts, "allocated_bytes": 2**33}, **speed, **amounts})
    text = page("NVIDIA H200", results.by_key, [*results.by_key, "generation: e"])
    assert text.startswith("# NVIDIA H200\n\nMeasured by `make gpu`: 4 of 5")
    for line in (
        "| a | failed | – | – | – |",
        "| b | done | 1.25 | yes | NO |",
        "| c | done | 11,264 | 34.9% | 16.0 GiB | 16.0 GiB | 16.0 GiB | -50.0% | +0.0% | +0.0% |",
        "- recipes: a: no kernel \\*image\\*",
        "## Not measured yet\n\n- generation: e\n",
    ):
        assert line in text


@pytest.mark.pipeline
def test_a_dry_run_measures_a_training_and_its_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts in a process of their own, as all are; a training and its prediction in this one."""
    run = subprocess.run

    def here(command: list[str], **options: Any) -> Any:
        if "facts" in command:
            return run(command, **options)
        ended = CliRunner().invoke(measure.main, command[3:])
        return SimpleNamespace(returncode=ended.exit_code)

    monkeypatch.setattr(subprocess, "run", here)
    monkeypatch.setattr(gpu, "RESULTS_DIR", tmp_path)
    ended = CliRunner().invoke(gpu.main, ["--dry-run", "--only", "tiny r1-llm-only"])
    assert ended.exit_code == 0, ended.output
    assert "C compiler" in ended.output
    assert "Not measured" not in ended.output
    found = Results.of(tmp_path, "CPU").by_key
    ((name, row),) = comparisons(found).items()
    assert abs(row["allocated_error"]) < 0.01
    assert data(found, f"trainings: {name}")["tokens_per_s"] > 0


def test_a_step_without_padding_is_compared_with_a_plain_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TURNS": 1, "STEPS": 2, "SAMPLES": 32}.items():
        monkeypatch.setattr(bench, name, value)
    found = bench.compare_speed("cpu", recipe="amr-baseline", ours={"padding_free": True}, other=None)
    assert found["times_as_fast"] > 0


# --- Calibration


def compare(results: Results, allocated: int, reserved: int, beside: int = 500) -> None:
    """One more training, in MiB. 1,000 allocated and 1,100 reserved were predicted."""
    trainings = [each.key for each in measurements("cuda", DEVICE) if each.job == "trainings"]
    predicted = {"allocated_bytes": 1000 * MIB, "reserved_bytes": 1100 * MIB}
    sizes = {"allocated": allocated, "reserved": reserved, "total": reserved + beside}
    found = {"predicted": predicted, **{f"{name}_bytes": size * MIB for name, size in sizes.items()}}
    keep(results, trainings[len(results.by_key) - 1], {**found, "share_of_peak": beside / 1000})


def bounds(results: Results) -> dict[str, float]:
    return {name: value for name, value in constants(results.by_key).items() if "_error_" in name}


def test_errors_are_relative_to_the_measurement(results: Results) -> None:
    compare(results, 800, 1000, beside=400)
    (row,) = comparisons(results.by_key).values()
    # The total with the context as measured, not assumed.
    assert row == pytest.approx({"allocated_error": 0.25, "reserved_error": 0.1, "total_error": 1500 / 1400 - 1})


def test_bounds_are_wider_than_the_worst_error_and_have_a_floor(results: Results) -> None:
    compare(results, 1000, 1100)
    assert set(bounds(results).values()) == {-FLOOR, FLOOR}
    assert set(bounds(results)) == {name for name in Calibration.__dataclass_fields__ if "_error_" in name}
    compare(results, 900, 990)
    compare(results, 1080, 1210)
    assert list(bounds(results).values()) == [-0.11, 0.11]
    compare(results, 1000, 1100, beside=900)  # the total's errors count too
    assert bounds(results)["reserved_error_high"] == pytest.approx(0.26)


def test_context_and_share_of_peak_are_medians(results: Results) -> None:
    for beside in (400, 450, 900):
        compare(results, 1000, 1100, beside)
    found = {name: value for name, value in constants(results.by_key).items() if "_error_" not in name}
    assert found == {"context_mib": 450.0, "share_of_peak": 0.45}


def test_only_values_and_their_source_change() -> None:
    values = {"context_mib": 512.5, "cublas_workspaces_mib": 64, "reserved_error_low": -0.041}
    before, source = SHIPPED_PATH.read_text(), "NVIDIA H200, 2026-12-01"
    after = recalibrated(before, values, source)
    changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] == "+"]
    assert sorted(changed) == sorted(["+   value: 512.5", "+   value: -0.041", *3 * [f"+   measured: {source}"]])


def test_the_calibration_is_written_once_every_training_was_tried(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    path.write_text(SHIPPED_PATH.read_text())
    wanted = [each for each in measurements("cuda", DEVICE) if each.job == "trainings"][:2]
    with pytest.raises(UserError, match="make gpu"):
        calibrate(results, wanted, path)
    compare(results, 1000, 1100)
    with pytest.raises(UserError, match="1 trainings are still to be tried"):
        calibrate(results, wanted, path)
    assert path.read_text() == SHIPPED_PATH.read_text()
    compare(results, 1000, 1100)
    calibrate(results, wanted, path)
    assert load_calibration(path).context_mib.value == 500
    assert load_calibration(path).context_mib.measured.startswith("NVIDIA H200, torch ")
