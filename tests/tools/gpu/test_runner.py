"""The order of the pieces, their processes, the time limit, and the results that are kept."""

import inspect
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.gpu import results as results_module
from tools.gpu import runner
from tools.gpu.child import job_of
from tools.gpu.device import Device
from tools.gpu.models import plan_of
from tools.gpu.page import page
from tools.gpu.pieces import FACTS, SETTINGS, Piece, Step, catalogue
from tools.gpu.results import Results
from tools.gpu.runner import Runner

CUDA = Device(kind="cuda", name="NVIDIA H100 80GB HBM3", uuid="GPU-1")
CHILD = """
import json, os, sys, time
from pathlib import Path
answer = {}
task = json.loads(sys.argv[1])["task"]
exec(task.get("program", ""))
Path(sys.argv[2]).write_text(json.dumps(answer))
"""


def piece(step: Step, name: str, program: str = "", **needs: str) -> Piece:
    return Piece(step=step, name=name, task={"program": program}, needs=needs)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the results. The processes of pieces run their programs."""
    run = subprocess.run

    def play(command: list[str], **options: Any) -> Any:
        if "tools.gpu.child" in command:
            command = [sys.executable, "-c", CHILD, *command[3:]]
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", play)
    monkeypatch.setenv("SECRET", "1")
    return tmp_path / "gpu" / "device.jsonl"


def run_pieces(path: Path, *pieces: Piece, deadline: float = math.inf) -> Results:
    results = Results(path)
    Runner(CUDA, results, deadline=deadline).run(results.todo(pieces))
    return results


def test_each_end_is_a_result_and_only_what_failed_is_tried_again_last(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "TIMEOUT_S", 2)
    pieces = [
        piece("recipes", "a", "sys.exit('Error: no kernel')"),
        piece("recipes", "b", "sys.exit(79)"),
        piece("recipes", "c", "os.kill(os.getpid(), 9)"),
        piece("recipes", "d", "time.sleep(60)"),
        piece("trainings", "e", "answer = {'step_s': 1.5}"),
        piece("trainings", "f"),
    ]
    found = {key: (each.status, each.problem) for key, each in run_pieces(path, *pieces).by_piece.items()}
    logs = path.parent / "logs"
    assert found == {
        "recipes: a": ("failed", f"no kernel (all of it in {logs / 'recipes-a.log'})"),
        "recipes: b": ("out of memory", "out of memory"),
        "recipes: c": ("failed", f"exit code -9 (all of it in {logs / 'recipes-c.log'})"),
        "recipes: d": ("failed", "took more than 2 s"),
        "trainings: e": ("done", ""),
        "trainings: f": ("done", ""),
    }
    path.write_bytes(path.read_bytes()[:-20])  # as a kill cuts it off
    assert [each.name for each in Results(path).todo(pieces)] == ["f", "a", "c", "d"]
    run_pieces(path, pieces[-1])
    assert [json.loads(line)["piece"] for line in path.read_text().splitlines()][-1] == "trainings: f"
    assert Results(path).data("trainings: e") == {"step_s": 1.5}
    monkeypatch.setattr(results_module, "installed_versions", lambda: {"torch": "2.99"})
    assert Results(path).todo(pieces) == pieces
    assert Results(path, measured_here=False).data("trainings: e") == {"step_s": 1.5}


def test_after_its_time_nothing_starts(path: Path) -> None:
    assert run_pieces(path, FACTS, deadline=0).by_piece == {}


def test_a_piece_gets_what_it_needs_and_a_prediction_sees_no_gpu(path: Path) -> None:
    environment = "answer = {name: os.environ.get(name) for name in ('CUDA_VISIBLE_DEVICES', 'SECRET')}"
    results = run_pieces(
        path,
        piece("predictions", "a", environment),
        piece("trainings", "a", f"{environment}; answer['needed'] = task['prediction']", prediction="predictions: a"),
        piece("trainings", "b", prediction="predictions: b"),
    )
    predicted = {"CUDA_VISIBLE_DEVICES": "", "SECRET": None}
    assert results.data("predictions: a") == predicted
    assert results.data("trainings: a") == {"CUDA_VISIBLE_DEVICES": "GPU-1", "SECRET": None, "needed": predicted}
    assert results.by_piece["trainings: b"].problem == "needs a result of predictions: b"


def test_tiny_trainings_run_beside_each_other_and_what_is_timed_alone(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "usable_cores", lambda: 4)
    together = f"""
