"""The order of the pieces, the time limit, and the results that are kept."""

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import OutOfMemory
from tools.calibrate.children import ChildFailed
from tools.calibrate.settings import Setting
from tools.gpu import results as results_module
from tools.gpu.page import page
from tools.gpu.pieces import TIMED, Device, Piece, catalogue
from tools.gpu.results import Results
from tools.gpu.runner import Runner

CUDA = Device(kind="cuda", name="NVIDIA H100 80GB HBM3", uuid="GPU-1")
PIECES = [
    Piece(step="recipes", name="a"),
    Piece(step="recipes", name="b"),
    Piece(step="speed", name="c"),
    Piece(step="speed", name="d"),
]


class FakeChildren:
    """Answers as children do, by the piece's key."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.stopped = False

    def answer(self, module: str, task_json: str, *, name: str, timeout_s: float) -> str:
        self.asked.append(name)
        answer = self.answers.get(name[-1], {"step_s": 1.5})
        if isinstance(answer, BaseException):
            raise answer
        return json.dumps(answer)

    def stop(self) -> None:
        self.stopped = True


def run(path: Path, children: FakeChildren, *, seconds: float = 60) -> Results:
    results = Results(path)
    runner = Runner(CUDA, children, results, deadline=time.monotonic() + seconds, workers=2)  # type: ignore[arg-type]
    runner.run(results.todo(PIECES))
    return results


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpu" / "device.jsonl"


def test_what_is_there_is_not_measured_again_and_what_failed_is_tried_last(path: Path) -> None:
    run(path, FakeChildren(a=ChildFailed("no kernel"), c=OutOfMemory("out of memory")))
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if '"speed: d"' not in line) + "\n")
    children = FakeChildren()
    found = run(path, children).by_piece
    assert children.asked == ["speed: d", "recipes: a"]
    assert {key: result.status for key, result in found.items()} == {
        "recipes: a": "done",
        "recipes: b": "done",
        "speed: c": "out of memory",
        "speed: d": "done",
    }
    nothing = FakeChildren()
    run(path, nothing)
    assert nothing.asked == []


def test_a_line_that_a_kill_cut_off_is_measured_again(path: Path) -> None:
    run(path, FakeChildren())
    path.write_bytes(path.read_bytes()[:-20])
    children = FakeChildren()
    run(path, children)
    assert children.asked == ["speed: d"]
    assert [json.loads(line)["piece"] for line in path.read_text().splitlines()][-1] == "speed: d"


def test_results_of_other_versions_do_not_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(path, FakeChildren())
    monkeypatch.setattr(results_module, "installed_versions", lambda: {"torch": "2.99"})
    assert Results(path).todo(PIECES) == PIECES


def test_after_its_time_nothing_starts(path: Path) -> None:
    children = FakeChildren()
    assert run(path, children, seconds=0).todo(PIECES) == PIECES
    assert children.asked == []


def test_what_has_time_of_its_own_says_what_is_left_and_goes_on_in_its_turn(path: Path) -> None:
    run(path, FakeChildren(b={"status": "unfinished", "problem": "1 left"}, a=ChildFailed("no kernel")))
    assert [piece.key for piece in Results(path).todo(PIECES)] == ["recipes: b", "recipes: a"]


def test_an_interrupt_ends_the_children_and_keeps_nothing_of_theirs(path: Path) -> None:
    """The main thread hears of Ctrl-C; here the second piece brings it there."""
    children = FakeChildren(b=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(path, children)
    assert children.stopped
    assert "recipes: b" not in Results(path).by_piece
    ended = FakeChildren(a=ChildFailed("exit code -9"))
    ended.stopped = True
    results = run(path.with_name("other"), ended)
    assert "recipes: a" not in results.by_piece


def test_tiny_trainings_run_beside_each_other_and_what_is_timed_alone(path: Path) -> None:
    both = threading.Barrier(2, timeout=20)
    alone = threading.Lock()

    class Meeting(FakeChildren):
        def answer(self, module: str, task_json: str, *, name: str, timeout_s: float) -> str:
            if name.startswith("recipes"):
                both.wait()
            else:
                assert alone.acquire(blocking=False)
                time.sleep(0.05)
                alone.release()
            return "{}"

    assert {result.status for result in run(path, Meeting()).by_piece.values()} == {"done"}


def test_every_piece_has_a_name_of_its_own_and_a_setting_that_there_is() -> None:
    for device in (CUDA, Device(kind="cpu", name="CPU")):
        keys = [piece.key for piece in catalogue(device, paged=False)]
        assert len(set(keys)) == len(keys)
        assert [Setting(**setting).plan(device.kind) for setting in TIMED[device.kind]]


def test_without_bf16_everything_is_measured_in_fp16() -> None:
    turing = catalogue(Device(kind="cuda", name="Tesla T4", has_bf16=False), paged=False)
    assert "bf16" not in json.dumps([piece.task for piece in turing])
    assert {piece.step for piece in turing} == {piece.step for piece in catalogue(CUDA, paged=False)}


def test_the_page_has_every_piece_whatever_became_of_it(path: Path) -> None:
    speed = {
        "samples": 16,
        "step_s": 2.0,
        "tokens_per_s": 11264.0,
        "tflops_per_s": 345.6,
        "share_of_peak": 0.349,
        "idle_share": 0.12,
        "launches": 41000,
        "peak_bytes": 2**34,
        "attn": "sdpa",
        "spent_s": {"matmul": 1.5, "copies": 0.5},
    }
    children = FakeChildren(a=ChildFailed("no kernel *image*"), c=speed, d=OutOfMemory("out of memory"))
    results = run(path, children)
    pieces = [*PIECES, Piece(step="answers", name="e")]
    text = page(CUDA, results, [piece for piece in pieces if piece.name != "b"])
    assert text.startswith("# NVIDIA H100 80GB HBM3\n\nMeasured by `make gpu`: 3 of 4 pieces")
    assert "| a | failed |" in text
    assert re.search(
        r"\| c \| 16 \| 2\.000 \| 11,264 \| 345\.6 \| 34\.9% \| 12% \| 41,000 \| 16\.0 GiB \| sdpa \|", text
    )
    assert "| c | 75% | 0% | 0% | 0% | 0% | 0% | 25% | 0% |" in text
    assert "- recipes: a: no kernel \\*image\\*" in text
    assert "- speed: d: out of memory" in text
    assert "## Not measured yet\n\n- answers: e\n" in text
