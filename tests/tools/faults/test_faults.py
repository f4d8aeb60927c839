"""The tool's own judgement: what it has to call wrong, it does. No pipeline runs here."""

import inspect
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dvc import lock, rwlock

from stages.kit.training import resumable
from tools.faults import moment
from tools.faults.__main__ import TRIES, deck, inflict, tally
from tools.faults.judge import (
    NeverCame,
    Outcome,
    Wrong,
    refusal_commands,
    require_good_manners,
    require_same_end,
    require_success,
    require_whole,
    verify_commands,
)
from tools.faults.kinds import DVC_IS_AT_WORK, KINDS, NOT_SAVED, Trial, _cut, _disturbed, _files, _flip, _write
from tools.faults.workspaces import TARGET, Ended, Reference, Workspace

OUTPUTS = ("data/runs/r1/trained", "data/runs/r1/training.json")


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    run_dir = tmp_path / "reference/data/runs/r1"
    (run_dir / "trained").mkdir(parents=True)
    (run_dir / "trained/weights").write_bytes(bytes(range(50)))
    (run_dir / "training.json").write_text(json.dumps({"loss": 1.5, "train_seconds": 2.0}))
    (tmp_path / "reference/.bakeoff/checkpoints/r1").mkdir(parents=True)
    return tmp_path / "reference"


@pytest.fixture
def folder(reference: Path, tmp_path: Path) -> Path:
    return shutil.copytree(reference, tmp_path / "folder")


def ended(said: str, *, code: int | None = 0, left_running: tuple[str, ...] = ()) -> Ended:
    return Ended(command="dvc repro", code=code, said=said, left_running=left_running)


def test_the_same_bytes_are_right_whatever_was_measured(reference: Path, folder: Path) -> None:
    (folder / OUTPUTS[1]).write_text(json.dumps({"loss": 1.5, "train_seconds": 9.0}))
    require_same_end(folder, reference, OUTPUTS)
    require_whole(folder, reference, OUTPUTS)


@pytest.mark.parametrize("output", ["data/runs/r1/trained/weights", "data/runs/r1/training.json"])
def test_other_bytes_are_wrong(reference: Path, folder: Path, output: str) -> None:
    (folder / output).write_bytes((folder / output).read_bytes().replace(b"1.5", b"1.6").replace(b"\x07", b"\x08"))
    for require in (require_same_end, require_whole):
        with pytest.raises(Wrong, match=Path(output).name):
            require(folder, reference, OUTPUTS)


def test_what_is_missing_is_wrong_in_the_end_and_whole_on_the_way(reference: Path, folder: Path) -> None:
    shutil.rmtree(folder / "data/runs/r1/trained")
    require_whole(folder, reference, OUTPUTS)
    with pytest.raises(Wrong, match=r"weights first: only in the reference"):
        require_same_end(folder, reference, OUTPUTS)
    (folder / "data/runs/r1/trained").mkdir()
    with pytest.raises(Wrong, match="half published"):
        require_whole(folder, reference, OUTPUTS)


@pytest.mark.parametrize(
    "stray", ["data/runs/r1/.trained.partial", "data/report.json", ".bakeoff/checkpoints/r1/ab/.step-2.partial"]
)
@pytest.mark.parametrize("is_folder", [False, True])
def test_what_is_left_behind_is_wrong(reference: Path, folder: Path, stray: str, is_folder: bool) -> None:
    place = folder / stray / "x" if is_folder else folder / stray
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch()
    with pytest.raises(Wrong, match=f"left behind: .*{Path(stray).name}"):
        require_same_end(folder, reference, OUTPUTS)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (
            ended("Traceback (most recent call last):\n  File x\nOSError: no\nERROR: failed"),
            "in a traceback: OSError: no",
        ),
        (ended("", code=None), "hung"),
        (ended("", left_running=("stages.train r1",)), "left running: stages.train r1"),
    ],
)
def test_bad_manners_are_wrong_however_it_ended(command: Ended, why: str) -> None:
    for require in (require_good_manners, require_success, lambda each: refusal_commands(each, ["data"])):
        with pytest.raises(Wrong, match=why):
            require(command)


def test_a_refusal_names_what_is_damaged_and_a_command() -> None:
    said = "Error: data/bases/vlm was recorded with 1, but now holds 2; rebuild it with: dvc repro -f -s base@vlm"
    noise = "\nERROR: failed to reproduce 'train@r1': exited with 1"
    assert refusal_commands(ended(said + noise, code=1), ["data/bases/vlm"]) == ["dvc repro -f -s base@vlm"]
    mend = "rm -f data/p/r1.json && dvc checkout data/p/r1.json"
    of_record = ended(f"Error: data/p/r1.json is damaged: x; rebuild it with: {mend}{noise}", code=1)
    assert refusal_commands(of_record, ["data/p/r1.json"]) == [mend]
    with pytest.raises(Wrong, match="names none of data/prepared"):
        refusal_commands(ended(said, code=1), ["data/prepared"])
    with pytest.raises(Wrong, match="names no command"):
        refusal_commands(ended("Error: data/bases/vlm is damaged", code=1), ["data/bases/vlm"])
    with pytest.raises(Wrong, match="ended with 1"):
        require_success(ended(said, code=1))


def test_commands_of_verify_are_taken_from_the_top_and_without_their_comments() -> None:
    said = "data/a\n  bad\n  fix it with: rm -rf data/a && dvc checkout data/a\n\ndata/b\n  fix it with: x y  # z\n"
    assert verify_commands(ended(said, code=1)) == ["rm -rf data/a && dvc checkout data/a", "x y"]


