"""The stages on a GPU, with the smallest model: nf4 and bf16, twice the same bytes, and the end of memory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from stages.kit.compiler import compiler_problem
from stages.kit.containers.environment import stage_environment
from stages.kit.errors import OUT_OF_MEMORY
from tests.closure import ROOT
from tests.test_stages import done, small_params, write_params

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

NF4, BF16 = "r1-llm-only", "r2-vision-only"


@pytest.fixture(scope="module")
def planned(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with plans of two steps for a GPU; no CUDA is used for it."""
    workspace = tmp_path_factory.mktemp("planned")
    raw = small_params(tiny_vlm)
    raw["profiles"]["tiny"]["device"] = {"kind": "cuda", "count": 1}
    raw["profiles"]["tiny"]["memory"].update(precision="bf16", quantization="as-recipe", attn="auto")
    raw["checkpoints"]["every_steps"] = 1
    for recipe in raw["recipes"].values():
        recipe["max_steps"] = 2
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        write_params(raw)
        done("base", "vlm")
        done("prepare", "nutrition-tables")
        for recipe in (NF4, BF16):
            done("plan", recipe)
    return workspace


@pytest.fixture
def workspace(planned: Path, tmp_path: Path) -> Path:
    return shutil.copytree(planned, tmp_path / "workspace")


def run(workspace: Path, stage: str, name: str, *, before: str = "") -> "subprocess.CompletedProcess[str]":
    """A stage in a process and an environment of its own, as the launcher starts it."""
    program = f"{before}\nimport sys\nfrom stages.{stage} import main\nmain(sys.argv[1:])"
    environment = stage_environment(stage, os.environ, network=False, terminal=False)
    return subprocess.run(
        [sys.executable, "-c", program, name],
        cwd=workspace,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def succeed(workspace: Path, stage: str, name: str) -> None:
    result = run(workspace, stage, name)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("recipe", "quantization"), [(NF4, "nf4"), (BF16, "none")])
def test_a_recipe_goes_all_the_way_and_its_peak_stands_beside_the_prediction(
    workspace: Path, recipe: str, quantization: str
) -> None:
    for stage in ("train", "merge", "evaluate"):
        succeed(workspace, stage, recipe)
    run_dir = workspace / "data/runs" / recipe
    record = json.loads((run_dir / "training/training.json").read_text())
    assert (record["num_steps"], record["quantization"]) == (2, quantization)
    assert record["memory_kind"] == "cuda_allocated"
    assert record["loss_kernels"] == ("triton" if compiler_problem() is None else "torch")
    metrics = json.loads((run_dir / "metrics.json").read_text())
    assert metrics["memory_measured_gib"] == pytest.approx(record["peak_memory_bytes"] / 2**30, abs=1e-4)
    assert metrics["memory_predicted_gib"] > 0
    for stage in ("train", "merge", "evaluate"):
        held = json.loads((workspace / f"data/report/detection/memory/{recipe}/{stage}.json").read_text())
        before, after, end = held["before_load"], held["after_load"], held["end"]
        assert (held["kind"], held["gpus"], before["held_bytes"], before["reserved_bytes"]) == (
            "cuda_allocated",
            1,
            0,
            0,
        )
        assert 0 < after["held_bytes"] <= after["reserved_bytes"] < before["free_bytes"] <= before["total_bytes"]
        assert after["held_bytes"] <= end["peak_bytes"] <= end["peak_reserved_bytes"]
        # Of this process alone, unless another one shares the GPU.
        assert after["free_bytes"] <= before["free_bytes"]
    trained = json.loads((workspace / f"data/report/detection/memory/{recipe}/train.json").read_text())
    assert trained["end"]["peak_bytes"] >= record["peak_memory_bytes"]


def test_without_a_compiler_a_training_goes_on_and_its_record_says_so(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    result = run(workspace, "train", BF16)
    assert result.returncode == 0, result.stderr
    assert "the loss is computed without Triton" in result.stderr
    record = json.loads((workspace / "data/runs" / BF16 / "training/training.json").read_text())
    assert record["loss_kernels"] == "torch"


@pytest.mark.parametrize("recipe", [NF4, BF16])
def test_the_same_training_twice_gives_the_same_bytes(workspace: Path, recipe: str) -> None:
    trained_dir = workspace / "data/runs" / recipe / "trained"
    weights = []
    for _ in range(2):
        succeed(workspace, "train", recipe)
        weights.append({path.name: path.read_bytes() for path in sorted(trained_dir.rglob("*.safetensors"))})
    assert weights[0]
    assert weights[0] == weights[1]


KILLED_AFTER_A_SAVE = """
import os
from stages.kit.training.resumable import ResumableTrainer

save = ResumableTrainer._save_checkpoint

def save_and_die(trainer, *args):
    save(trainer, *args)
    os._exit(9)

ResumableTrainer._save_checkpoint = save_and_die
"""


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [(NF4, {}), (BF16, {}), (NF4, {"precision": "fp16", "optimizer": "adamw_8bit"})],
)
def test_a_training_that_was_killed_goes_on_with_the_same_bytes(
    workspace: Path, recipe: str, settings: dict[str, str]
) -> None:
    run_dir = workspace / "data/runs" / recipe
    yaml = YAML()
    plan = yaml.load(run_dir / "plan.yaml")
    yaml.dump({**plan, **settings}, run_dir / "plan.yaml")
    results = []
    for before in ("", KILLED_AFTER_A_SAVE):
        if before:
            assert run(workspace, "train", recipe, before=before).returncode == 9
        result = run(workspace, "train", recipe)
        assert result.returncode == 0, result.stderr
        assert ("goes on from step 1 of 2" in result.stderr) == bool(before)
        weights = {path.name: path.read_bytes() for path in sorted((run_dir / "trained").rglob("*.safetensors"))}
        results.append((weights, (run_dir / "training/trace.csv").read_text()))
        shutil.rmtree(workspace / ".bakeoff")
    assert results[0] == results[1]


def test_a_training_that_runs_out_of_a_gpus_memory_ends_with_its_own_exit_code(workspace: Path) -> None:
    """torch may have 16 MiB: less than cuBLAS alone wants of it."""
    little = (
        "import torch\n"
        "torch.cuda.set_per_process_memory_fraction((16 << 20) / torch.cuda.get_device_properties(0).total_memory)"
    )
    result = run(workspace, "train", BF16, before=little)
    assert result.returncode == OUT_OF_MEMORY, result.stderr
    assert "out of memory" in result.stderr
    assert "Traceback" not in result.stderr
