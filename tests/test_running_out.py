"""Memory that runs out somewhere in a stage: the run ends well, with the same effective batch, or with one message.

The stages are the real ones, on the smallest model, and so is the launcher's ladder; an allocation that no machine can
make is put into them. Their processes are this one where the way from process to process is not what is tested.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from ruamel.yaml import YAML
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import stages.evaluate
import stages.merge
import stages.train
from stages.core.errors import OUT_OF_MEMORY, OutOfMemory
from stages.core.params.load import load_params
from stages.kit.evaluation import answer
from stages.kit.launcher import launch
from stages.kit.launcher.launch import run_down_the_ladder
from stages.kit.launcher.process import Ended, StageRun
from stages.kit.planning.plan import resolve_plan
from stages.kit.training import processes
from stages.kit.training.trainer import RecipeTrainer
from tests import ROOT
from tests.test_stages import done, small_params, write_params

pytestmark = pytest.mark.pipeline

RECIPE = "r1-llm-only"

# In place of the workspace's stages/__init__.py, so that it runs before the stage does: some processes run out.
INJECTION = """
import os, sys

def too_much(*args, **kwargs):
    import torch
    torch.empty(1 << 60, dtype=torch.uint8)

if {stage!r} in sys.orig_argv and {where}:
    import stages.kit.models.load as load
    load.load_model = too_much
"""


def too_much(*_: object, **__: object) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.fixture(scope="module")
def prepared(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a base, data, and a plan for 9 steps of 4 samples at once."""
    workspace = tmp_path_factory.mktemp("running out") / "a workspace"
    code = shutil.ignore_patterns("__pycache__", "*.lock")
    for folder in ("stages", "docker"):
        shutil.copytree(ROOT / folder, workspace / folder, ignore=code)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        raw = small_params(tiny_vlm)
        raw["recipes"][RECIPE].update(epochs=3, max_steps=9)
        raw["profiles"]["tiny"]["memory"]["micro_batch"] = 4
        write_params(raw)
        done("base", "vlm")
        done("prepare", "nutrition-tables")
        done("plan", RECIPE)
    return workspace


@pytest.fixture
def workspace(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = shutil.copytree(prepared, tmp_path / "a copy")
    monkeypatch.chdir(copy)
    return copy


class Engine:
    """Runs stages in this process; those of the first attempts run out of memory, each at its place."""

    name = "here"
    image = None

    def __init__(self, *places: Callable[[pytest.MonkeyPatch], None]) -> None:
        self.places = places
        self.said = ""

    def run(self, stage_run: StageRun) -> Ended:
        stage, *args = stage_run.command
        with pytest.MonkeyPatch.context() as patch:
            if stage_run.attempt < len(self.places):
                self.places[stage_run.attempt](patch)
            result = CliRunner().invoke(getattr(stages, stage).main, args)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        self.said += result.output
        return Ended(code=result.exit_code)


def at_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stages.train, "load_model", too_much)


def at_load_of_a_merge(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stages.merge, "load_model", too_much)


