"""`make gpu ARGS=--dry-run`, interrupted and gone on with, and `make calibrate` from its results."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from stages.kit.memory.calibration import SHIPPED_PATH
from tests import ROOT
from tools import calibrate
from tools.gpu.kernels import KINDS
from tools.gpu.memory import comparisons
from tools.gpu.pieces import SETTINGS, catalogue
from tools.gpu.results import Results


def start(results_dir: Path, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tools.gpu", "--results-dir", str(results_dir), *options],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.pipeline
def test_it_keeps_what_it_measured_goes_on_and_its_results_are_calibrated_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = SETTINGS["cpu"][0].name
    options = ("--dry-run", "--only", f"trainings: {name}")
    path = tmp_path / "cpu.jsonl"

    interrupted = start(tmp_path, *options)
    while not path.exists():
        assert interrupted.poll() is None, interrupted.communicate()
        time.sleep(0.05)
    interrupted.send_signal(signal.SIGINT)
    page, output = interrupted.communicate()
    assert interrupted.returncode == 130, output
    assert "interrupted: what was measured is kept; 2 pieces left" in output
    assert "C compiler" in page
    (first,) = path.read_text().splitlines()

    rest = start(tmp_path, *options)
    page, output = rest.communicate()
    assert rest.returncode == 0, output
    lines = path.read_text().splitlines()
    assert lines[0] == first
    assert [json.loads(line)["piece"] for line in lines[1:]] == [f"predictions: {name}", f"trainings: {name}"]
    assert f"| {name} | 2 |" in page
    results = Results(path)
    assert abs(comparisons(results)[name]["allocated"]) < 0.01
    measured = results.data(f"trainings: {name}") or {}
    assert measured["launches"] > 1000
    shares = [measured[kind] for kind, _ in KINDS]
    assert sum(shares) == pytest.approx(1, abs=0.01)

    one = [piece for piece in catalogue("cpu", None) if piece.name in ("device", name)]
    monkeypatch.setattr(calibrate, "catalogue", lambda *_, **__: one)
    shipped = SHIPPED_PATH.read_text()
    result = CliRunner().invoke(calibrate.main, [str(path)])
    assert result.exit_code == 0, result.output
    assert "allocated_error_high: 0.02 (CPU, torch " in result.output
    assert path.read_text().splitlines() == lines
    assert SHIPPED_PATH.read_text() == shipped


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a GPU")
    refused = start(tmp_path)
    _, output = refused.communicate()
    assert refused.returncode == 1
    assert [line for line in output.splitlines() if not line.endswith(" gpu")] == [
        "Error: there is no NVIDIA GPU here; all of it on this CPU, with tiny models: make gpu ARGS=--dry-run"
    ]