Path('{tmp_path}', task['own']).touch()
while len(list(Path('{tmp_path}').glob('recipe-*'))) < 2: time.sleep(0.05)
"""
    alone = f"os.mkdir('{tmp_path}/lock'); time.sleep(0.1); os.rmdir('{tmp_path}/lock')"
    trainings = [
        Piece(step="recipes", name=name, task={"program": together, "own": f"recipe-{name}"}) for name in ("a", "b")
    ]
    results = run_pieces(path, *trainings, piece("trainings", "c", alone), piece("trainings", "d", alone))
    assert {result.status for result in results.by_piece.values()} == {"done"}


def test_every_piece_has_a_name_of_its_own_comes_after_what_it_needs_and_is_what_its_job_takes() -> None:
    for device in ("cuda", "cpu"):
        pieces = catalogue(device, None, paged=True, flash=True)
        keys = [each.key for each in pieces]
        assert len(set(keys)) == len(keys)
        for position, each in enumerate(pieces):
            assert set(each.needs.values()) <= set(keys[:position])
            inspect.signature(job_of(each.step)).bind(device, **each.task, **each.needs)
        assert [plan_of(setting, device) for setting in SETTINGS[device]]
    usual = {each.key for each in catalogue("cuda", None, flash=False)}
    more = [each.key for each in catalogue("cuda", None, paged=True, flash=True) if each.key not in usual]
    assert len(more) == 6
    assert all("paged_adamw_8bit" in key or "flash_attention_2" in key for key in more)


def test_without_bf16_everything_is_measured_in_fp16() -> None:
    turing = catalogue("cuda", {"capability": [7, 5]})
    assert "bf16" not in json.dumps([dict(each.task) for each in turing])
    assert {each.step for each in turing} == {each.step for each in catalogue("cuda", None)}


def test_the_page_has_every_piece_whatever_became_of_it(path: Path) -> None:
    speed = "'samples': 16, 'step_s': 2.0, 'tokens_per_s': 11264.0, 'tflops_per_s': 345.6, 'share_of_peak': 0.349"
    spent = "'idle_share': 0.12, 'launches': 41000, 'matmul': 0.75, 'copies': 0.25"
    memory = "'allocated_bytes': 2**34, 'reserved_bytes': 2**34, 'total_bytes': 2**34"
    pieces = [
        piece("recipes", "a", "sys.exit('no kernel *image*')"),
        piece("recipes", "b", "answer = {'twice': True, 'resumed': False}"),
        piece("trainings", "c", f"answer = {{{speed}, {spent}, {memory}}}"),
        piece("trainings", "d", "sys.exit(79)"),
    ]
    text = page(CUDA, run_pieces(path, *pieces), [*pieces, piece("answers", "e")])
    assert text.startswith("# NVIDIA H100 80GB HBM3\n\nMeasured by `make gpu`: 4 of 5 pieces")
    for line in (
        "| a | failed | – |",
        "| b | – | – | – | – | – | – | – | yes | NO | – |",
        "| c | 16 | 2.000 | 11,264 | 345.6 | 34.9% | 12% | 41,000 | 16.0 GiB |",
        "| d | out of memory | – |",
        "| c | 25% | – | – | – | – | 75% | – | – |",
        "- recipes: a: no kernel \\*image\\*",
        "- trainings: d: out of memory",
        "## Not measured yet\n\n- answers: e\n",
    ):
        assert line in text
