"""`make gpu` as far as a CPU can run it: the measurements, their results, the page and the calibration."""

import difflib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from stages.kit.memory.calibration import SHIPPED_PATH, Calibration, load_calibration
from stages.kit.memory.predict import MemoryPredictor
from stages.kit.training.resume import seed_everything
from tests import ROOT
from tools.gpu import __main__ as gpu
from tools.gpu import bench, recipe
from tools.gpu.__main__ import FACTS, Measurement, Results, Runner, calibrate, measurements
from tools.gpu.measure import (
    ACCUMULATION,
    StepMeter,
    kind_of,
    measure_generation,
    planned,
    predict_training,
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
        ("r1-llm-only", {"features_bytes": 0, "gradient_checkpointing": True}),
        ("r1-llm-only", {"quantization": "none", "padding_free": True}),
        ("r2-vision-only", {}),
        ("r4-joint", {"quantization": "none"}),
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x24_64x11_2x1_v_bz_TNT", "matmul"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*, ...)", "dequantization"),
        ("void at::native::elementwise_kernel<..., at::native::direct_copy_kernel_cuda(...)>", "copies"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "elementwise"),
        ("_triton_rope", "Triton"),
        ("_swiglu_forward_kernel", "Triton"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
    ],
)
def test_kernels_are_sorted_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


# --- Measurements


