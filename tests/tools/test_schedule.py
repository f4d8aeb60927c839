"""The order in which stages start, simulated: no stage runs here."""

import heapq
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.params import load_params
from stages.launcher.gpus import Gpu
from tests import ROOT
from tools.run import SideBySide, Step, num_gpus


def simulated(run: SideBySide, minutes: Callable[[str], float]) -> dict[str, tuple[float, float]]:
    """The times at which each step starts and ends, if it takes so long."""
    now, times, running = 0.0, dict[str, tuple[float, float]](), list[tuple[float, str]]()
    while len(run.done) < len(run.steps):
        waiting = [name for name in run.steps if name not in times]
        for name in run.next_steps(waiting=waiting, running=[name for _, name in running]):
            times[name] = (now, now + minutes(name))
            heapq.heappush(running, (times[name][1], name))
        assert running, f"nothing starts, with {waiting} to go"
        now, name = heapq.heappop(running)
        run.done.append(name)
    return times


def test_longest_chain_goes_first_and_a_step_that_wants_too_much_starts_alone() -> None:
    def step(*waits_for: str, gpus: int = 0) -> Step:
        return Step(frozenset(waits_for), gpus)

    steps = {"short": step(), "a": step(), "b": step("a"), "c": step("b"), "large": step(gpus=2), "small": step(gpus=1)}

    def first(jobs: int, *running: str) -> list[str]:
        waiting = [name for name in steps if name not in running]
        return SideBySide(steps=steps, jobs=jobs, gpus=1).next_steps(waiting=waiting, running=running)

    assert (first(1), first(2), first(9)) == (["a"], ["a", "short"], ["a", "short", "large"])
    assert first(9, "small") == ["a", "short"]
    assert first(2, "a", "short") == []


@given(st.data())
def test_every_step_runs_once_after_those_that_it_waits_for_within_the_limits(data: st.DataObject) -> None:
    names = [str(number) for number in range(data.draw(st.integers(1, 12)))]
    steps = {
        name: Step(
            frozenset(data.draw(st.sets(st.sampled_from(names[:index])) if index else st.just(set[str]()))),
            data.draw(st.integers(0, 2)),
        )
        for index, name in enumerate(names)
    }
    run = SideBySide(steps=steps, jobs=data.draw(st.integers(1, 4)), gpus=data.draw(st.integers(2, 4)))
    lasts = {name: data.draw(st.integers(1, 9)) for name in names}
    times = simulated(run, lambda name: lasts[name])
    for name, (start, _) in times.items():
        assert all(times[other][1] <= start for other in steps[name].waits_for)
        together = [other for other, (began, ended) in times.items() if began <= start < ended]
        assert len(together) <= run.jobs
        assert sum(steps[other].gpus for other in together) <= run.gpus


def test_gpus_are_those_of_the_machine_and_in_slurm_enough_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(load_params(ROOT / "params.yaml").on("qwen2-vl-7b"), gpu=48, gpus=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for num, expected in ((3, 3), (0, 1)):
        gpus = [Gpu(index=index, uuid=f"GPU-{index}", name="x") for index in range(num)]
        monkeypatch.setattr("tools.run.read_gpus", lambda gpus=gpus: gpus)
        assert num_gpus(params, jobs=4) == expected
    assert num_gpus(load_params(ROOT / "params.yaml"), jobs=4) == 0
    monkeypatch.setenv("BAKEOFF_PLACE", "slurm")
    assert num_gpus(params, jobs=4) == 8
