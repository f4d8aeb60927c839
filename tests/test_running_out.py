"""Memory that runs out somewhere in a stage: the run ends well, with the same effective batch, or with one message.

The stages are the real ones, run by the real launcher on the smallest model; an allocation that no machine can make
is put into them.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import stages.train
from stages.kit.errors import OUT_OF_MEMORY, OutOfMemory
from stages.kit.params import load_params
from stages.kit.plan import resolve_plan
from tests.closure import ROOT
from tests.test_stages import done, small_params, write_params

pytestmark = pytest.mark.pipeline

RECIPE = "r1-llm-only"

# At the top of the workspace's `stages`, so that it runs before the stage does. PLACES: where each attempt runs out.
INJECTION = """
import sys

PLACES = {places!r}

def too_much(*args, **kwargs):
    import torch
    torch.empty(1 << 60, dtype=torch.uint8)

def inject(where):
    if where == "load":
        import stages.kit.models.load as load
        load.load_model = too_much
    elif where == "evaluation":
        import stages.kit.evaluation.generation as generation
        generation._decode = too_much  # after the first batch's answers
    else:
        from stages.kit.training.trainer import RecipeTrainer
        step = RecipeTrainer.training_step
        def training_step(self, *args, **kwargs):
            if self.state.global_step + 1 == where:
                too_much()
            return step(self, *args, **kwargs)
        RecipeTrainer.training_step = training_step

if "stages.train" in sys.orig_argv or "stages.evaluate" in sys.orig_argv:
    attempt = int(sys.argv[-1]) if "--attempt" in sys.argv else 0
    if attempt < len(PLACES):
        inject(PLACES[attempt])
"""


@pytest.fixture(scope="module")
def prepared(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a base, data, and a plan for 32 steps of 4 samples at once."""
    workspace = tmp_path_factory.mktemp("running out") / "a workspace"
    code = shutil.ignore_patterns("__pycache__", "*.lock")
    for folder in ("stages", "docker"):
        shutil.copytree(ROOT / folder, workspace / folder, ignore=code)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        raw = small_params(tiny_vlm)
        raw["recipes"][RECIPE].update(epochs=11, max_steps=32)
        raw["profiles"]["tiny"]["memory"]["micro_batch"] = 4
        write_params(raw)
        done("base", "vlm")
        done("prepare", "nutrition-tables")
        done("plan", RECIPE)
    return workspace


@pytest.fixture
def workspace(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "a copy")


def launch(workspace: Path, stage: str, name: str, *places: str | int) -> tuple[int, str]:
    """(exit code, what was said) of a stage whose attempts run out of memory there, one after the other."""
    (workspace / "stages/__init__.py").write_text(INJECTION.format(places=places))
    result = subprocess.run(
        ["docker/run", stage, name],
        cwd=workspace,
        env={"PATH": os.environ["PATH"], "VIRTUAL_ENV": sys.prefix, "BAKEOFF_ENGINE": "process"},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stderr


def change_plan(workspace: Path, *, schedule: dict[str, int], **changes: Any) -> None:
    yaml = YAML()
    path = workspace / "data/runs" / RECIPE / "plan.yaml"
    plan = yaml.load(path)
    plan["schedule"].update(schedule)
    yaml.dump({**plan, **changes}, path)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_a_training_that_runs_out_of_memory_at_load_and_at_steps_1_and_30_ends_with_its_effective_batch(
    workspace: Path,
) -> None:
    code, said = launch(workspace, "train", RECIPE, "load", 1, 30)
    assert code == 0, said
    assert [line.partition("anew with ")[2] for line in said.splitlines() if "launcher:" in line] == [
        "micro_batch 4 -> 2, grad_accumulation 1 -> 2",
        "micro_batch 2 -> 1, grad_accumulation 2 -> 4",
        "gradient_checkpointing off -> on",
    ]
    assert "Traceback" not in said
    record = read(workspace / "data/runs" / RECIPE / "training/training.json")
    assert (record["micro_batch"], record["grad_accumulation"], record["gradient_checkpointing"]) == (1, 4, True)
    assert (record["attempt"], record["num_steps"]) == (3, 32)
    assert not list((workspace / "data/runs" / RECIPE).glob(".*partial"))


def test_an_evaluation_that_runs_out_of_memory_ends_with_all_samples(workspace: Path) -> None:
    code, said = launch(workspace, "evaluate", "base-vlm", "evaluation")
    assert code == 0, said
    assert said.count("it starts anew with batch_size 3 -> 1") == 1
    metrics = read(workspace / "data/runs/base-vlm/metrics.json")
    assert (metrics["samples"], metrics["batch_size"], metrics["attempt"]) == (5, 1, 1)


def test_what_never_fits_ends_with_one_message_and_leaves_nothing(workspace: Path) -> None:
    change_plan(workspace, schedule={"micro_batch": 1, "grad_accumulation": 4})
    code, said = launch(workspace, "train", RECIPE, "load", 1)
    assert code == 1
    assert said.count("ran out of memory with everything given up") == 1
    assert "  as planned\n  gradient_checkpointing off -> on\n" in said
    assert "As planned it was predicted to take 0." in said
    assert "Traceback" not in said
    assert {path.name for path in (workspace / "data/runs" / RECIPE).iterdir()} == {"memory.json", "plan.yaml"}


def test_one_process_of_several_that_runs_out_of_memory_is_enough(workspace: Path) -> None:
    """Placement ddp, for real: torchrun itself would end with 1."""
    change_plan(
        workspace,
        schedule={"micro_batch": 2, "grad_accumulation": 1, "num_steps": 2},
        device={"kind": "cpu", "count": 2},
        placement="ddp",
    )
    injection = INJECTION.format(places=("load",))
    only_one = injection.replace("if attempt <", 'if __import__("os").environ.get("RANK") == "1" and attempt <')
    (workspace / "stages/__init__.py").write_text(only_one)
    result = subprocess.run(
        [sys.executable, "-m", "stages.train", RECIPE],
        cwd=workspace,
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

    monkeypatch.setattr(stages.train, "torchrun", torchrun)
    plan = resolve_plan(load_params(ROOT / "params.yaml"), RECIPE, train_samples=32)
    with pytest.raises(raised) as caught:
        stages.train.run_one_process_a_device(plan, 0)
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 128 + 9
