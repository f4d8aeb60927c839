"""The order in which stages start, simulated: no stage runs here."""

import heapq
import shutil
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from dvc.repo import Repo
from hypothesis import given
from hypothesis import strategies as st

from stages.core.params import load_params
from stages.core.params.schema import DeviceParams
from stages.kit.launcher.gpus import Gpu
from tests import ROOT
from tools.run.__main__ import num_gpus, steps_of
from tools.run.side_by_side import Step, chain_lengths, next_steps

MINUTES = {"train": 120, "merge": 5, "evaluate": 10}
"""Minutes by kind of stage; all others take one."""


def simulated(
    steps: Mapping[str, Step], minutes: Callable[[str], float], *, jobs: int, gpus: int
) -> dict[str, tuple[float, float]]:
    """The times at which each step starts and ends, if it takes so long."""
    now, times, running, done = 0.0, dict[str, tuple[float, float]](), list[tuple[float, str]](), list[str]()
    while len(done) < len(steps):
        waiting, names = [name for name in steps if name not in times], [name for _, name in running]
        for name in next_steps(steps, waiting=waiting, running=names, done=done, jobs=jobs, gpus=gpus):
            times[name] = (now, now + minutes(name))
            heapq.heappush(running, (times[name][1], name))
        assert running, f"nothing starts, with {waiting} to go"
        now, name = heapq.heappop(running)
        done.append(name)
    return times


def minutes_of(name: str) -> float:
    """r4 trains longer than the others; each recipe's stages differ a little."""
    kind, _, item = name.partition("@")
    return MINUTES.get(kind, 1) * (1.3 if item.startswith("r4") else 1 + len(item) / 1000)


@pytest.fixture
def detection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Step]:
    """The stages of the detection task, as DVC reads dvc.yaml, each of which wants one GPU at most."""
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    Repo.init(no_scm=True)
    steps, num_up_to_date = steps_of(["compare@detection"], DeviceParams(kind="cuda", count=1), force=True)
    assert num_up_to_date == 0
    assert len(steps) > 15
    return steps


def test_four_gpus_take_as_long_as_the_longest_chain_and_one_takes_turns(detection: dict[str, Step]) -> None:
    times = simulated(detection, minutes_of, jobs=4, gpus=4)
    began, ended = zip(*(times[f"train@{name}"] for name in ("r1-llm-only", "r2-vision-only", "r4-joint")), strict=True)
    assert max(began) < min(ended), "the three train at the same time"
    ends: dict[str, float] = {}
    for name, step in detection.items():  # in topological order
        ends[name] = minutes_of(name) + max((ends[other] for other in step.waits_for), default=0)
    assert max(end for _, end in times.values()) == pytest.approx(max(ends.values()))
    times = simulated(detection, minutes_of, jobs=4, gpus=1)
    turns = sorted(times[name] for name, step in detection.items() if step.gpus)
    assert all(end <= start for (_, end), (start, _) in pairwise(turns))
    assert times["plan@r1-llm-only"][1] < times["train@r2-vision-only"][1], "a plan does not wait for a training"


def test_longest_chain_goes_first_and_a_step_that_wants_too_much_starts_alone() -> None:
    def step(*waits_for: str, gpus: int = 0) -> Step:
        return Step(waits_for=frozenset(waits_for), gpus=gpus)

    steps = {"short": step(), "a": step(), "b": step("a"), "c": step("b"), "large": step(gpus=2), "small": step(gpus=1)}
    assert chain_lengths(steps) == {"short": 1, "a": 3, "b": 2, "c": 1, "large": 1, "small": 1}

    def first(jobs: int, *running: str) -> list[str]:
        waiting = [name for name in steps if name not in running]
        return next_steps(steps, waiting=waiting, running=running, done=(), jobs=jobs, gpus=1)

    assert (first(1), first(2), first(9)) == (["a"], ["a", "short"], ["a", "short", "large"])
    assert first(9, "small") == ["a", "short"]
    assert first(2, "a", "short") == []


@given(st.data())
def test_every_step_runs_once_after_those_that_it_waits_for_within_the_limits(data: st.DataObject) -> None:
    names = [str(number) for number in range(data.draw(st.integers(1, 12)))]
    steps = {
        name: Step(
            waits_for=frozenset(data.draw(st.sets(st.sampled_from(names[:index])) if index else st.just(set[str]()))),
            gpus=data.draw(st.integers(0, 2)),
        )
        for index, name in enumerate(names)
    }
    jobs, gpus = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    lasts = {name: data.draw(st.integers(1, 9)) for name in names}
    times = simulated(steps, lambda name: lasts[name], jobs=jobs, gpus=gpus)
    for name, (start, _) in times.items():
        assert all(times[other][1] <= start for other in steps[name].waits_for)
        together = [other for other, (began, ended) in times.items() if began <= start < ended]
        assert len(together) <= jobs
        assert sum(steps[other].gpus for other in together) <= gpus


def test_gpus_are_those_of_the_machine_and_in_slurm_enough_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    params = load_params(ROOT / "params.yaml").on("qwen2-vl-7b-2x48gb")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for num, expected in ((3, 3), (0, 1)):
        gpus = [Gpu(index=index, uuid=f"GPU-{index}", name="x") for index in range(num)]
        monkeypatch.setattr("tools.run.__main__.read_gpus", lambda gpus=gpus: gpus)
        assert num_gpus(params, jobs=4) == expected
    assert num_gpus(params.on("tiny"), jobs=4) == 0
    monkeypatch.setenv("BAKEOFF_PLACE", "slurm")
    assert num_gpus(params, jobs=4) == 8
