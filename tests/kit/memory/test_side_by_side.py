import os
import signal
from functools import partial

import psutil
import pytest
import torch

from stages.kit.memory import side_by_side as module
from stages.kit.memory.recording import Peak
from stages.kit.memory.side_by_side import side_by_side


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def test_results_come_in_the_order_of_their_calls_each_from_a_process_of_its_own() -> None:
    def call(number: int) -> tuple[int, Peak, int]:
        return number, Peak(number, {}), os.getpid()

    results = side_by_side([partial(call, number) for number in range(3)])
    assert [result[:2] for result in results] == [(number, Peak(number, {})) for number in range(3)]
    assert len({os.getpid(), *(pid for *_, pid in results)}) == 4


def test_what_a_call_changes_stays_in_its_copy() -> None:
    changed: list[int] = []
    threads = torch.get_num_threads()
    assert side_by_side([lambda: changed.append(1), lambda: changed.append(2)]) == [None, None]
    assert changed == []
    assert torch.get_num_threads() == threads


def test_an_error_is_the_callers() -> None:
    def fail() -> None:
        raise KeyError("a call")

    with pytest.raises(KeyError, match="a call"):
        side_by_side([lambda: None, fail])


def test_what_a_copy_cannot_do_is_done_here() -> None:
    here = os.getpid()

    def only_here() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    assert side_by_side([lambda: 0, only_here]) == [0, here]


def test_a_backward_pass_can_follow_a_backward_pass_of_the_caller() -> None:
    def gradient() -> float:
        weight = torch.ones((), requires_grad=True)
        (weight * 3).backward()
        assert weight.grad is not None
        return weight.grad.item()

    assert gradient() == 3
    assert side_by_side([gradient, gradient]) == [3, 3]


def test_copies_end_with_the_callers_interruption() -> None:
    begun: list[int] = []
    before = psutil.Process().children()

    def result(receiver: object, call: object) -> None:
        begun.append(1)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_result", result)
        side_by_side([signal.pause, signal.pause])
    assert begun == [1]
    assert psutil.Process().children() == before


@pytest.mark.parametrize("cores", [{0}, {0, 1}])
def test_one_call_or_one_core_needs_no_copy(cores: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    calls = [os.getpid] * (3 - len(cores))
    assert side_by_side(calls) == [os.getpid()] * len(calls)
