"""`make gpu ARGS=--dry-run`, interrupted and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT

ONLY = ("facts", "end of memory", "answers: qwen1.5-moe")


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
def test_it_keeps_what_it_measured_goes_on_and_ends_with_nothing_to_do(tmp_path: Path) -> None:
    """A piece in a process, stages in processes of theirs, answers of a tiny model."""
    options = ("--dry-run", *(word for name in ONLY for word in ("--only", name)))
    path = tmp_path / "cpu.jsonl"

    interrupted = start(tmp_path, *options)
    while not path.exists():
        assert interrupted.poll() is None, interrupted.communicate()
        time.sleep(0.05)
    interrupted.send_signal(signal.SIGINT)
    page, said = interrupted.communicate()
    assert interrupted.returncode == 130, said
    assert "interrupted: what was measured is kept; 2 pieces left" in said
    assert "C compiler" in page
    (first,) = path.read_text().splitlines()

    rest = start(tmp_path, *options)
    page, said = rest.communicate()
    assert rest.returncode == 0, said
    lines = path.read_text().splitlines()
    assert lines[0] == first
    results = [json.loads(line) for line in lines]
    assert [result["piece"] for result in results] == [
        "facts: device",
        "repeats: end of memory",
        "answers: qwen1.5-moe-tiny x2",
    ]
    assert results[1]["data"] == {"recognised": True}
    assert "| qwen1.5-moe-tiny x2 | 16 | 4 |" in page

    again = start(tmp_path, *options)
    assert again.communicate()[0] == page
    assert path.read_text().splitlines() == lines


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a GPU")
    refused = start(tmp_path)
    _, said = refused.communicate()
    assert refused.returncode == 1
    assert [line for line in said.splitlines() if not line.endswith(" gpu")] == [
        "Error: there is no NVIDIA GPU here; all of it on this CPU, with tiny models: make gpu ARGS=--dry-run"
    ]
