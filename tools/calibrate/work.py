"""A run over settings: predictions ahead, several at once; measurements one at a time, as there is one device."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import TypeAdapter

from stages.core.errors import OutOfMemory
from tools.calibrate.children import ChildFailed, Children, Task
from tools.calibrate.measured import DeviceFacts, Measured
from tools.calibrate.outcomes import Forecast, Outcome, Session
from tools.calibrate.settings import Setting

log = logging.getLogger("stages")

Device = Literal["cpu", "cuda"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def facts_of(device: Device, children: Children) -> DeviceFacts:
    return TypeAdapter(DeviceFacts).validate_json(children.run(Task(job="facts", device=device)))


def measure_settings(
    settings: Sequence[Setting],
    session: Session,
    path: Path,
    children: Children,
    *,
    device: Device,
    workers: int,
    deadline: float,
) -> None:
    """Predict and measure what is not in the session yet; what failed before comes last.

    deadline: of time.monotonic; nothing starts after it.
    """
    known = session.outcomes
    todo = [setting for setting in settings if setting.name not in known or not known[setting.name].is_final]
    todo.sort(key=lambda setting: setting.name in known)
    capacity_bytes = session.facts.total_bytes if device == "cuda" else None

    def predict(setting: Setting) -> Forecast:
        task = predict_task(setting.name, session.facts, device)
        return forecast_of(children, replace(task, capacity_bytes=capacity_bytes))

    try:
        for setting, future in ahead(todo, predict, workers):
            if time.monotonic() > deadline:
                children.stop()
                break
            outcome = outcome_of(setting, future, children, device)
            session.keep(outcome, path)
            log.info("%s: %s", setting.name, said(outcome))
    finally:
        children.stop()


def predict_again(session: Session, path: Path, children: Children, *, device: Device, workers: int) -> None:
    """New predictions beside what was measured; for after a change of the predictor."""
    outcomes = [outcome for outcome in session.outcomes.values() if outcome.measured and outcome.forecast]

    def predict(outcome: Outcome) -> Forecast:
        assert outcome.forecast is not None
        task = predict_task(outcome.setting, session.facts, device)
        return forecast_of(children, replace(task, layers=outcome.forecast.layers))

    try:
        for outcome, future in ahead(outcomes, predict, workers):
            session.keep(replace(outcome, forecast=future.result()), path)
            log.info("%s: predicted again", outcome.setting)
    finally:
        children.stop()


def outcome_of(setting: Setting, future: Future[Forecast], children: Children, device: Device) -> Outcome:
    """One setting, measured; what goes wrong is an outcome too."""
    if library := missing_library(setting):
        return Outcome(setting=setting.name, problem=f"left out: {library} is not installed")
    try:
        forecast = future.result()
    except (ChildFailed, OutOfMemory) as error:
        return Outcome(setting=setting.name, problem=f"failed: not predicted: {error.message}")
    try:
        answer = children.run(Task(job="measure", device=device, setting=setting.name, layers=forecast.layers))
    except OutOfMemory:
        return Outcome(setting=setting.name, forecast=forecast, problem="out of memory")
    except ChildFailed as error:
        return Outcome(setting=setting.name, forecast=forecast, problem=f"failed: {error.message}")
    return Outcome(setting=setting.name, forecast=forecast, measured=TypeAdapter(Measured).validate_json(answer))


def ahead(items: Iterable[Item], work: Callable[[Item], Result], workers: int) -> Iterator[tuple[Item, Future[Result]]]:
    """Each item with the work on it, in order; `workers` of them are under way before they are asked for."""
    waiting = iter(items)
    with ThreadPoolExecutor(workers) as pool:
        begun = deque((item, pool.submit(work, item)) for item in islice(waiting, workers))
        while begun:
            first = begun.popleft()
            begun.extend((item, pool.submit(work, item)) for item in islice(waiting, 1))
            yield first


def predict_task(setting: str, facts: DeviceFacts, device: Device) -> Task:
    return Task(
        job="predict",
        device=device,
        setting=setting,
        workspace_bytes=facts.workspace_bytes,
        workspaces=facts.workspaces,
    )


def forecast_of(children: Children, task: Task) -> Forecast:
    return TypeAdapter(Forecast).validate_json(children.run(task))


def missing_library(setting: Setting) -> str | None:
    wanted = {"flash_attn": setting.attn == "flash_attention_2"}
    return next((name for name, needed in wanted.items() if needed and find_spec(name) is None), None)


def said(outcome: Outcome) -> str:
    if outcome.problem:
        return outcome.problem
    assert outcome.measured is not None
    assert outcome.forecast is not None
    measured, predicted = outcome.measured.allocated_bytes, outcome.forecast.scaled.allocated_bytes
    return f"{predicted / 2**30:.3f} GiB allocated were predicted, {measured / 2**30:.3f} measured"
