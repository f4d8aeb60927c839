"""Two runs that are compared: here of a pipeline of two stages that only wait, save themselves, and write."""

import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from ruamel.yaml import YAML

from tools.faults import repeat
from tools.faults.judge import Wrong
from tools.faults.repeat import Moments, _went_on, main, run_killed, run_undisturbed
from tools.faults.workspaces import CannotRun, Ended, Workspace

STAGES = ["train r1", "compare detection"]
TARGET = "compare@detection"
NONE = Moments([], {})
STAGE = """
import sys, time
from pathlib import Path
name = sys.argv[1]
with Path("starts").open("a") as file:
    file.write(f"{name}\\n")
checkpoint = Path(".bakeoff/checkpoints", name, "f1/step-000020")
if checkpoint.exists():
    print("goes on from step 20 of 40", flush=True)
print("step 30/40", flush=True)
checkpoint.mkdir(parents=True, exist_ok=True)
time.sleep(1)
Path("data", name).write_text(name)
checkpoint.rmdir()
"""
DVC_YAML = f"""
stages:
  train:
    foreach: [r1]
    do:
      cmd: exec {sys.executable} -m stages.train ${{item}}
      deps: [stages/__init__.py]
      outs: ["data/${{item}}"]
  compare:
    foreach: [detection]
    do:
      cmd: exec {sys.executable} -m stages.compare ${{item}}
      deps: [data/r1]
      outs: ["data/${{item}}"]
"""
FILES = {
    ".dvc/config": "[core]\n    no_scm = true\n",
    "dvc.yaml": DVC_YAML,
    "params.yaml": "profile: full\ntracking: {wandb: true}\ncheckpoints: {every_minutes: 15}\n",
    "stages/__init__.py": "",
    "stages/train.py": STAGE,
    "stages/compare.py": STAGE,
    "tools/verify/__main__.py": "print('  fix it with: rm -r .dvc/cache/runs')",
    "data/.gitignore": "",
}


def write_pipeline(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    no_config = dict.fromkeys(("DVC_GLOBAL_CONFIG_DIR", "DVC_SYSTEM_CONFIG_DIR"), str(tmp_path / "no-config"))
    return {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "DVC_NO_ANALYTICS": "1", **no_config}


@pytest.fixture
def workspace(tmp_path: Path, environment: dict[str, str]) -> Workspace:
    write_pipeline(tmp_path / "workspace")
    own = {"DVC_SITE_CACHE_DIR": str(tmp_path / "site")}
    return Workspace(folder=tmp_path / "workspace", environment={**environment, **own}, limit_s=60)


def ended(said: str, code: int) -> Ended:
    return Ended(command="dvc repro", code=code, said=said, left_running=())


def starts(workspace: Workspace) -> list[str]:
    return (workspace.folder / "starts").read_text().split()


def test_the_stages_of_an_undisturbed_run_are_seen_in_their_order(workspace: Workspace) -> None:
    seconds = run_undisturbed(workspace, TARGET)
    assert list(seconds) == STAGES
    assert all(each > 0 for each in seconds.values())
    assert starts(workspace) == ["r1", "detection"]


def test_all_is_killed_at_or_after_the_stage_that_was_drawn_and_the_target_comes_about(workspace: Workspace) -> None:
    said: list[str] = []
    train, compare = STAGES
    # The training is through before its second, which then comes in the comparison; after that there is no stage.
    moments = Moments([(compare, 9.0), (train, 3.0), (train, 0.5)], {train: 1.0, compare: 0.2})
    assert run_killed(workspace, TARGET, moments, said.append) == 2
    assert starts(workspace).count("r1") == 2
    assert [line.partition("killed in ")[2] for line in said[:-1]] == ["train@r1, saved at step 20", TARGET]
    assert re.match(r"killed 2 times in \d+ s; a training went on from a checkpoint 1 times", said[-1])
    assert (workspace.folder / "data/detection").read_text() == "detection"
    assert not list(workspace.processes())


def test_a_moment_comes_in_its_stage_or_after_it_whatever_the_order() -> None:
    moments = Moments([("b", 0.5), ("a", 0.2), ("a", 0.1), ("a", 0.9)], {"a": 10.0, "b": 10.0, "c": 2.0})
    assert [moments.is_due("b", seconds, []) for seconds in (1.0, 5.0, 6.0)] == [False, True, False]
    assert [moments.is_due("a", seconds, ["b"]) for seconds in (0.5, 1.5, 1.6)] == [False, True, False]
    # Two of a, which was through before.
    assert [moments.is_due("c", seconds, ["b", "a"]) for seconds in (0.1, 0.5, 1.0)] == [False, True, False]
    assert [moments.is_due("c", seconds, ["b"]) for seconds in (0.0, 1.9, 9.0)] == [False, True, False]
    assert not moments.is_due("seen in no other run", 9.0, ["b", "c"])


@pytest.mark.parametrize(
    ("said", "code", "went_on"),
    [
        ("goes on from step 40 of 100\nstep 45/100  loss 1", 0, True),
        ("goes on from step 40 of 100", -9, True),
        ("> exec docker/run train r1\nbase data/bases/vlm", -9, False),
    ],
)
def test_a_training_goes_on_or_has_not_come_to_it(said: str, code: int, went_on: bool) -> None:
    assert _went_on(ended(f"Running stage 'train@r1':\n{said}", code), "train@r1", 40) == went_on
    assert not _went_on(ended(f"Running stage 'train@r2':\n{said}", code), "train@r1", 40)
    assert not _went_on(ended(f"Running stage 'train@r1':\n{said}", code), "train@r1", 0)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("step 5/100  loss 1", -9),
        ("trained r1", 0),
        ("goes on from step 20 of 100\nstep 25/100  loss 1", -9),
        ("step 5/100  loss 1\nRunning stage 'train@r2':\ngoes on from step 40 of 100", 0),
    ],
)
def test_a_training_that_does_not_go_on_is_wrong(said: str, code: int) -> None:
    with pytest.raises(Wrong, match="train@r1 was saved at step 40, and did not go on from there"):
        _went_on(ended(f"Running stage 'train@r1':\n{said}", code), "train@r1", 40)


