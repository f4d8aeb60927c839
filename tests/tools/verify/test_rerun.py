"""A stage run again by the real launcher, on stages that do next to nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from stages.core.dvc_cache import cache_dir
from stages.core.environment import NUMERIC_PREFIXES
from stages.core.errors import UserError
from tests import ROOT
from tests.kit.launcher.small_checkout import run, small_checkout
from tools.verify.__main__ import main
from tools.verify.rerun import find_stage, rerun, temporary_workspace

NAME = "train@r1-llm-only"

# What it learns follows from its base, and from OMP_SHIFT from step 3 on.
TRAIN = """
import json, os, pathlib, random, time

assert pathlib.Path("data/bases/vlm/config.json").read_text() == "{}"
assert not pathlib.Path("data/runs/r1-llm-only/trained").exists()
assert os.environ.get("DVC_ROOT", "") != "not this one"
shift = float(os.environ.get("OMP_SHIFT", 0))
losses = [1 / step + shift * (step > 2) for step in range(1, 6)]
run = pathlib.Path("data/runs/r1-llm-only")
for folder in ("trained", "training"):
    (run / folder).mkdir()
rows = [f"{step},{loss.hex()},{1.0.hex()}" for step, loss in enumerate(losses, 1)]
(run / "training/trace.csv").write_text("\\n".join(["step,loss,grad_norm", *rows]) + "\\n")
training = {"train_seconds": time.time(), "final_loss": losses[-1]}
(run / "training/training.json").write_text(json.dumps(training))
(run / "trained/weights.bin").write_text(repr(losses))
if os.environ.get("OMP_SLEEPS"):
    pathlib.Path("asleep").write_text(str(os.getpid()))
    time.sleep(100)
if os.environ.get("OMP_FAILS"):
    raise SystemExit(3)
"""

# Reads the folder that its profile names.
BASE = """
import pathlib, re, shutil

