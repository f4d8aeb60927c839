"""Real trainings side by side end with the bytes of serial ones."""

import json
import os
from pathlib import Path

import pytest

from stages.kit.launcher.pipeline import declared_stages
from tools.faults.judge import require_success
from tools.faults.workspaces import clone_checkout, make_environment, tiny_params, workspace_in
from tools.verify.differences import compare_outputs

pytestmark = pytest.mark.pipeline

RECIPES = ("r2-vision-only", "r3-stage1")
"""By the same plan: the second takes over what the first has trained, or both would train the same at once."""


def test_trainings_side_by_side_have_the_bytes_of_serial_ones_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    environment, targets = make_environment(tmp_path), [f"train@{recipe}" for recipe in RECIPES]
    serial, other = (workspace_in(tmp_path / name, environment) for name in ("serial", "side by side/a workspace"))
    for workspace in (serial, other):
        clone_checkout(workspace.folder)
        with tiny_params(workspace.folder) as raw:
            tiny = raw["profiles"]["tiny"]
            tiny["datasets"]["nutrition-tables"]["generate"] = {"train": 16, "val": 4, "seed": 1}
            tiny["images"] = {"min_pixels": 3136, "max_pixels": 12544}
            tiny["memory"]["micro_batch"] = 2
            for recipe in RECIPES:
                raw["recipes"][recipe].update(effective_batch=4, epochs=1)
    require_success(serial.dvc("repro", *targets))
    require_success(other.python("-m", "tools.run", *targets, "--jobs", "2"))
    require_success(other.dvc("status", "-q", "--with-deps", *targets))
    written = [out for stage in declared_stages(serial.folder) for out in stage.written]
    left = tuple(out for out in written if (serial.folder / out).exists())
    compared = compare_outputs(serial.folder, other.folder, left)
    assert not compared.different
    weights = [f"data/runs/{recipe}/trained/weights.safetensors" for recipe in RECIPES]
    assert set(weights) <= set(compared.equal), compared.equal
    trained = [json.loads((other.folder / f"data/runs/{name}/training/training.json").read_text()) for name in RECIPES]
    assert sum(record.get("taken_from") is not None for record in trained) == 1
    records = (other.folder / "data/provenance/detection").glob("train@*.json")
    threads = {json.loads(path.read_text())["environment"]["OMP_NUM_THREADS"] for path in records}
    assert threads == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
