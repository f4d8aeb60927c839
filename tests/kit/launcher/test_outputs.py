"""What a stage in a container may write, and what becomes of it."""

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.kit.launcher.outputs import Outputs
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


@pytest.fixture
def outputs(workspace: Path) -> Outputs:
    return Outputs(TRAIN, workspace)


def take(outputs: Outputs) -> None:
    with outputs.aside():
        write_outputs(outputs)
        outputs.take([])


def files_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_what_a_stage_declares_is_taken_and_replaces_what_was_there(workspace: Path, outputs: Outputs) -> None:
    write(workspace / "data/.outputs/train@r1/written/data/runs/r1/trained/half", "left by a killed launcher")
    take(outputs)
    taken = {"plan.yaml": "plan", "trained/new": "new", "training/training.json": "{}"}
    assert files_of(workspace / "data/runs/r1") == taken


def test_a_stage_that_is_not_taken_leaves_the_last_result_and_nothing_else(workspace: Path, outputs: Outputs) -> None:
    before = files_of(workspace)
    with outputs.aside():
        write_outputs(outputs)
    assert files_of(workspace) == {**before, "data/.outputs/train@r1/lock": ""}
    with outputs.aside():
        outputs.take([])  # an output that was not written is left for DVC to judge
    assert (workspace / "data/runs/r1/trained/old").is_file()


RECORD = "data/provenance/detection/train@r1.json"


@pytest.mark.parametrize(
    "stray",
    ["data/runs/r1/notes", "data/runs/r1/training/metrics.json", "data/runs/r1/plan.yaml2", "data/runs/r1/x/", RECORD],
)
def test_what_is_not_declared_is_refused_and_nothing_is_taken(workspace: Path, stray: str) -> None:
    """Among that is the record, which the launcher writes, and an empty folder."""
    before = files_of(workspace)
    outputs = Outputs(replace(TRAIN, outs=(RECORD, *TRAIN.outs)), workspace)
    with outputs.aside(), pytest.raises(UserError, match=r"the stage wrote data/.*which dvc\.yaml does not declare"):
        write_outputs(outputs)
        place = outputs.written_dir / stray
        (place if stray.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        if not stray.endswith("/"):
            place.touch()
        outputs.take([])
    assert files_of(workspace).items() >= before.items()
    assert not (workspace / "data/runs/r1/trained/new").exists()


def test_only_the_parents_of_outputs_are_writable(workspace: Path, outputs: Outputs) -> None:
    with outputs.aside():
        assert outputs.folders == ("data/runs/r1",)
        empty = [path for path in outputs.written_dir.rglob("*") if not any(path.iterdir())]
        assert empty == [outputs.written_dir / "data/runs/r1"]
    several = replace(TRAIN, outs=("data/report/detection/table.txt", "data/runs/r1/predictions.parquet"))
    assert Outputs(several, workspace).folders == ("data/report/detection", "data/runs/r1")


def leave_link(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def leave_link_to_a_folder(place: Path, victim: Path) -> None:
    place.symlink_to(victim.parent)


def leave_pipe(place: Path, victim: Path) -> None:
    os.mkfifo(place)


@pytest.mark.parametrize("leave", [leave_link, leave_link_to_a_folder, leave_pipe])
@pytest.mark.parametrize("where", ["data/runs/r1/trained/x", "data/runs/r1/training", "data/runs/r1/stray"])
def test_links_and_special_files_are_refused_wherever_they_lie(
    workspace: Path, tmp_path: Path, outputs: Outputs, leave: Callable[[Path, Path], None], where: str
) -> None:
    """Whoever followed a link, the launcher here or a later stage, would leave what this stage may see."""
    victim = tmp_path / "victim/training.json"
    write(victim, "not the stage's")
    with outputs.aside(), pytest.raises(UserError, match=f"{where} .a link or a special"):
        (outputs.written_dir / "data/runs/r1/trained").mkdir()
        leave(outputs.written_dir / where, victim)
        outputs.take([])
    assert victim.read_text() == "not the stage's"
    assert (workspace / "data/runs/r1/trained/old").exists()


@pytest.mark.parametrize("moved", [False, True])
def test_the_place_of_an_input_is_not_taken_and_does_not_pass_for_an_output(
    workspace: Path, outputs: Outputs, moved: bool
) -> None:
    with outputs.aside():
        place = outputs.written_dir / "data/runs/r1/inputs/plan.yaml"
        write(place, "")
        if moved:
            place.parent.rename(outputs.written_dir / "data/runs/r1/trained")
            with pytest.raises(UserError, match=r"moved its input data/runs/r1/inputs/plan\.yaml"):
                outputs.take([place])
        else:
            write_outputs(outputs)
            outputs.take([place])
    assert not (workspace / "data/runs/r1/inputs").exists()
    assert (workspace / "data/runs/r1/trained/new").exists() != moved


def test_what_is_taken_is_plain_whatever_the_stage_made_of_it(workspace: Path, outputs: Outputs) -> None:
    left = workspace / "data/.outputs/train@r1/written/data/locked"
    write(left / "file", "left by a killed launcher")
    left.chmod(0o500)
    for _ in range(2):  # the second time it replaces what the first one left
        with outputs.aside():
            write_outputs(outputs)
            program = outputs.written_dir / "data/runs/r1/trained/new"
            program.chmod(0o4711)
            program.parent.chmod(0o500)
            outputs.take([])
        trained = workspace / "data/runs/r1/trained"
        assert stat.S_IMODE((trained / "new").stat().st_mode) == 0o711
        assert stat.S_IMODE(trained.stat().st_mode) == 0o700


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_who_may_read_what_is_taken_is_as_the_callers_umask_says(
    workspace: Path, outputs: Outputs, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        with outputs.aside():
            write_outputs(outputs)
            (outputs.written_dir / "data/runs/r1/trained/new").chmod(0o644)  # by the umask in the container
            outputs.take([])
    finally:
        os.umask(before)
    assert stat.S_IMODE((workspace / "data/runs/r1/trained/new").stat().st_mode) == mode


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_an_output_that_was_a_link_to_the_cache_is_replaced_and_the_cache_stays(
    workspace: Path, outputs: Outputs, link: Callable[[Path, Path], None]
) -> None:
    cached, output = workspace / "cached", workspace / "data/runs/r1/training/training.json"
    write(cached, "cached")
    output.parent.mkdir()
    link(cached, output)
    take(outputs)
    assert cached.read_text() == "cached"
    assert output.read_text() == "{}"
    assert not output.is_symlink()
