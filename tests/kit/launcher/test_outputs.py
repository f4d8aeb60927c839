"""What a stage in a container may write, and what becomes of it."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.kit.launcher.outputs import Outputs, outputs_aside, run_alone
from stages.kit.launcher.pipeline import DeclaredStage

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
    with outputs_aside(TRAIN, workspace) as outputs:
        write_outputs(outputs)
        outputs.take([])
    assert files_of(workspace / "data/runs/r1") == {
        "plan.yaml": "plan",
        "trained/new": "new",
        "training/training.json": "{}",
    }


def test_a_stage_cannot_write_the_record_of_where_it_comes_from(workspace: Path) -> None:
    record = "data/provenance/detection/train@r1.json"
    with outputs_aside(replace(TRAIN, outs=(record, *TRAIN.outs)), workspace) as outputs:
        assert outputs.folders == ("data/runs/r1",)
        write(outputs.written_dir / record, "{}")
        with pytest.raises(UserError, match=r"the stage wrote data/provenance.*which dvc\.yaml does not declare"):
            outputs.take([])


def test_a_stage_that_is_not_taken_leaves_the_last_result_and_nothing_else(workspace: Path) -> None:
    before = files_of(workspace)
    with outputs_aside(TRAIN, workspace) as outputs:
        write_outputs(outputs)
    assert files_of(workspace) == {**before, "data/.outputs/train@r1/lock": ""}


@pytest.mark.parametrize(
    "stray", ["data/runs/r1/notes", "data/runs/r1/training/metrics.json", "data/runs/r1/plan.yaml2"]
)
def test_what_is_not_declared_is_refused_and_nothing_is_taken(workspace: Path, stray: str) -> None:
    before = files_of(workspace)
    with outputs_aside(TRAIN, workspace) as outputs, pytest.raises(UserError, match=stray):
        write_outputs(outputs)
        write(outputs.written_dir / stray, "x")
        outputs.take([])
    assert files_of(workspace).items() >= before.items()
    assert not (workspace / "data/runs/r1/trained/new").exists()


def test_an_output_that_was_not_written_leaves_the_old_one_for_dvc_to_judge(workspace: Path) -> None:
    with outputs_aside(TRAIN, workspace) as outputs:
        outputs.take([])
    assert (workspace / "data/runs/r1/trained/old").is_file()


def test_only_the_parents_of_outputs_are_writable(workspace: Path) -> None:
    with outputs_aside(TRAIN, workspace) as outputs:
        assert outputs.folders == ("data/runs/r1",)
        assert [path for path in outputs.written_dir.rglob("*") if not any(path.iterdir())] == [
            outputs.written_dir / "data/runs/r1"
        ]


def leave_link(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def leave_link_to_a_folder(place: Path, victim: Path) -> None:
    place.symlink_to(victim.parent)


def leave_pipe(place: Path, victim: Path) -> None:
    os.mkfifo(place)


@pytest.mark.parametrize("leave", [leave_link, leave_link_to_a_folder, leave_pipe])
@pytest.mark.parametrize("where", ["data/runs/r1/trained/x", "data/runs/r1/training", "data/runs/r1/stray"])
def test_links_and_special_files_are_refused_wherever_they_lie(
    workspace: Path, tmp_path: Path, leave: Callable[[Path, Path], None], where: str
) -> None:
    """Whoever followed a link, the launcher here or a later stage, would leave what this stage may see."""
    victim = tmp_path / "victim/training.json"
    write(victim, "not the stage's")
    with outputs_aside(TRAIN, workspace) as outputs, pytest.raises(UserError, match=f"{where} .a link or a special"):
        (outputs.written_dir / "data/runs/r1/trained").mkdir()
        leave(outputs.written_dir / where, victim)
        outputs.take([])
    assert victim.read_text() == "not the stage's"
    assert (workspace / "data/runs/r1/trained/old").exists()


def test_an_empty_folder_that_is_not_declared_is_refused(workspace: Path) -> None:
    with outputs_aside(TRAIN, workspace) as outputs, pytest.raises(UserError, match="data/runs/r1/stray"):
        (outputs.written_dir / "data/runs/r1/stray").mkdir()
        outputs.take([])


def test_an_input_that_was_moved_does_not_pass_for_an_output(workspace: Path) -> None:
    with outputs_aside(TRAIN, workspace) as outputs:
        place = outputs.written_dir / "data/runs/r1/inputs/plan.yaml"
        write(place, "")
        place.parent.rename(outputs.written_dir / "data/runs/r1/trained")
        with pytest.raises(UserError, match=r"moved its input data/runs/r1/inputs/plan\.yaml"):
            outputs.take([place])


def test_the_places_of_inputs_are_not_taken_and_not_strays(workspace: Path) -> None:
    with outputs_aside(TRAIN, workspace) as outputs:
        place = outputs.written_dir / "data/runs/r1/inputs/plan.yaml"
        write(place, "")
        write_outputs(outputs)
        outputs.take([place])
    assert not (workspace / "data/runs/r1/inputs").exists()


def test_what_is_taken_is_plain_whatever_the_stage_made_of_it(workspace: Path) -> None:
    for _ in range(2):  # the second time it replaces what the first one left
        with outputs_aside(TRAIN, workspace) as outputs:
            write_outputs(outputs)
            program = outputs.written_dir / "data/runs/r1/trained/new"
            program.chmod(0o4711)
            program.parent.chmod(0o500)
            outputs.take([])
        trained = workspace / "data/runs/r1/trained"
        assert stat.S_IMODE((trained / "new").stat().st_mode) == 0o711
        assert stat.S_IMODE(trained.stat().st_mode) == 0o700


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_who_may_read_what_is_taken_is_as_the_callers_umask_says(workspace: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with outputs_aside(TRAIN, workspace) as outputs:
            write_outputs(outputs)
            (outputs.written_dir / "data/runs/r1/trained/new").chmod(0o644)  # by the umask in the container
            outputs.take([])
    finally:
        os.umask(before)
    assert stat.S_IMODE((workspace / "data/runs/r1/trained/new").stat().st_mode) == mode


def test_leftovers_that_resist_do_not_block_the_next_run(workspace: Path) -> None:
    left = workspace / "data/.outputs/train@r1/written/data/locked"
    write(left / "file", "x")
    left.chmod(0o500)
    with outputs_aside(TRAIN, workspace) as outputs:
        assert not (outputs.written_dir / "data/locked").exists()


def test_an_output_that_was_a_link_is_replaced_and_what_it_led_to_stays(workspace: Path, tmp_path: Path) -> None:
    """As with DVC's cache.type symlink."""
    cached = tmp_path / "cached"
    write(cached, "cached")
    (workspace / "data/runs/r1/training").mkdir()
    (workspace / "data/runs/r1/training/training.json").symlink_to(cached)
    with outputs_aside(TRAIN, workspace) as outputs:
        write_outputs(outputs)
        outputs.take([])
    assert cached.read_text() == "cached"
    assert not (workspace / "data/runs/r1/training/training.json").is_symlink()