def test_what_dvc_stumbles_over_is_mended_as_verify_says(workspace: Workspace) -> None:
    said: list[str] = []
    run_undisturbed(workspace, "train@r1")
    (entry,) = (workspace.folder / ".dvc/cache/runs").glob("*/*/*")
    for path in (entry, workspace.folder / "dvc.lock", workspace.folder / "data/r1"):
        path.unlink()
    run_killed(workspace, "train@r1", NONE, said.append)
    assert said[0].endswith("DVC's own fault, mended as make verify says: rm -r .dvc/cache/runs")
    assert starts(workspace) == ["r1", "r1"]


def test_a_pipeline_that_fails_is_no_repetition(workspace: Workspace) -> None:
    (workspace.folder / "stages/train.py").write_text("raise SystemExit(3)")
    with pytest.raises(CannotRun, match="itself fails"):
        run_undisturbed(workspace, TARGET)
    with pytest.raises(Wrong, match="ended with"):
        run_killed(workspace, TARGET, NONE, lambda _: None)


def test_where_no_stage_is_seen_none_can_be_killed(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workspace, "processes", lambda _: iter(()))
    with pytest.raises(CannotRun, match="no stage was seen"):
        run_undisturbed(workspace, "train@r1")


@pytest.fixture
def compare(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Result]]:
    """The command, on the made-up pipeline; what it keeps lies in kept/, of which it is told by a link."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "link"))
    monkeypatch.setattr(repeat, "make_environment", lambda _: environment)
    monkeypatch.setattr(repeat, "clone_checkout", write_pipeline)
    before = signal.getsignal(signal.SIGTERM)
    yield lambda *options: CliRunner().invoke(main, options)
    signal.signal(signal.SIGTERM, before)


def test_two_runs_that_are_the_same_leave_nothing(compare: Callable[..., Result], tmp_path: Path) -> None:
    result = compare("--kills", "1")
    assert result.exit_code == 0, result.output
    assert "the SAME, killed 1 times: 2 stages, 2 files byte for byte" in result.output
    assert not list((tmp_path / "kept").iterdir())


def test_two_runs_that_differ_are_wrong_and_kept(
    compare: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FILES, "stages/compare.py", STAGE.replace("write_text(name)", "write_text(Path.cwd().name)"))
    result = compare("--kills", "0")
    assert result.exit_code == 1
    (kept,) = (tmp_path / "kept").iterdir()
    assert result.output.splitlines()[-1] == f"both are kept in {kept}"
    assert "WRONG: other bytes in 1 files, in data/detection first" in result.output
    for place in ("first", "another place/the second"):
        params = YAML().load(kept / place / "params.yaml")
        assert params["profile"] == "tiny"
        assert not params["tracking"]["wandb"]
        assert params["checkpoints"]["every_steps"] == repeat.KEPT_EACH_STEPS
        assert (kept / place / "data/detection").read_text() == Path(place).name