source = re.search(r"vlm: folder:(.*)", pathlib.Path("params.yaml").read_text())[1]
pathlib.Path("data/bases/vlm").mkdir(parents=True)
shutil.copy(pathlib.Path(source) / "config.json", "data/bases/vlm")
pathlib.Path("data/bases/vlm/source.txt").write_text(source)
"""

PIPELINE = """
stages:
  base:
    foreach: [vlm]
    do:
      cmd: exec docker/run base
      deps: [stages/base.py]
      outs: ["data/provenance/base@${item}.json", "data/bases/${item}"]
  train:
    foreach: ${recipes}
    do:
      cmd: exec docker/run train
      params: ["recipes.${key}"]
      deps: [data/bases/vlm, "data/runs/${key}/plan.yaml", stages/train.py]
      outs: ["data/provenance/detection/train@${key}.json", "data/runs/${key}/trained", "data/runs/${key}/training"]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With r1-llm-only trained by the launcher."""
    place = tmp_path_factory.mktemp("trained") / "a workspace"
    workspace = small_checkout(place, pipeline=PIPELINE, train=TRAIN, base=BASE)
    run(workspace, "docker/run", "train", "r1-llm-only")
    return workspace


@pytest.fixture
def workspace(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith(("DVC_", *NUMERIC_PREFIXES))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BAKEOFF_ENGINE", "process")
    return Path(shutil.copytree(trained, tmp_path / "a moved workspace", symlinks=True))


def left(workspace: Path) -> list[Path]:
    """Temporary folders."""
    return list((workspace / ".bakeoff/verify").iterdir())


def everything(workspace: Path) -> dict[str, bytes]:
    kept = (path for path in workspace.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(workspace)): path.read_bytes() for path in kept if ".venv" not in path.parts}


def test_a_stage_comes_out_the_same_and_the_workspace_stays_as_it_was(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVC_ROOT", "not this one")
    monkeypatch.chdir(workspace)
    before = everything(workspace)
    same = CliRunner().invoke(main, ["--rerun", NAME])
    assert same.exit_code == 0, same.output
    assert same.output.startswith(f"{NAME} came out the same again, byte for byte: 3 files, ")
    assert same.output.rstrip().endswith("but for times and memory: data/runs/r1-llm-only/training/training.json")
    assert everything(workspace) == before
    assert left(workspace) == []


def test_the_first_different_step_is_named_and_possible_reasons(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_SHIFT", "0.25")
    with (workspace / "stages/train.py").open("a") as file:
        file.write("# changed")
    again = rerun(workspace, NAME)
    third = 1 / 3
    assert list(again.comparison.different.items()) == [
        (
            "data/runs/r1-llm-only/training/trace.csv",
            f"step 3 of 5: loss 0.333333333 against 0.583333333 ({third.hex()} against {(third + 0.25).hex()})",
        ),
        (
            "data/runs/r1-llm-only/trained/weights.bin",
            "line 1: '[1.0, 0.5, 0.3333333333333333, 0.25, 0.2]' against '[1.0, 0.5, 0.5833333333333333, 0.5, 0.45]'",
        ),
        ("data/runs/r1-llm-only/training/training.json", "final_loss: 0.2 against 0.45"),
    ]
    assert again.unlike == ("the code of the stage", "variables of the environment")


def test_a_file_that_was_damaged_after_a_training_is_told_from_another_training(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "data/runs/r1-llm-only/trained/weights.bin").write_text("damaged")
    monkeypatch.chdir(workspace)
    different = CliRunner().invoke(main, ["--rerun", NAME])
    assert different.exit_code == 1
    assert different.output.startswith(f"{NAME} came out DIFFERENT: 1 of 3 files, ")
    assert "the training itself took the same course, step by step" in different.output
    assert "the two runs were alike in all that is recorded of them" in different.output


def test_a_signal_ends_the_stage_and_leaves_nothing(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_SLEEPS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-P", "-m", "tools.verify", "--rerun", NAME]
    process = subprocess.Popen(command, cwd=workspace, stderr=subprocess.PIPE, text=True)
    while not (asleep := [*workspace.glob(".bakeoff/verify/*/workspace/asleep")]) or not asleep[0].read_text():
        assert process.poll() is None
        time.sleep(0.05)
    stage = int(asleep[0].read_text())
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"{NAME} failed when it was run again, with exit code 143" in " ".join(said.split())
    assert not psutil.pid_exists(stage)
    assert left(workspace) == []


def test_a_failing_stage_and_a_signal_while_none_runs_leave_nothing_either(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_FAILS", "1")
    with pytest.raises(UserError, match=f"{NAME} failed when it was run again, with exit code 3"):
        rerun(workspace, NAME)
    assert left(workspace) == []
    monkeypatch.setattr("tools.verify.rerun._launch", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        rerun(workspace, NAME)
    assert left(workspace) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_folders_of_killed_runs_are_removed_and_those_of_running_ones_are_not(workspace: Path) -> None:
    killed = workspace / ".bakeoff/verify/train-left"
    (killed / "workspace").mkdir(parents=True)
    (killed / ".lock").touch()
    stage = find_stage(workspace, NAME)
    with temporary_workspace(workspace, stage) as first:
        assert not killed.exists()
        with temporary_workspace(workspace, stage) as second:
            assert first.exists()
            assert second.exists()
    assert left(workspace) == []


def test_what_cannot_be_compared_is_refused_before_anything_runs(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.verify.rerun._launch", None)
    with pytest.raises(UserError, match=r"no stage train@r1-llm-onyl \(did you mean 'train@r1-llm-only'\?\)"):
        rerun(workspace, "train@r1-llm-onyl")
    (workspace / "data/provenance/detection/train@r1-llm-only.json").write_text("{")
    with pytest.raises(UserError, match=r"train@r1-llm-only\.json is damaged: .*dvc checkout"):
        rerun(workspace, NAME)
    shutil.rmtree(workspace / "data/runs/r1-llm-only/training")
    missing = r"(?s)these are not here:\n  data/runs/r1-llm-only/training\n.*dvc repro train@r1"
    with pytest.raises(UserError, match=missing):
        rerun(workspace, NAME)


@pytest.mark.parametrize("place", ["photos", "../../photos"])
def test_a_relative_source_is_found_by_its_name(workspace: Path, place: str) -> None:
    """The name is part of the result: a lineage has it."""
    source = Path(os.path.normpath(workspace / place))
    source.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text("{}")
    params = workspace / "params.yaml"
    params.write_text(params.read_text().replace("folder:data/tiny/qwen2-vl", f"folder:{place}", 1))
    shutil.rmtree(workspace / "data/bases/vlm")
    run(workspace, "docker/run", "base", "vlm")
    again = rerun(workspace, "base@vlm")
    assert (len(again.comparison.equal), again.comparison.different, again.unlike) == (2, {}, ())


def test_inputs_are_links_dvcs_cache_is_the_workspaces_and_tracking_is_off(workspace: Path) -> None:
    params = workspace / "params.yaml"
    params.write_text(params.read_text().replace("wandb: false", "wandb: true", 1))
    with temporary_workspace(workspace, find_stage(workspace, NAME)) as folder:
        name = "data/bases/vlm/config.json"
        assert (folder / name).samefile(workspace / name)
        assert not (folder / "params.yaml").samefile(params)
        assert "wandb: false" in (folder / "params.yaml").read_text()
        assert (folder / ".bakeoff/gpus").samefile(workspace / ".bakeoff/gpus")
        assert cache_dir(folder) == cache_dir(workspace)
        assert not (folder / "data/runs/r1-llm-only/trained").exists()
    assert "wandb: true" in params.read_text()
