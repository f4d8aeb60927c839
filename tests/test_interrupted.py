"""Stages that are killed, signalled, or run out of memory, through launcher and stage; the same command resumes.

And a training that is run again after an edit: beside the undisturbed one that the killed one is compared with.
"""

import json
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
import torch
from click.testing import CliRunner
from ruamel.yaml import YAML

import stages.evaluate
import stages.merge
import stages.train
from stages.core.params import load_params
from stages.evaluation import generate
from stages.launcher.launch import run_down_the_ladder
from stages.launcher.pipeline import Request
from stages.launcher.process import Ended
from stages.training.trainer import RecipeTrainer
from tests import ROOT
from tests.launcher.small_checkout import CALLER, Command, request_of, run, wait_until
from tests.stage_runs import ANSWER_TOKENS, done, small_params, write_params
from tools.verify.__main__ import main as verify

pytestmark = pytest.mark.pipeline

RECIPE = "r1-llm-only"
HELD = """

import time
from stages.training.resume import SaveInTime

on_step_end = SaveInTime.on_step_end

def held(saving, args, state, control, **rest):
    while Path(f"hold-{state.global_step}").exists():
        time.sleep(0.02)
    on_step_end(saving, args, state, control, **rest)

SaveInTime.on_step_end = held
"""
"""Code for the train stage: it waits at the end of step N, before it saves, while its workspace has a file hold-N."""


