"""What a stage in a container may write, and what becomes of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.kit.containers.outputs import Outputs, claimed_outputs
from stages.kit.containers.pipeline import DeclaredStage
from stages.kit.errors import UserError

TRAIN = DeclaredStage(
    name="train@r1",
    command="docker/run train r1",
    params=(),
    deps=("data/bases/vlm", "data/runs/r1/plan.yaml"),
    outs=("data/runs/r1/trained", "data/runs/r1/training/training.json", "data/runs/r1/training/plots"),
)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    workspace = tmp_path / "a workspace"
    write(workspace / "data/bases/vlm/config.json", "{}")
    write(workspace / "data/runs/r1/plan.yaml", "plan")
    write(workspace / "data/runs/r1/trained/old", "old")
    return workspace


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_outputs(outputs: Outputs) -> None:
    write(outputs.written_dir / "data/runs/r1/trained/new", "new")
    write(outputs.written_dir / "data/runs/r1/training/training.json", "{}")


def files_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_what_a_stage_declares_is_taken_and_replaces_what_was_there(workspace: Path) -> None:
    with claimed_outputs(workspace, TRAIN, TRAIN.deps) as outputs:
        write_outputs(outputs)
        outputs.take()
    assert files_of(workspace / "data/runs/r1") == {
        "plan.yaml": "plan",
        "trained/new": "new",
        "training/training.json": "{}",
    }


def test_a_stage_that_is_not_taken_leaves_the_last_result_and_nothing_else(workspace: Path) -> None:
    before = files_of(workspace)
    with claimed_outputs(workspace, TRAIN, TRAIN.deps) as outputs:
        write_outputs(outputs)
    assert files_of(workspace) == {**before, "data/.outputs/train@r1/lock": ""}


@pytest.mark.parametrize(
    "stray", ["data/runs/r1/notes", "data/runs/r1/training/metrics.json", "data/runs/r1/plan.yaml2"]
)
def test_what_is_not_declared_is_refused_and_nothing_is_taken(workspace: Path, stray: str) -> None:
    before = files_of(workspace)
    with claimed_outputs(workspace, TRAIN, TRAIN.deps) as outputs, pytest.raises(UserError, match=stray):
        write_outputs(outputs)
        write(outputs.written_dir / stray, "x")
        outputs.take()
    assert files_of(workspace).items() >= before.items()
    assert not (workspace / "data/runs/r1/trained/new").exists()


def test_an_output_that_was_not_written_leaves_the_old_one_for_dvc_to_judge(workspace: Path) -> None:
    with claimed_outputs(workspace, TRAIN, TRAIN.deps) as outputs:
        outputs.take()
    assert (workspace / "data/runs/r1/trained/old").is_file()


def test_only_the_parents_of_outputs_are_writable_and_everything_visible_has_a_place_to_be_mounted_on(
    workspace: Path,
) -> None:
    with claimed_outputs(workspace, TRAIN, TRAIN.deps) as outputs:
        assert outputs.folders == ("data/runs/r1",)
        assert (outputs.view_dir / "data/runs/r1").is_dir()
        assert (outputs.view_dir / "data/bases/vlm").is_dir()
        # Inside a writable folder it is that folder that has the place.
        assert (outputs.written_dir / "data/runs/r1/plan.yaml").read_text() == ""


def test_outputs_in_several_folders_and_an_input_folder_beside_them(workspace: Path) -> None:
    compare = DeclaredStage(
        name="compare@detection",
        command="docker/run compare detection",
        params=(),
        deps=("data/report/detection/runs",),
        outs=("data/report/detection/table.txt", "data/runs/r1/predictions.parquet"),
    )
    write(workspace / "data/report/detection/runs/r1/card.json", "{}")
    with claimed_outputs(workspace, compare, compare.deps) as outputs:
        assert outputs.folders == ("data/report/detection", "data/runs/r1")
        write(outputs.written_dir / "data/report/detection/table.txt", "table")
        outputs.take()
    assert (workspace / "data/report/detection/runs/r1/card.json").read_text() == "{}"


def test_a_hard_link_to_the_cache_is_replaced_and_never_written_through(workspace: Path) -> None:
    cached = workspace / "cached"
    write(cached, "cached")
    (workspace / "data/runs/r1/training").mkdir()
    os.link(cached, workspace / "data/runs/r1/training/training.json")
    with claimed_outputs(workspace, TRAIN, TRAIN.deps) as outputs:
        write_outputs(outputs)
        outputs.take()
    assert cached.read_text() == "cached"


def test_what_a_killed_launcher_left_is_not_taken_for_an_output(workspace: Path) -> None:
    write(workspace / "data/.outputs/train@r1/written/data/runs/r1/trained/half", "half")
    with claimed_outputs(workspace, TRAIN, TRAIN.deps) as outputs:
        write_outputs(outputs)
        outputs.take()
    assert not (workspace / "data/runs/r1/trained/half").exists()


LOCKING = """
import fcntl, sys, time
with open(sys.argv[1], "a") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_stage_runs_once_at_a_time_in_a_workspace(workspace: Path) -> None:
    lock_path = workspace / "data/.outputs/train@r1/lock"
    write(lock_path, "")
    command = [sys.executable, "-c", LOCKING, str(lock_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match="train@r1 is already running"), claimed_outputs(workspace, TRAIN, ()):
            pytest.fail("it was claimed twice")
        other.kill()
    with claimed_outputs(workspace, TRAIN, ()) as outputs:
        assert outputs.folders