def at_step(number: int) -> Callable[[pytest.MonkeyPatch], None]:
    step = RecipeTrainer.training_step

    def training_step(trainer: RecipeTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        if trainer.state.global_step + 1 == number:
            too_much()
        return step(trainer, *args, **kwargs)

    return lambda patch: patch.setattr(RecipeTrainer, "training_step", training_step)


def after_the_first_answers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(answer, "decoded", too_much)


def down_the_ladder(engine: Engine, stage: str, name: str, workspace: Path) -> int:
    stage_run = StageRun(stage=stage, args=(name,), declared=None, workspace_dir=workspace, caller={})
    ended, _ = run_down_the_ladder(engine, stage_run, load_params(), say=launch.say)
    return ended.code


def change_plan(workspace: Path, *, schedule: dict[str, int], **changes: Any) -> None:
    yaml = YAML()
    path = workspace / "data/runs" / RECIPE / "plan.yaml"
    plan = yaml.load(path)
    plan["schedule"].update(schedule)
    yaml.dump({**plan, **changes}, path)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_a_training_that_runs_out_of_memory_at_load_and_at_steps_1_and_8_ends_with_its_effective_batch(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert down_the_ladder(Engine(at_load, at_step(1), at_step(8)), "train", RECIPE, workspace) == 0
    assert [
        line.partition("anew with ")[2] for line in capsys.readouterr().err.splitlines() if "launcher:" in line
    ] == [
        "micro_batch 4 -> 2, grad_accumulation 1 -> 2",
        "micro_batch 2 -> 1, grad_accumulation 2 -> 4",
        "gradient_checkpointing off -> on",
    ]
    record = read(workspace / "data/runs" / RECIPE / "training/training.json")
    assert (record["micro_batch"], record["grad_accumulation"], record["gradient_checkpointing"]) == (1, 4, True)
    assert (record["attempt"], record["num_steps"]) == (3, 9)
    assert not list((workspace / "data/runs" / RECIPE).glob(".*partial"))


def test_an_evaluation_that_runs_out_of_memory_ends_with_all_samples(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert down_the_ladder(Engine(after_the_first_answers), "evaluate", "base-vlm", workspace) == 0
    assert capsys.readouterr().err.count("restarting it with batch_size 3 -> 1") == 1
    metrics = read(workspace / "data/runs/base-vlm/metrics.json")
    assert (metrics["samples"], metrics["batch_size"], metrics["attempt"]) == (5, 1, 1)


def test_a_merge_out_of_4_bits_that_runs_out_of_memory_answers_fewer_at_once(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_plan(workspace, schedule={"num_steps": 1, "warmup_steps": 0})
    done("train", RECIPE)
    assert down_the_ladder(Engine(after_the_first_answers), "merge", RECIPE, workspace) == 0
    assert capsys.readouterr().err.count("restarting it with batch_size 3 -> 1") == 1
    cost = read(workspace / "data/runs" / RECIPE / "merge.json")["quantization_cost"]
    assert (cost["samples"], cost["batch_size"]) == (5, 1)

    change_plan(workspace, schedule={}, quantization="none")  # then a merge answers nothing
    with pytest.raises(click.ClickException, match="it needs a machine or a profile with more"):
        down_the_ladder(Engine(at_load_of_a_merge), "merge", RECIPE, workspace)


def test_what_never_fits_ends_with_one_message_and_leaves_nothing(workspace: Path) -> None:
    change_plan(workspace, schedule={"micro_batch": 1, "grad_accumulation": 4})
    with pytest.raises(click.ClickException) as refusal:
        down_the_ladder(Engine(at_load, at_step(1)), "train", RECIPE, workspace)
    said = refusal.value.format_message()
    assert "ran out of memory with every setting lowered" in said
    assert "  as planned\n  gradient_checkpointing off -> on\n" in said
    assert "The prediction for the plan was 0." in said
    assert {path.name for path in (workspace / "data/runs" / RECIPE).iterdir()} == {"memory.json", "plan.yaml"}


def test_each_attempt_is_a_fresh_process_and_its_end_is_said(workspace: Path) -> None:
    (workspace / "stages/__init__.py").write_text(
        INJECTION.format(stage="stages.evaluate", where='"--attempt" not in sys.argv')
    )
    result = subprocess.run(
        ["docker/run", "evaluate", "base-vlm"],
        env={"PATH": os.environ["PATH"], "VIRTUAL_ENV": sys.prefix, "BAKEOFF_ENGINE": "process"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "launcher: evaluate base-vlm ran out of memory; restarting it with batch_size 3 -> 1" in result.stderr
    assert "Traceback" not in result.stderr
    assert read(workspace / "data/runs/base-vlm/metrics.json")["attempt"] == 1


def test_one_process_of_several_that_runs_out_of_memory_is_enough(workspace: Path) -> None:
    """Placement ddp, for real: torchrun itself would end with 1."""
    change_plan(
        workspace,
        schedule={"micro_batch": 2, "grad_accumulation": 1, "num_steps": 2},
        device={"kind": "cpu", "count": 2},
        placement="ddp",
    )
    (workspace / "stages/__init__.py").write_text(
        INJECTION.format(stage="stages.train", where='os.environ.get("RANK") == "1"')
    )
    result = subprocess.run(
        [sys.executable, "-m", "stages.train", RECIPE],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == OUT_OF_MEMORY, result.stderr


@pytest.mark.parametrize(
    ("codes", "raised"),
    [((1, OUT_OF_MEMORY), OutOfMemory), ((1, -9), SystemExit), ((1, 1), ChildFailedError)],
)
def test_what_ended_the_processes_of_a_training_ends_it(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...], raised: type[BaseException]
) -> None:
    def torchrun(_: list[str]) -> None:
        failures = {rank: ProcessFailure(rank, 100 + rank, code, "none") for rank, code in enumerate(codes)}
        raise ChildFailedError("train", failures)

    monkeypatch.setattr(processes, "torchrun", torchrun)
    plan = resolve_plan(load_params(ROOT / "params.yaml"), RECIPE, train_samples=32)
    with pytest.raises(raised) as caught:
        processes.run_workers(plan.device, [])
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 128 + 9
