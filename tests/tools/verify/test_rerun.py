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
from click.testing import CliRunner, Result

from stages.core.environment import NUMERIC_PREFIXES
from tests import ROOT
from tests.launcher.small_checkout import run, small_checkout
from tools.verify.__main__ import main

NAME = "train@r1-llm-only"

# The weights depend on OMP_SHIFT.
TRAIN = """
import json, os, pathlib, time

assert pathlib.Path("data/bases/vlm/config.json").read_text() == "{}"
assert os.environ.get("DVC_ROOT", "") != "not this one"
assert "[wandb]" not in pathlib.Path("params.yaml").read_text()
run = pathlib.Path("data/runs/r1-llm-only")
for folder in ("trained", "training"):
    (run / folder).mkdir()
loss = 0.5 + float(os.environ.get("OMP_SHIFT", 0))
(run / "training/training.json").write_text(json.dumps({"train_seconds": time.time(), "final_loss": loss}))
(run / "trained/weights.bin").write_text(f"weights {loss}")
if os.environ.get("OMP_SLEEPS"):
    pathlib.Path("asleep").write_text(str(os.getpid()))
    time.sleep(100)
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
    copy = Path(shutil.copytree(trained, tmp_path / "a moved workspace", symlinks=True))
    monkeypatch.chdir(copy)
    return copy


def rerun(stage: str = NAME) -> Result:
    result = CliRunner().invoke(main, ["--rerun", stage])
    folder = Path(".bakeoff/verify")
    assert not folder.exists() or not list(folder.iterdir()), "the temporary workspace is removed"
    return result


def everything(workspace: Path) -> dict[str, bytes]:
    kept = (path for path in workspace.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(workspace)): path.read_bytes() for path in kept if ".venv" not in path.parts}


def test_a_stage_comes_out_the_same_and_the_workspace_stays_unchanged(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVC_ROOT", "not this one")
    params = workspace / "params.yaml"
    params.write_text(params.read_text().replace("{to: []", "{to: [wandb]", 1))
    before = everything(workspace)
    result = rerun()
    assert result.exit_code == 0, result.output
    assert f"{NAME} came out the same again" in result.output
    assert everything(workspace) == before


def test_differences_are_named_with_what_may_have_caused_them(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_SHIFT", "0.25")
    with (workspace / "stages/train.py").open("a") as file:
        file.write("# changed")
    result = rerun()
    assert result.exit_code == 1
    assert "trained/weights.bin: differs\n" in result.output
    assert "training/training.json: differs in final_loss\n" in result.output
    assert "the records of the two runs differ in: code, environment\n" in result.output


def test_a_signal_ends_the_stage_and_leaves_nothing(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_SLEEPS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-P", "-m", "tools.verify", "--rerun", NAME]
    process = subprocess.Popen(command, cwd=workspace, stderr=subprocess.PIPE, text=True)
    while not (asleep := [*workspace.glob(".bakeoff/verify/**/asleep")]) or not asleep[0].read_text():
        assert process.poll() is None
        time.sleep(0.05)
    stage = int(asleep[0].read_text())
    process.send_signal(signal.SIGTERM)
    _, messages = process.communicate()
    assert process.returncode == 1
    assert "with exit code 143" in " ".join(messages.split())
    assert not psutil.pid_exists(stage)
    assert not list((workspace / ".bakeoff/verify").iterdir())


def test_what_cannot_be_compared_is_refused_before_anything_runs(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.verify.rerun.launch", None)
    assert "did you mean 'train@r1-llm-only'" in rerun("train@r1-llm-onyl").output
    (workspace / "data/provenance/detection/train@r1-llm-only.json").write_text("{")
    assert "train@r1-llm-only.json is damaged" in rerun().output
    shutil.rmtree(workspace / "data/runs/r1-llm-only/training")
    assert f"dvc repro {NAME}" in " ".join(rerun().output.split())


def test_a_relative_source_is_found_by_its_name(workspace: Path) -> None:
    """The name is part of the result: a lineage has it."""
    place = "../../photos"
    source = Path(os.path.normpath(workspace / place))
    source.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text("{}")
    params = workspace / "params.yaml"
    params.write_text(params.read_text().replace("folder:data/tiny/qwen2-vl", f"folder:{place}", 1))
    shutil.rmtree(workspace / "data/bases/vlm")
    run(workspace, "docker/run", "base", "vlm")
    result = rerun("base@vlm")
    assert result.exit_code == 0, result.output