def test_the_peak_is_that_of_the_step_that_finds_the_optimizers_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda's functions as they behave; `peak` is what the allocator saw since the last reset."""
    peak = {"allocated": 0, "reserved": 0}
    for name, function in {
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: peak.update(allocated=10, reserved=100),
        "max_memory_allocated": lambda: peak["allocated"],
        "max_memory_reserved": lambda: peak["reserved"],
        "memory_reserved": lambda: 120,
        "mem_get_info": lambda: (1000 - 170, 1000),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    trainer: Any = SimpleNamespace(optimizer=SimpleNamespace(state={}))
    meter = StepMeter(trainer, {}, on_gpu=True)
    for allocated, state in ((900, {}), (800, {"weight": 1}), (70, {"weight": 1}), (600, {"weight": 1})):
        peak.update(allocated=allocated, reserved=2 * allocated)
        trainer.optimizer.state = state
        meter.on_step_end(None, None, TrainerControl())
    total = 140 + (170 - 120)
    assert meter.memory == {"allocated_bytes": 70, "reserved_bytes": 140, "total_bytes": total}


def test_generation_takes_the_predicted_memory() -> None:
    setting = {"profile": "tiny", "recipe": "amr-baseline", "max_length": 16, "precision": "fp32"}
    found = measure_generation("cpu", setting=setting, batch_size=16, new_tokens=4)
    assert abs(found["error"]) < 0.05
    assert found["samples_per_s"] > 0


def test_layers_are_left_out_until_a_prediction_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(self: MemoryPredictor, plan: Any) -> Any:
        layers = self.config.num_hidden_layers
        verdict = lambda capacity: "fits" if layers <= capacity else "too close"  # noqa: E731
        return SimpleNamespace(allocated_bytes=layers, reserved_bytes=0, flops=0.0, verdict=verdict)

    monkeypatch.setattr(MemoryPredictor, "__call__", predict)
    setting = {"profile": "qwen25-7b-80gb", "recipe": "amr-baseline", "max_length": 64}

    def layers(capacity: int) -> Any:
        return predict_training("cuda", setting=setting, facts={**DEVICE, "memory_bytes": capacity})["layers"]

    assert [layers(capacity) for capacity in (28, 27, 10)] == [(28, 0), (14, 0), (7, 0)]
    with pytest.raises(UserError, match=r"12\.5% of its layers"):
        layers(1)


@pytest.mark.parametrize(
    ("digests", "twice", "resumed"), [("aaa", True, True), ("aab", True, False), ("aba", False, True)]
)
def test_bytes_are_compared_after_a_second_training_and_after_a_kill(
    digests: str, twice: bool, resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(stage: Any, folder: Path, *, before: str = "", may_fail: bool = False) -> int:
        run_dir = folder / "data/runs/r1-llm-only"
        (run_dir / "training").mkdir(parents=True, exist_ok=True)
        for name, fields in {
            "memory": {"allocated_gib": 1.0},
            "merge": {"logit_deviation": 0.0},
            "metrics": {"samples": 4},
            "training/training": {"final_loss": 1.0, "peak_memory_bytes": 2**30},
        }.items():
            (run_dir / f"{name}.json").write_text(json.dumps(fields))
        if not before:
            return 0
        assert "os._exit(9)" in before
        (folder / ".bakeoff/checkpoints/r1-llm-only/1/step-1").mkdir(parents=True)
        return 9

    pending = iter(digests)
    monkeypatch.setattr(recipe, "_run", run)
    monkeypatch.setattr(recipe, "_trained", lambda *_: next(pending))
    found = recipe.run_recipe("cpu", recipe="r1-llm-only", memory={})
    assert (found["twice"], found["resumed"], found["samples"]) == (twice, resumed, 4)


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
    results.keep(key, status, seconds=1, problem=problem, data=found)


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
found = {"gpu": os.environ["CUDA_VISIBLE_DEVICES"], "secret": os.environ.get("SECRET"), "task": sorted(task)}
if "code" in task: sys.exit(task["code"])
open(answer, "w").write(json.dumps(found))
"""


@pytest.fixture
def runner(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Its measurements are a small program."""
    run = subprocess.run

    def small(command: list[str], **options: Any) -> Any:
        return run([sys.executable, "-c", PROGRAM, *command[3:]], **options)

    monkeypatch.setattr(subprocess, "run", small)
    monkeypatch.setenv("SECRET", "token")
    return Runner("cuda", "GPU-1", results, math.inf)


def test_each_outcome_is_a_result_and_a_prediction_sees_no_gpu(runner: Runner) -> None:
    runner.run(
        [
            Measurement("trainings", "a", {"setting": {}}),
            Measurement("generation", "b", {"code": 1}),
            Measurement("generation", "c", {"code": 79}),
        ]
    )
    found = {key: (each["status"], each["data"].get("gpu")) for key, each in runner.results.by_key.items()}
    assert found == {
        FACTS.key: ("done", None),
        "predictions: a": ("done", ""),
        "trainings: a": ("done", "GPU-1"),
        "generation: b": ("failed", None),
        "generation: c": ("out of memory", None),
    }
    training = data(runner.results.by_key, "trainings: a")
    assert (training["secret"], training["task"]) == (None, ["prediction", "setting"])


def test_after_its_time_nothing_starts(runner: Runner) -> None:
    late = replace(runner, deadline=0)
    late.run([Measurement("trainings", "a", {"setting": {}}), Measurement("generation", "b", {})])
    assert set(late.results.by_key) == {FACTS.key}


def test_the_page_has_every_measurement_whatever_became_of_it(results: Results) -> None:
    speed = {"samples": 16, "step_s": 2.0, "tokens_per_s": 11264.0, "tflops_per_s": 345.6, "share_of_peak": 0.349}
    amounts = {"allocated_bytes": 2**34, "reserved_bytes": 2**34, "total_bytes": 2**34}
    spent = {"idle_share": 0.12, "launches": 41000, "matmul": 0.75, "copies": 0.25}
    keep(results, "recipes: a", {}, "failed", "no kernel *image*")
    keep(results, "recipes: b", {"twice": True, "resumed": False})
    keep(results, "trainings: c", {**speed, **spent, **amounts})
    text = page("NVIDIA H200", results.by_key, [*results.by_key, "generation: e"])
    assert text.startswith("# NVIDIA H200\n\nMeasured by `make gpu`: 4 of 5")
    for line in (
        "| b | – | – | – | – | yes | NO |",
        "| c | 16 | 2.000 | 11,264 | 345.6 | 34.9% | 12% | 41,000 | 16.0 GiB |",
        "- recipes: a: no kernel \\*image\\*",
        "## Not measured yet\n\n- generation: e\n",
    ):
        assert line in text


@pytest.mark.pipeline
def test_a_dry_run_measures_a_training_and_its_prediction(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tools.gpu",
        "--results-dir",
        str(tmp_path),
        "--dry-run",
        "--only",
        "tiny r1-llm-only",
    ]
    ended = subprocess.run(
        command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "C compiler" in ended.stdout
    found = Results.of(tmp_path, "CPU").by_key
    ((name, row),) = comparisons(found).items()
    assert abs(row["allocated"]) < 0.01
    assert data(found, f"trainings: {name}")["launches"] > 1000


# --- Calibration


def compare(results: Results, allocated: int, reserved: int, beside: int = 500) -> None:
    """One more training, in MiB. 1,000 allocated and 1,100 reserved were predicted."""
    trainings = [each.name for each in measurements("cuda", DEVICE) if each.job == "trainings"]
    name = trainings[sum("trainings" in key for key in results.by_key)]
    amounts = {"allocated_bytes": 1000 * MIB, "reserved_bytes": 1100 * MIB}
    keep(results, f"predictions: {name}", {"layers": [28, 32], **amounts})
    amounts = {"allocated_bytes": allocated * MIB, "reserved_bytes": reserved * MIB}
    speed = {"total_bytes": (reserved + beside) * MIB, "share_of_peak": beside / 1000}
    keep(results, f"trainings: {name}", {**amounts, **speed})


def bounds(results: Results) -> dict[str, float]:
    return {name: value for name, value in constants(results.by_key).items() if "_error_" in name}


def test_errors_are_relative_to_the_measurement(results: Results) -> None:
    compare(results, 800, 1000, beside=400)
    (row,) = comparisons(results.by_key).values()
    assert row["allocated"] == pytest.approx(0.25)
    assert row["reserved"] == pytest.approx(0.10)
    assert row["total"] == pytest.approx(1500 / 1400 - 1)  # with the context as measured, not assumed


def test_bounds_are_wider_than_the_worst_error_and_have_a_floor(results: Results) -> None:
    compare(results, 1000, 1100)
    assert set(bounds(results).values()) == {-FLOOR, FLOOR}
    assert set(bounds(results)) == {name for name in Calibration.__dataclass_fields__ if "_error_" in name}
    compare(results, 900, 1100)
    compare(results, 1080, 1210)
    assert list(bounds(results).values()) == [-0.11, 0.09, -FLOOR, 0.11]
    compare(results, 1000, 1100, beside=900)  # the total's errors count with the reserved ones
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


def test_a_bench_leases_one_gpu_and_hides_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leased = []

    @contextmanager
    def lease(kind: str, *, holder: str) -> Iterator[tuple[str, str]]:
        leased.append((kind, holder))
        yield "NVIDIA L4", "GPU-2"

    def found(params: Any, *_: Any) -> Iterator[dict[str, Any]]:
        assert params.active.device.kind == "cuda"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-2"
        yield {"what": "a step", "ours": "ours", "other": "theirs", "ours_s": 1, "other_s": 2}

    monkeypatch.setattr(bench, "device_to_measure", lease)
    monkeypatch.setattr(bench, "comparisons", found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    shutil.copyfile(ROOT / "params.yaml", tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(bench.main, ["--cuda"], catch_exceptions=False).exit_code == 0
    assert leased == [("cuda", "make bench")]
    assert json.loads(Path(".bakeoff/bench.jsonl").read_text())["ratio"] == 2