def test_every_kind_comes_once_a_round_and_a_seed_is_a_seed() -> None:
    kinds = tuple(KINDS)
    dealt = list(deck(3, len(kinds) + 1, kinds))
    assert sorted(dealt[: len(kinds)]) == sorted(dealt[len(kinds) :]) == sorted(kinds)
    assert dealt == list(deck(3, len(kinds) + 1, kinds)) != list(deck(4, len(kinds) + 1, kinds))
    assert dealt[: len(kinds)] == list(deck(3, 1, kinds))  # the same ones, however many there are to be
    assert tally([]).splitlines()[-1].split() == ["all", "0", "0", "0", "0"]


@pytest.mark.parametrize(("late", "outcome"), [(2, Outcome.REFUSED), (TRIES, Outcome.NEVER_CAME)])
def test_a_fault_that_comes_too_late_is_drawn_again_and_never_counts_as_kept(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int, outcome: Outcome
) -> None:
    drawn = []

    def too_late(trial: Trial) -> Outcome:
        trial.folder.mkdir()  # fails where the one before is still there
        drawn.append(trial.draw.random())
        if len(drawn) <= late:
            raise NeverCame
        return Outcome.REFUSED

    monkeypatch.setitem(KINDS, "late", too_late)
    made = Reference(root=tmp_path, environment={}, seconds={}, changes={})
    assert inflict(made, tmp_path / "fault-1", "late", 1, 1) is outcome
    assert len(drawn) == len(set(drawn)) == min(late + 1, TRIES)
    assert not (tmp_path / "fault-1").exists()


def test_what_ended_before_its_fault_has_to_have_ended_well(tmp_path: Path) -> None:
    trial = Trial(Reference(root=tmp_path, environment={}, seconds={}, changes={}), tmp_path, random.Random(1))
    with pytest.raises(Wrong, match="ended with 1"):
        _disturbed(trial, TARGET, ended("", code=1), came=False)


def test_the_words_for_a_checkpoint_without_room_are_those_of_a_training() -> None:
    assert NOT_SAVED in inspect.getsource(resumable)


def test_damage_keeps_time_and_mode_and_a_linked_file_is_damaged_in_all_its_places(tmp_path: Path) -> None:
    path, twin = tmp_path / "file", tmp_path / "twin"
    path.write_bytes(bytes(100))
    path.chmod(0o444)
    os.utime(path, ns=(5, 5))
    os.link(path, twin)
    _write(path, _flip(path.read_bytes(), random.Random(1)), linked=True)
    assert path.read_bytes() == twin.read_bytes() != bytes(100)
    assert len(path.read_bytes()) == 100
    before = twin.read_bytes()
    _write(path, _cut(path.read_bytes(), random.Random(1)), linked=False)
    assert len(path.read_bytes()) < 100
    assert twin.read_bytes() == before
    for each in (path, twin):
        assert (each.stat().st_mtime_ns, each.stat().st_mode & 0o777) == (5, 0o444)


def test_an_output_is_damaged_where_it_has_a_byte(tmp_path: Path) -> None:
    for name, content in {"plan.yaml": b"a", "trained/b": b"b", "trained/a/a": b"a", "trained/empty": b""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert _files(tmp_path / "plan.yaml", "*") == [tmp_path / "plan.yaml"]
    assert _files(tmp_path / "trained", "*") == [tmp_path / "trained/a/a", tmp_path / "trained/b"]


def test_the_words_for_a_lock_are_those_of_dvc() -> None:
    for words, module in zip(DVC_IS_AT_WORK, (lock, rwlock), strict=True):
        assert words in inspect.getsource(module)


@pytest.fixture
def program(tmp_path: Path) -> Workspace:
    """A workspace with one stage, which publishes a file."""
    (tmp_path / "site").mkdir()
    shutil.copyfile(moment.__file__, tmp_path / "site/sitecustomize.py")
    workspace = tmp_path / "workspace"
    for name in ("stages/__init__.py", "stages/train.py", "data/x"):
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).touch()
    (workspace / "stages/train.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "Path('data/.y.partial').write_text('a')\n"
        "Path('elsewhere').write_text('b')\n"
        "Path('data/.y.partial').rename('data/y')\n"
        "print(time.time())\n"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "site")}
    return Workspace(folder=workspace, environment=environment)


def test_changes_of_the_disk_are_counted(program: Workspace) -> None:
    program.order(role="all", count=str(program.folder / "counts"))
    assert program.run("-m", "stages.train").code == 0
    lines = (program.folder / "counts-stage").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [["open", "data/.y.partial"], ["rename", "data/.y.partial"]]


@pytest.mark.parametrize(("number", "left"), [(1, {"x"}), (2, {"x", ".y.partial"}), (3, {"x", "y"})])
def test_a_process_is_killed_just_before_the_change_that_was_ordered(
    program: Workspace, number: int, left: set[str]
) -> None:
    program.order(role="stage", number=number, act="signal", signal=9, above=0)
    assert program.run("-m", "stages.train").code == (-9 if number < 3 else 0)
    assert {path.name for path in (program.folder / "data").iterdir()} == left
    assert program.take_order_back() == (number < 3)


def test_a_process_that_outlives_its_command_is_found_and_ended(program: Workspace) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=program.folder)
    (left,) = program.wait_for_the_rest(0)
    assert "sleep" in left
    assert process.wait() is not None  # its code went to psutil
