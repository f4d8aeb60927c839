"""What the tool has to call wrong, it does; and processes are killed where it says. No pipeline runs here."""

import inspect
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from dvc import lock, rwlock

from stages.kit.training import resumable
from tools.faults import moment
from tools.faults.judge import Wrong, require_same_end, require_success, require_whole
from tools.faults.kinds import DVC_IS_RUNNING, NOT_SAVED
from tools.faults.workspaces import Ended, Workspace

WEIGHTS, METRICS = "data/runs/r1/trained/weights", "data/runs/r1/training.json"
OUTPUTS = ("data/runs/r1/trained", METRICS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the reference beside it."""
    reference = tmp_path / "reference"
    (reference / WEIGHTS).parent.mkdir(parents=True)
    (reference / WEIGHTS).write_bytes(bytes(range(50)))
    (reference / METRICS).write_text(json.dumps({"loss": 1.5, "train_seconds": 2.0}))
    (reference / ".bakeoff/checkpoints/r1").mkdir(parents=True)
    return Path(shutil.copytree(reference, tmp_path / "folder"))


def ended(output: str, *, code: int | None = 0, left_running: tuple[str, ...] = ()) -> Ended:
    return Ended(command="dvc repro", code=code, output=output, left_running=left_running)


def test_only_measured_values_may_differ(folder: Path) -> None:
    reference = folder.with_name("reference")
    (folder / METRICS).write_text(json.dumps({"loss": 1.5, "train_seconds": 9.0}))
    require_same_end(folder, reference, OUTPUTS)
    require_whole(folder, reference, OUTPUTS)
    (folder / WEIGHTS).write_bytes(bytes(50))
    for require in (require_same_end, require_whole):
        with pytest.raises(Wrong, match="weights"):
            require(folder, reference, OUTPUTS)
    shutil.rmtree(folder / OUTPUTS[0])
    require_whole(folder, reference, OUTPUTS)
    with pytest.raises(Wrong, match=r"weights first: only in the reference"):
        require_same_end(folder, reference, OUTPUTS)


@pytest.mark.parametrize("stray", ["data/runs/r1/.trained.partial/x", ".bakeoff/checkpoints/r1/ab/.step-2.partial"])
def test_what_is_left_behind_is_wrong(folder: Path, stray: str) -> None:
    (folder / stray).parent.mkdir(parents=True, exist_ok=True)
    (folder / stray).touch()
    with pytest.raises(Wrong, match=r"left behind: .*\.partial"):
        require_same_end(folder, folder.with_name("reference"), OUTPUTS)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (ended("Traceback (most recent call last):\n  File x\nOSError: no\nERROR: failed"), "a traceback: OSError: no"),
        (ended("", code=None), "hung"),
        (ended("", left_running=("stages.train r1",)), "left running: stages.train r1"),
        (ended("ERROR: failed", code=1), "ended with 1: ERROR: failed"),
    ],
)
def test_a_command_has_to_end_well(command: Ended, why: str) -> None:
    with pytest.raises(Wrong, match=why):
        require_success(command)


def test_the_words_that_are_looked_for_are_those_of_the_training_and_of_dvc() -> None:
    assert NOT_SAVED in inspect.getsource(resumable)
    for words, module in zip(DVC_IS_RUNNING, (lock, rwlock), strict=True):
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
        "from pathlib import Path\n"
        "Path('data/.y.partial').write_text('a')\n"
        "Path('elsewhere').write_text('b')\n"
        "Path('data/.y.partial').rename('data/y')\n"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "site")}
    return Workspace(folder=workspace, environment=environment, limit_s=60)


def test_changes_are_counted_and_a_process_is_killed_just_before_the_given_one(program: Workspace) -> None:
    program.order(log=str(program.folder))
    assert program.python("-m", "stages.train").code == 0
    changes = (program.folder / "stage").read_text().splitlines()
    assert changes == ["open of data/.y.partial", "rename of data/.y.partial"]
    (program.folder / "data/y").unlink()
    for number, left in ((1, {"x"}), (2, {"x", ".y.partial"}), (3, {"x", "y"})):
        program.order(role="stage", number=number, act="kill", above=0)
        assert program.python("-m", "stages.train").code == (-9 if number < 3 else 0)
        assert {path.name for path in (program.folder / "data").iterdir()} == left
        assert program.withdraw_order() == (number < 3)


def test_what_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    workspace = Workspace(folder=tmp_path, environment={"PYTHON": sys.executable}, limit_s=1)
    sleep = ["-c", "import time; time.sleep(600)"]
    codes = []

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        other = subprocess.Popen([sys.executable, *sleep], cwd=tmp_path, start_new_session=True)
        codes.extend([process.wait(), other.wait()])

    assert workspace.python(*sleep, meanwhile=meanwhile).code is None
    assert codes == [-9, -9]
    with subprocess.Popen([sys.executable, *sleep], cwd=tmp_path) as started:
        while not psutil.Process(started.pid).cmdline():
            time.sleep(0.01)
        (left,) = workspace.wait_for_processes(0)
    assert "sleep" in left
