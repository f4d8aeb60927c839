"""Two runs are compared: here of a pipeline of two stages that write where they ran."""

import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from tools.faults import repeat
from tools.faults.repeat import main

STAGE = """
import sys, time
from pathlib import Path
time.sleep(0.5)
Path("data", sys.argv[1]).write_text(Path.cwd().name)
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
    "stages/train.py": STAGE,
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


def test_two_runs_with_other_bytes_are_wrong_and_kept(kept_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_pipeline(folder: Path) -> None:
        for name, content in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)

    monkeypatch.setattr(repeat, "clone_checkout", write_pipeline)
    result = CliRunner().invoke(main, ["--kills", "1"])
    assert result.exit_code == 1
    assert "WRONG: other bytes in 2 files, in data/detection first" in result.output
    (kept,) = kept_dir.iterdir()
    assert result.output.splitlines()[-1] == f"both are kept in {kept}"
    for place in ("first", "another place/the second"):
        params = YAML().load(kept / place / "params.yaml")
        assert (params["profile"], params["tracking"]["wandb"]) == ("tiny", False)
        assert params["checkpoints"]["every_steps"] == repeat.SAVE_EVERY_STEPS
