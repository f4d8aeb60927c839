"""A training that is killed, asked to end, and started again by the same command, through launcher and stage."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import ROOT
from tests.test_running_out import change_plan
from tests.test_stages import done, small_params, write_params

pytestmark = pytest.mark.pipeline

RECIPE = "r1-llm-only"
TRAIN = ("docker/run", "train", RECIPE)


@pytest.fixture(scope="module")
def prepared(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a base, data, and a plan for 12 steps, each of which is saved."""
    workspace = tmp_path_factory.mktemp("interrupted") / "a workspace"
    for folder in ("stages", "docker"):
        shutil.copytree(ROOT / folder, workspace / folder, ignore=shutil.ignore_patterns("__pycache__", "*.lock"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        raw = small_params(tiny_vlm)
        raw["recipes"][RECIPE].update(epochs=4, max_steps=12)
        raw["checkpoints"]["every_steps"] = 1
        write_params(raw)
        done("base", "vlm")
        done("prepare", "nutrition-tables")
        done("plan", RECIPE)
    return workspace


def start(workspace: Path, repository: Path) -> "subprocess.Popen[str]":
    """repository: what DVC names to an experiment that it runs in a clone."""
    plain = {"PATH": os.environ["PATH"], "VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1"}
    environment = {**plain, "BAKEOFF_ENGINE": "process", "DVC_ROOT": str(repository)}
    return subprocess.Popen(TRAIN, cwd=workspace, env=environment, stderr=subprocess.PIPE, text=True)


def finish(workspace: Path, repository: Path) -> str:
    """What it said."""
    training = start(workspace, repository)
    _, said = training.communicate()
    assert training.returncode == 0, said
    return said


def results(workspace: Path) -> dict[str, bytes]:
    """All that a training leaves, times aside."""
    run_dir = workspace / "data/runs" / RECIPE
    found = {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    record = json.loads(found["training/training.json"])
    found["training/training.json"] = json.dumps(
        {name: value for name, value in record.items() if name not in ("train_seconds", "samples_per_second")}
    ).encode()
    return found


def saved(repository: Path) -> list[int]:
    steps = (repository / ".bakeoff/checkpoints" / RECIPE).glob("*/step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in steps)


def wait_until(is_so: Callable[[], bool], training: "subprocess.Popen[str]") -> None:
    while not is_so():
        assert training.poll() is None, training.communicate()[1]
        time.sleep(0.02)


def test_it_ends_with_the_bytes_of_one_that_nobody_disturbed(prepared: Path, tmp_path: Path) -> None:
    """Each time in another folder, as DVC's experiments are; what it has saved is found below the repository."""
    repository = tmp_path / "repository"
    first, second, third, again, calm = (
        shutil.copytree(prepared, tmp_path / f"{name} clone") for name in ("1st", "2nd", "3rd", "4th", "5th")
    )

    killed = start(first, repository)
    wait_until(lambda: len(saved(repository)) > 1, killed)
    (stage,) = psutil.Process(killed.pid).children()
    stage.kill()
    assert killed.wait() == 128 + signal.SIGKILL
    assert {path.name for path in (first / "data/runs" / RECIPE).glob("[!.]*")} == {"plan.yaml", "memory.json"}
    after_the_kill = saved(repository)[-1]

    asked = start(second, repository)
    wait_until(lambda: saved(repository)[-1] > after_the_kill, asked)
    asked.send_signal(signal.SIGUSR1)
    _, said = asked.communicate()
    assert asked.returncode == 128 + signal.SIGUSR1
    assert f"resuming from step {after_the_kill}/12" in said
    step = saved(repository)[-1]
    assert f"SIGUSR1: saved at step {step}/12; run the same command to resume" in said
    assert not list((second / "data/runs" / RECIPE).glob(".*"))

    assert f"resuming from step {step}/12" in finish(third, repository)
    assert "goes on" not in finish(calm, calm)
    # A DVC that was killed before it had kept all of that removes it, and has it made again.
    assert "resuming from step 11/12" in finish(again, repository)
    assert results(third) == results(again) == results(calm)


def test_asked_to_end_torchrun_lets_its_workers_save(prepared: Path, tmp_path: Path) -> None:
    """Placement ddp: the launcher asks torchrun, which asks the two workers, and whose own end is not theirs."""
    workspace = shutil.copytree(prepared, tmp_path / "a clone")
    change_plan(
        workspace,
        schedule={"micro_batch": 2, "grad_accumulation": 1},
        device={"kind": "cpu", "count": 2},
        placement="ddp",
    )
    training = start(workspace, workspace)
    wait_until(lambda: len(saved(workspace)) > 1, training)
    training.terminate()
    _, said = training.communicate()
    assert training.returncode == 128 + signal.SIGTERM, said
    step = saved(workspace)[-1]
    assert said.count(f"SIGTERM: saved at step {step}/12; run the same command to resume") == 1
    assert "Traceback" not in said
