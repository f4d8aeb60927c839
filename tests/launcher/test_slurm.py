"""Steps of Slurm, by a srun that starts the command here: where stages run, resources, exit codes and signals.

With a real Slurm: tests/smoke/test_slurm.py.
"""

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams, Params, SlurmParams
from stages.launcher.pipeline import DeclaredStage
from stages.launcher.slurm import MARGIN, PROCESS_GIB, host_gib, run_step, runs_in_slurm, step_options
from stages.planning.resolve import resolve_plan
from tests.documents import write_yaml
from tests.launcher.small_checkout import CALLER, PARAMS, Command, notes, request_of, small_checkout
from tests.plans import changed

IN_SLURM = replace(PARAMS, profiles={"tiny": replace(PARAMS.active, place="slurm")})
STAGE = DeclaredStage(name="train@r1", command="docker/run train r1", params=(), deps=(), outs=())
ON_GPU = PARAMS.on("qwen2-vl-7b")
RECIPE = "r1-llm-only"
GIB = 2**30


@pytest.mark.parametrize(
    ("place", "params", "in_slurm"),
    [
        (None, PARAMS, False),
        ("slurm", PARAMS, True),
        (None, IN_SLURM, True),
        ("here", IN_SLURM, False),
        ("step", IN_SLURM, False),
    ],
)
def test_variable_has_precedence_over_the_profile_and_a_step_starts_none(
    place: str | None, params: Params, in_slurm: bool
) -> None:
    assert runs_in_slurm({"BAKEOFF_PLACE": place} if place else {}, params) is in_slurm
    with pytest.raises(UserError, match="the places are here, slurm"):
        runs_in_slurm({"BAKEOFF_PLACE": "slrum"}, params)


def planned(workspace: Path, **changes: Any) -> None:
    """A plan for 8 billion weights in bf16, of which an eighth is trained."""
    plan = resolve_plan(ON_GPU, RECIPE, train_samples=32)
    counts = {"vision": 0, "projector": 0, "llm": GIB, "total": GIB, "all": 8 * GIB}
    plan = changed(plan, trainable=counts, **{"dataloader_workers": 0, **changes})
    plan.write(workspace / "data/runs" / RECIPE / "plan.yaml")


def test_host_memory_holds_each_process_its_copy_of_the_model_and_a_checkpoint(tmp_path: Path) -> None:
    train, merge, evaluate = (request_of(tmp_path, stage, RECIPE) for stage in ("train", "merge", "evaluate"))
    assert host_gib(train) == 8, "without a plan"
    planned(tmp_path)
    assert host_gib(train) == MARGIN * (PROCESS_GIB + 16 + 12)
    assert host_gib(merge) == MARGIN * (PROCESS_GIB + 2 * 16)
    assert host_gib(evaluate) == MARGIN * (PROCESS_GIB + 16)
    planned(tmp_path, placement="ddp", device=DeviceParams(kind="cuda", count=4, memory_gb=48), dataloader_workers=2)
    assert host_gib(train) == MARGIN * (4 * (PROCESS_GIB + 16 + 2) + 12)


def options(workspace: Path, *own: str, stage: str = "train") -> list[str]:
    params = replace(ON_GPU, slurm=SlurmParams(gpu=own))
    declared = replace(STAGE, command=f"docker/run {stage} r1")
    return step_options(request_of(workspace, stage, "r1", params=params, stages=[declared]))


def test_options_of_params_come_last_and_replace_those_that_they_exclude(tmp_path: Path) -> None:
    assert {"--nodes=1", "--mem=8192M", "--gres=gpu:1", "--job-name=train@r1"} <= set(options(tmp_path))
    found = options(tmp_path, "--partition=a100", "--gres=gpu:a100:1", "--mem=64G")
    assert found[-3:] == ["--partition=a100", "--gres=gpu:a100:1", "--mem=64G"]
    assert not {"--gres=gpu:1", "--mem=8192M"} & set(found)
    found = options(tmp_path, "--mem-per-gpu=4G", "--cpus-per-task=")
    assert [option for option in found if "mem" in option or "cpus" in option] == ["--mem-per-gpu=4G"]
    assert "--gres=gpu:1" in found
    found = options(tmp_path, "--partition=a100", stage="compare")
    assert "--gres=none" in found
    assert "--partition=a100" not in found, "the stages without a GPU have their own"


SRUN = """#!/bin/bash
while [ "$1" != docker/run ]; do shift; done
SLURM_NODEID=0 exec "$@"
"""
TRAIN = """
import os, signal, sys, time

def note(text):
    with open("notes", "a") as file:
        print(text, file=file)

def save(number, frame):
    note(signal.Signals(number).name)
    if "stubborn" not in sys.argv:
        sys.exit(128 + number)

signal.signal(signal.SIGUSR1, save)
note(f"ready {os.getpid()}")
print("ready", flush=True)
if "fail" in sys.argv:
    sys.exit(7)
while True:
    time.sleep(60)
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A checkout with a profile for Slurm."""
    pipeline = "stages: {train: {foreach: [wait, fail, stubborn], do: {cmd: docker/run train, outs: ['x/${item}']}}}"
    workspace = small_checkout(tmp_path / "a workspace", pipeline=pipeline, train=TRAIN)
    params = YAML(typ="safe").load(workspace / "params.yaml")
    params["profiles"]["tiny"]["place"] = "slurm"
    write_yaml(params, workspace / "params.yaml")
    (workspace / "bin").mkdir()
    (workspace / "bin/srun").write_text(SRUN)
    (workspace / "bin/srun").chmod(0o755)
    return workspace


def step(workspace: Path, name: str) -> Command:
    env = CALLER | {"PATH": f"{workspace / 'bin'}:{CALLER['PATH']}"}
    return Command(workspace, "docker/run", "train", name, env=env)


def test_stage_fails_with_its_own_code(workspace: Path) -> None:
    command = step(workspace, "fail")
    assert command.ended() == 7
    assert command.output.startswith("launcher: srun --nodes=1 --ntasks-per-node=1 --job-name=train@fail ")


def test_a_signal_reaches_the_stage_as_the_one_that_srun_passes_on(workspace: Path) -> None:
    command = step(workspace, "wait")
    command.until("ready")
    command.process.send_signal(signal.SIGHUP)
    assert command.ended() == 128 + signal.SIGHUP
    assert notes(workspace)[1:] == ["SIGUSR1"]


def test_second_signal_ends_a_stage_that_goes_on_after_the_first(workspace: Path) -> None:
    command = step(workspace, "stubborn")
    command.until("ready")
    while command.process.poll() is None:  # those within two seconds are one
        command.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    ready, *received = notes(workspace)
    assert received == ["SIGUSR1"]
    assert not psutil.pid_exists(int(ready.split()[1]))


def test_missing_srun_is_reported_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no srun here; run them on this machine with: BAKEOFF_PLACE=here"):
        run_step(request_of(tmp_path, "train", "r1"))