def test_outputs_in_several_folders_and_an_input_folder_beside_them(workspace: Path) -> None:
    compare = DeclaredStage(
        name="compare@detection",
        command="docker/run compare detection",
        params=(),
        deps=("data/report/detection/runs",),
        outs=("data/report/detection/table.txt", "data/runs/r1/predictions.parquet"),
    )
    write(workspace / "data/report/detection/runs/r1/card.json", "{}")
    with outputs_aside(compare, workspace) as outputs:
        assert outputs.folders == ("data/report/detection", "data/runs/r1")
        write(outputs.written_dir / "data/report/detection/table.txt", "table")
        outputs.take([])
    assert (workspace / "data/report/detection/runs/r1/card.json").read_text() == "{}"


def test_a_hard_link_to_the_cache_is_replaced_and_never_written_through(workspace: Path) -> None:
    cached = workspace / "cached"
    write(cached, "cached")
    (workspace / "data/runs/r1/training").mkdir()
    os.link(cached, workspace / "data/runs/r1/training/training.json")
    with outputs_aside(TRAIN, workspace) as outputs:
        write_outputs(outputs)
        outputs.take([])
    assert cached.read_text() == "cached"


def test_what_a_killed_launcher_left_is_not_taken_for_an_output(workspace: Path) -> None:
    write(workspace / "data/.outputs/train@r1/written/data/runs/r1/trained/half", "half")
    with outputs_aside(TRAIN, workspace) as outputs:
        write_outputs(outputs)
        outputs.take([])
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
        with pytest.raises(UserError, match="train@r1 is already running"), run_alone(TRAIN, workspace):
            pytest.fail("it was claimed twice")
        other.kill()
    with run_alone(TRAIN, workspace), outputs_aside(TRAIN, workspace) as outputs:
        assert outputs.folders
