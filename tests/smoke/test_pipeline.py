"""A pipeline in containers: what it leaves, and what it leaves alone."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from stages.core.provenance import read_provenance
from stages.launcher.pipeline import declared_stages
from stages.publishing.check import check_published
from tests.launcher.small_checkout import Command, commit, run
from tests.smoke.conftest import ENGINE, EVALUATED, dvc

# The pipeline is run by the first test that looks at it.
pytestmark = [pytest.mark.engine, pytest.mark.pipeline, pytest.mark.timeout(1200)]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_second_run_has_nothing_to_do(finished: Path) -> None:
    for targets in (EVALUATED, ("--single-item", "compare@detection")):
        said = dvc(finished, "repro", *targets)
        assert "Running stage" not in said
        assert "Data and pipelines are up to date" in said


def test_every_file_belongs_to_the_caller(finished: Path) -> None:
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in finished.rglob("*")}
    assert owners == {(os.getuid(), os.getgid())}


def test_no_input_was_changed(finished: Path) -> None:
    assert run(finished, "git", "status", "--porcelain").split() == ["??", "dvc.lock"]


def test_only_declared_outputs_are_in_the_workspace(finished: Path) -> None:
    declared = {Path(path) for stage in declared_stages(finished) for path in (*stage.outs, *stage.deps)}
    for path in (finished / "data").rglob("*"):
        inside = path.relative_to(finished)
        if path.is_file() and inside.parts[1] != "tiny":
            assert declared.intersection((inside, *inside.parents)), inside
    left = [path.name for path in (finished / ".bakeoff/stages").rglob("*") if path.is_file()]
    assert set(left) == {"lock"}


def test_containers_and_processes_side_by_side_and_in_turn_give_the_same_weights_byte_for_byte(
    finished: Path, on_the_host: Command
) -> None:
    """With the same recipe, seed and locked packages; Python's build and the number of threads may differ."""
    assert on_the_host.process.wait() == 0, on_the_host.output
    for path in (
        "prepared/nutrition-tables/train.parquet",
        "runs/r2-vision-only/trained/weights.safetensors",
        "runs/r2-vision-only/merged/model.safetensors",
        "runs/r3-two-stage/trained/adapter/adapter_model.safetensors",
        "runs/r3-two-stage/merged/model.safetensors",
        "runs/r3-two-stage/predictions.parquet",
    ):
        assert sha256(on_the_host.workspace / "data" / path) == sha256(finished / "data" / path), path


def test_two_tracked_processes_train_together_without_a_network_on_links_to_dvcs_cache(
    finished: Path, tmp_path: Path
) -> None:
    workspace = copy_of(finished, tmp_path)
    dvc(workspace, "config", "--local", "cache.type", "symlink")
    dvc(workspace, "checkout", "--relink", "--with-deps", *EVALUATED)
    assert (workspace / "data/bases/vlm/config.json").is_symlink()
    changes = ("tracking.to=[wandb]", "++profiles.tiny.device.count=2", "++recipes.r2-vision-only.max_steps=1")
    options = (option for change in changes for option in ("-S", change))
    dvc(workspace, "exp", "run", *options, "train@r2-vision-only", "baseline@base-vlm")
    training = json.loads((workspace / "data/runs/r2-vision-only/training/training.json").read_text())
    assert training["num_steps"] == 1
    dvc(workspace, "repro", "--single-item", "compare@detection")
    tracked = workspace / ".bakeoff/tracking/wandb"
    assert list(tracked.glob("offline-run-*/*.wandb"))
    for name in ("metrics", "comparison"):
        assert list(tracked.glob(f"offline-run-*/files/media/table/{name}_*.table.json"))


def test_a_run_is_published_and_a_copy_of_it_proves_itself_elsewhere(finished: Path, tmp_path: Path) -> None:
    workspace = copy_of(finished, tmp_path)
    dvc(workspace, "repro", "--single-item", "publish@r3-two-stage")
    record = read_provenance(workspace / "data/provenance/publish@r3-two-stage.json")
    assert record.engine == ENGINE
    published = workspace / "data/published/r3-two-stage"
    checked = check_published(Path(shutil.copytree(published, tmp_path / "elsewhere")))
    made = (f"{kind}@{name}" for name in ("r2-vision-only", "r3-two-stage") for kind in ("train", "merge"))
    assert [record.stage for record in checked.records] == [*made, "evaluate@r3-two-stage"]


def copy_of(finished: Path, tmp_path: Path) -> Path:
    """The finished workspace, its results committed, to try things in."""
    workspace = tmp_path / "a copy"
    subprocess.run(["cp", "--archive", finished, workspace], check=True)
    commit(workspace)
    return workspace