@pytest.fixture(scope="module")
def prepared(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a base, data, and a plan for 9 steps of 4 samples, each of which is saved."""
    workspace = tmp_path_factory.mktemp("prepared") / "a workspace"
    for folder in ("stages", "docker"):
        shutil.copytree(ROOT / folder, workspace / folder, ignore=shutil.ignore_patterns("*.lock"))
    train = workspace / "stages/train.py"
    train.write_text(train.read_text().replace("\n\n@click.command", f"{HELD}\n\n@click.command", 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        raw = small_params(tiny_vlm, max_new_tokens=ANSWER_TOKENS)
        raw["recipes"][RECIPE].update(epochs=3, max_steps=9)
        raw["profiles"]["tiny"]["memory"]["micro_batch"] = 4
        raw["checkpoints"]["every_steps"] = 1
        write_params(raw)
        done("base", "vlm")
        done("prepare", "nutrition-tables")
        run(workspace, "docker/run", "plan", RECIPE)  # as it is planned again
    return workspace


@pytest.fixture
def workspace(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = shutil.copytree(prepared, tmp_path / "a copy")
    monkeypatch.chdir(copy)
    return copy


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


# Kills and signals, in processes of their own.


def launched(workspace: Path, repository: Path) -> Command:
    """repository: the one that DVC names to an experiment that it runs in a clone."""
    environment = {**CALLER, "OMP_NUM_THREADS": "1", "DVC_ROOT": str(repository)}
    return Command(workspace, "docker/run", "train", RECIPE, env=environment)


def finish(launcher: Command) -> str:
    """Its log."""
    assert launcher.ended() == 0, launcher.output
    return launcher.output


def results(workspace: Path) -> dict[str, bytes]:
    """All that a training leaves, without times."""
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


def stage_of(launcher: Command) -> psutil.Process:
    found: list[psutil.Process] = []

    def is_there() -> bool:
        with suppress(psutil.NoSuchProcess):  # docker/run has other children, of a moment
            children = psutil.Process(launcher.process.pid).children()
            found.extend(child for child in children if "stages.train" in child.cmdline())
        return found != []

    wait_until(is_there, lambda: launcher.output)
    return found[0]


@pytest.fixture(scope="module")
def undisturbed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A training that nobody interrupts. It is still at work."""
    workspace = shutil.copytree(prepared, tmp_path_factory.mktemp("undisturbed") / "a clone")
    return launched(workspace, workspace)


def test_killed_and_signalled_it_ends_with_the_bytes_of_one_that_ran_through(
    prepared: Path, undisturbed: Command, tmp_path: Path
) -> None:
    """Each time in another folder, like DVC's experiments; its checkpoints are found below the repository."""
    repository = tmp_path / "repository"
    first, second, third = (shutil.copytree(prepared, tmp_path / f"{number} clone") for number in range(3))
    (first / "hold-3").touch()
    (second / "hold-5").touch()
    killed = launched(first, repository)
    wait_until(lambda: saved(repository) == [1, 2], lambda: killed.output)
    stage_of(killed).kill()
    assert killed.ended() == 128 + signal.SIGKILL
    assert {path.name for path in (first / "data/runs" / RECIPE).glob("[!.]*")} == {"plan.yaml", "memory.json"}

    signalled = launched(second, repository)
    wait_until(lambda: saved(repository) == [3, 4], lambda: signalled.output)
    signalled.process.send_signal(signal.SIGUSR1)
    signalled.until("SIGUSR1: stopping after this step")
    (second / "hold-5").unlink()
    assert signalled.ended() == 128 + signal.SIGUSR1
    assert "resuming from step 2/9" in signalled.output
    assert "SIGUSR1: stopped at step 5/9, saved at step 5" in signalled.output
    assert not list((second / "data/runs" / RECIPE).glob(".*"))

    assert "resuming from step 5/9" in finish(launched(third, repository))
    assert "resuming" not in finish(undisturbed)
    assert results(third) == results(undisturbed.workspace)


def test_the_first_step_that_the_real_trainer_computes_otherwise_is_named(
    undisturbed: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps run again with a learning rate that is a ten-thousandth larger. The first two have the same bits: the
    first one's rate is 0, as it warms up, and the second one's loss is computed before its update."""
    finish(undisturbed)
    workspace = shutil.copytree(undisturbed.workspace, tmp_path / "edited")
    lines = (ROOT / "dvc.yaml").read_text().splitlines(keepends=True)
    (workspace / "dvc.yaml").write_text("".join(line for line in lines if "data/provenance/" not in line))  # none here
    for name, value in CALLER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(workspace)
    run(workspace, "bash", "-c", f"dvc init --quiet --no-scm && dvc commit --quiet --force train@{RECIPE}")
    trainer = workspace / "stages/training/trainer.py"
    before, edited = '"lr": rate,', '"lr": 1.0001 * rate,'
    assert before in trainer.read_text()
    trainer.write_text(trainer.read_text().replace(before, edited))
    result = CliRunner().invoke(verify, ["--rerun", f"train@{RECIPE}", "--steps", "3"])
    assert result.exit_code == 1, result.output
    assert f"train@{RECIPE} computes something ELSE: at step 3 the loss is" in result.output


# Memory that runs out somewhere in a stage. The stages and the launcher's ladder are the real ones, in this process; an
# allocation that no machine can make is put into them.


def too_much(*_: object, **__: object) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


Place = Callable[[pytest.MonkeyPatch], None]


class Engine:
    """Runs stages in this process; the first attempts run out of memory, each at its place."""

    name = "here"
    image = None

    def __init__(self, *places: Place) -> None:
        self.places = places

    def run(self, request: Request) -> Ended:
        stage, *args = request.command
        with pytest.MonkeyPatch.context() as patch:
            if request.attempt < len(self.places):
                self.places[request.attempt](patch)
            result = CliRunner().invoke(getattr(stages, stage).main, args)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return Ended(code=result.exit_code)


def at_load(stage: Any, loader: str) -> Place:
    return lambda patch: patch.setattr(stage, loader, too_much)


def at_step(number: int) -> Place:
    step = RecipeTrainer.training_step

    def training_step(trainer: RecipeTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        if trainer.state.global_step + 1 == number:
            too_much()
        return step(trainer, *args, **kwargs)

    return lambda patch: patch.setattr(RecipeTrainer, "training_step", training_step)


def after_the_first_completions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generate.Ending, "completion", too_much)


def down_the_ladder(engine: Engine, stage: str, name: str, workspace: Path) -> int:
    request = request_of(workspace, stage, name, params=load_params())
    ended, _ = run_down_the_ladder(engine.run, request)
    return ended.code


def change_plan(workspace: Path, *, schedule: dict[str, int], **changes: Any) -> None:
    yaml = YAML()
    path = workspace / "data/runs" / RECIPE / "plan.yaml"
    plan = yaml.load(path)
    plan["schedule"].update(schedule)
    yaml.dump({**plan, **changes}, path)


def test_a_training_that_runs_out_of_memory_keeps_its_effective_batch(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At load, and at the first and the last step."""
    change_plan(workspace, schedule={"num_steps": 3}, validation=None)
    places = (at_load(stages.train, "load_trainable"), at_step(1), at_step(3))
    assert down_the_ladder(Engine(*places), "train", RECIPE, workspace) == 0
    assert [line.partition(" with ")[2] for line in capsys.readouterr().err.splitlines() if "launcher:" in line] == [
        "micro_batch 4 -> 2, grad_accumulation 1 -> 2",
        "micro_batch 2 -> 1, grad_accumulation 2 -> 4",
        "gradient_checkpointing off -> on",
    ]
    record = read(workspace / "data/runs" / RECIPE / "training/training.json")
    assert (record["micro_batch"], record["grad_accumulation"], record["gradient_checkpointing"]) == (1, 4, True)
    assert (record["attempt"], record["num_steps"]) == (3, 3)
    assert not list((workspace / "data/runs" / RECIPE).glob(".*partial"))


def test_an_evaluation_and_a_merge_that_run_out_of_memory_generate_fewer_at_once(workspace: Path) -> None:
    assert down_the_ladder(Engine(after_the_first_completions), "evaluate", "base-vlm", workspace) == 0
    metrics = read(workspace / "data/runs/base-vlm/metrics.json")
    assert (metrics["samples"], metrics["batch_size"], metrics["attempt"]) == (5, 1, 1)

    change_plan(workspace, schedule={"num_steps": 1, "warmup_steps": 0}, validation=None)
    done("train", RECIPE)
    assert down_the_ladder(Engine(after_the_first_completions), "merge", RECIPE, workspace) == 0
    cost = read(workspace / "data/runs" / RECIPE / "merge.json")["quantization_cost"]
    assert (cost["samples"], cost["batch_size"]) == (5, 1)

    change_plan(workspace, schedule={}, quantization="none")  # then a merge generates nothing
    with pytest.raises(click.ClickException, match="it needs a machine or a profile with more"):
        down_the_ladder(Engine(at_load(stages.merge, "load_model")), "merge", RECIPE, workspace)
