"""Two runs are compared: here of a pipeline of two stages that write a word."""

import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from tools.faults import repeat
from tools.faults.judge import Wrong, require_success
from tools.faults.repeat import main, run_killed
from tools.faults.workspaces import Ended, Workspace

STAGE = """
import sys, time
from pathlib import Path
time.sleep(0.5)
Path("data", sys.argv[1]).write_text(WORD)
"""
DVC_YAML = f"""
stages:
  train:
    cmd: exec {sys.executable} -m stages.train r1
    outs: [data/r1]
  compare:
    foreach: [detection]
    do:
      cmd: exec {sys.executable} -m stages.train ${{item}}
      deps: [data/r1]
      outs: ["data/${{item}}"]
"""
FILES = {
    ".dvc/config": "[core]\n    no_scm = true\n",
    "dvc.yaml": DVC_YAML,
    "params.yaml": "profile: full\ntracking: {wandb: true}\ncheckpoints: {every_minutes: 15}\n",
    "stages/__init__.py": "",
    "tools/verify/__main__.py": "print('  fix it with: rm -r .dvc/cache/runs')",
    "data/.gitignore": "",
}


@pytest.fixture
def kept_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the command keeps what is wrong."""
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "kept"))
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path / "kept"
    signal.signal(signal.SIGTERM, before)


def undisturbed(workspace: Workspace, target: str, _: Sequence[float]) -> int:
    require_success(workspace.dvc("repro", target))
    return 0


@pytest.mark.parametrize("word", ["'the same'", "Path.cwd().name"])
def test_two_runs_are_the_same_or_wrong(word: str, kept_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_pipeline(folder: Path) -> None:
        for name, content in {**FILES, "stages/train.py": STAGE.replace("WORD", word)}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)

    monkeypatch.setattr(repeat, "clone_checkout", write_pipeline)
    if word != "'the same'":  # what differs is seen however often it was killed
        monkeypatch.setattr(repeat, "run_killed", undisturbed)
    result = CliRunner().invoke(main, ["--kills", "1"])
    if word == "'the same'":
        assert result.exit_code == 0, result.output
        assert re.search(r"the SAME, killed [01] times: 2 stages, 2 files byte for byte", result.output)
        assert not list(kept_dir.iterdir())
        return
    assert result.exit_code == 1
    assert "WRONG: other bytes in 2 files, in data/detection first" in result.output
    (kept,) = kept_dir.iterdir()
    assert result.output.splitlines()[-1] == f"both are kept in {kept}"
    for place in ("first", "another place/the second"):
        params = YAML().load(kept / place / "params.yaml")
        assert (params["profile"], params["tracking"]["wandb"]) == ("tiny", False)
        assert params["checkpoints"]["every_steps"] == repeat.SAVE_EVERY_STEPS


def ended(code: int, output: str) -> Ended:
    return Ended(command="dvc repro", code=code, output=output, left_running=())


TRAINING = "Running stage 'train@r1':\n"
KILLED = ended(-9, f"Running stage 'base@vlm':\n{TRAINING}step 45/100  loss 1")


@pytest.mark.parametrize(
    ("runs", "wrong"),
    [
        ([KILLED, ended(0, f"{TRAINING}goes on from step 40 of 100\nstep 45/100  loss 1")], False),
        # Killed again before it came to it.
        ([KILLED, ended(-9, ""), ended(-9, TRAINING), ended(0, f"{TRAINING}goes on from step 40 of 100")], False),
        ([ended(0, f"{TRAINING}step 5/100")], False),
        ([KILLED, ended(-9, f"{TRAINING}step 5/100  loss 1")], True),
        ([KILLED, ended(0, f"{TRAINING}trained r1")], True),
        ([KILLED, ended(0, f"{TRAINING}goes on from step 20 of 100\nstep 25/100  loss 1")], True),
        ([KILLED, ended(1, "")], True),
    ],
)
def test_a_killed_training_has_to_go_on_from_its_checkpoint(
    runs: list[Ended],
    wrong: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / ".bakeoff/checkpoints/r1/f1/step-000040").mkdir(parents=True)
    pending = iter(runs)
    monkeypatch.setattr(Workspace, "dvc", lambda *_, **__: next(pending))
    workspace = Workspace(folder=tmp_path, environment={})
    if wrong:
        with pytest.raises(Wrong, match=r"train@r1 was saved at step 40, and did not go on from there|ended with 1"):
            run_killed(workspace, "compare", [1.0] * 9)
        return
    assert run_killed(workspace, "compare", [1.0] * 9) == len(runs) - 1
    *kills, last = capsys.readouterr().out.splitlines()
    assert all("killed in train@r1, saved at step 40" in line for line in kills)
    assert last.endswith(f"a training went on from a checkpoint {int(len(runs) > 1)} times")
