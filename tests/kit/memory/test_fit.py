"""What is done with a prediction: a plan is run, changed or refused, and a record is kept of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.kit.memory import predictor
from stages.kit.memory.fit import Fit, cheapest_fit, decide, fit_of
from stages.kit.planning.ladder import changes_between, rungs
from stages.kit.planning.memory_record import beside_measured, read_memory_record, write_memory_record
from stages.kit.planning.plan import Plan
from stages.kit.planning.prediction import Prediction
from tests.damage import damaged_bytes, damaged_tree, quick
from tests.kit.planning.test_ladder import plan_with

GIB = 2**30
PLAN = plan_with(4, 4, optimizer="adamw_torch_fused", may_quantize=True)


def changes_after(num_rungs: int) -> tuple[str, ...]:
    """Micro_batch to 2, to 1, checkpointing, 8-bit states, paged ones, nf4."""
    return changes_between(PLAN, [PLAN, *(rung.plan for rung in rungs(PLAN))][num_rungs])


def predicted(gib: float) -> Prediction:
    size = round(gib * GIB)
    return Prediction(
        allocated_bytes=size - 3,
        reserved_bytes=size - 2,
        total_bytes=size,
        low_bytes=round(size * 0.9),
        high_bytes=round(size * 1.1),
        peak_phase="backward",
        phases={"load": size // 2, "forward": size // 2, "backward": size - 3, "step": size // 2},
        budget={"weights": size - 3, "overhead": 3},
        calibration="assumed",
    )


def predict(*gib: float) -> Callable[[Plan], Prediction]:
    """gib: what the plan takes, and each rung below it in turn."""
    ladder = [PLAN, *(rung.plan for rung in rungs(PLAN))]
    return lambda plan: predicted(gib[ladder.index(plan)])


FALLING = predict(20, 15, 11, 10, 9, 8, 7)


def start(capacity_gib: float | None, predict: Callable[[Plan], Prediction] = FALLING) -> Fit:
    return fit_of(PLAN, predict, None if capacity_gib is None else round(capacity_gib * GIB))


@pytest.mark.parametrize(
    ("capacity_gib", "num_changes", "verdict"),
    [
        (None, 0, None),
        (23, 0, "fits"),
        (18.5, 1, "fits"),  # the plan itself might: 18 to 22
        (11.5, 3, "fits"),  # two changes might: 9.9 to 12.1
        (7.5, 5, "too close"),  # 7.2 to 8.8; the last, 6.3 to 7.7, no better
        (6.5, 6, "too close"),
        (6, 6, "does not fit"),
    ],
)
def test_the_cheapest_fit_is_the_first_rung_that_fits_else_the_first_that_might(
    capacity_gib: float | None, num_changes: int, verdict: str | None
) -> None:
    cheapest = cheapest_fit(start(capacity_gib), FALLING)
    assert cheapest.changes == changes_after(num_changes)
    assert cheapest.verdict == verdict
    assert cheapest.prediction == FALLING(cheapest.plan)


def test_the_processes_of_a_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "free_and_total_bytes", lambda: (8 * GIB, 16 * GIB))
    cpu: Any = predictor.MemoryPredictor(config=None, processor=None, batch_of=None)  # type: ignore[arg-type]

    def capacity(**device: Any) -> int:
        return cpu.capacity_bytes(DeviceParams(**device))

    assert capacity(kind="cpu") == 16 * GIB
    assert capacity(kind="cpu", count=8) == 2 * GIB
    assert capacity(kind="cpu", count=8, memory_gb=80) == capacity(kind="cpu", memory_gb=80) // 8
    assert capacity(kind="cuda", count=8, memory_gb=80) == capacity(kind="cuda", memory_gb=80)
    assert capacity(kind="cuda", count=8) is None


def test_no_rung_is_predicted_that_is_not_needed() -> None:
    asked: list[Plan] = []

    def counted(plan: Plan) -> Prediction:
        asked.append(plan)
        return FALLING(plan)

    cheapest_fit(start(17, counted), counted)
    assert len(asked) == 2
    for how in ("refuse", "auto", "off"):
        asked.clear()
        assert decide(start(23, counted), counted, how).changes == ()
        assert asked == [PLAN]


def test_a_plan_with_nothing_left_to_give_up_is_what_it_is() -> None:
    last = list(rungs(PLAN))[-1].plan
    fit = fit_of(last, FALLING, GIB)
    assert cheapest_fit(fit, FALLING) == fit
    with pytest.raises(UserError, match=r"the least is with no change: 7\.00 GiB"):
        decide(fit, FALLING, "auto")


@pytest.mark.parametrize(
    ("capacity_gib", "how", "num_changes"),
    [
        *((None, "refuse", 0), (None, "auto", 0), (None, "off", 0)),
        *((19, "refuse", 0), (19, "auto", 1), (19, "off", 0)),  # too close as it is
        *((11.5, "auto", 3), (6.5, "auto", 6), (11.5, "off", 0), (1, "off", 0)),
    ],
)
def test_what_is_run_is_what_was_asked_for(capacity_gib: float | None, how: str, num_changes: int) -> None:
    assert decide(start(capacity_gib), FALLING, how).changes == changes_after(num_changes)


def test_a_plan_that_fits_nowhere_down_the_ladder_but_might_as_it_is_is_run_as_it_is() -> None:
    stubborn = predict(*[10] * 7)
    assert decide(start(10, stubborn), stubborn, "auto").changes == ()


def test_a_refusal_names_the_budget_and_what_would_mend_it() -> None:
    with pytest.raises(UserError) as caught:
        decide(start(12), FALLING, "refuse")
    message = str(caught.value)
    for line in (
        "recipe r1-llm-only does not fit the GPU of profile tiny:",
        "W weights        20.00 GiB",
        "usable    12.00 GiB",
        "verdict   does not fit",
        "it fits with micro_batch 4 -> 1, grad_accumulation 4 -> 16, gradient_checkpointing off -> on: 10.00 GiB",
        "take that: add to the command, as in dvc exp run -S profiles.tiny.memory.fit=auto",
        "run it as it is: add to the command, as in dvc exp run -S profiles.tiny.memory.fit=off",
    ):
        assert line in message, line


def test_a_refusal_says_so_where_the_change_might_not_suffice_or_does_not() -> None:
    with pytest.raises(UserError, match=r"it might just fit with .*nf4: 7\.00 GiB\n.*fit=auto\n.*fit=off$"):
        decide(start(6.5), FALLING, "refuse")
    for how in ("refuse", "auto"):
        with pytest.raises(UserError, match=r"the least is with .*nf4: 7\.00 GiB\n.*fit=off$") as caught:
            decide(start(6), FALLING, how)
        assert "fit=auto" not in str(caught.value)


@pytest.mark.parametrize(
    ("capacity_gib", "said"),
    [
        (6, "on 2 such GPUs it fits with memory.placement sharded (placement sharded over 2, micro_batch 1, "),
        (3.5, "on 4 such GPUs it fits with memory.placement sharded (placement sharded over 4, micro_batch 1, "),
        (0.9, None),
    ],
)
def test_a_refusal_names_how_many_gpus_would_do_where_nothing_else_does(capacity_gib: float, said: str | None) -> None:
    """8 GiB, all but one of which can be shared out."""
    asked: list[int] = []

    def predict(plan: Plan) -> Prediction:
        asked.append(plan.device.count)
        gib = 1 + 7 / plan.device.count
        return replace(predicted(gib), budget={"weights": round((gib - 1) * GIB), "overhead": GIB})

    plan = replace(PLAN, may_quantize=False)
    with pytest.raises(UserError) as caught:
        decide(fit_of(plan, predict, round(capacity_gib * GIB)), predict, "refuse")
    message = str(caught.value)
    assert ("such GPUs" in message) == (said is not None)
    assert said is None or said in message
    if said is None:
        assert set(asked) == {1}  # what cannot help is not predicted


@pytest.mark.parametrize("capacity_gib", [None, 12])
def test_a_record_comes_back_as_it_was_written(capacity_gib: float | None, tmp_path: Path) -> None:
    record = replace(start(capacity_gib), changes=changes_after(1)).record(start(capacity_gib))
    write_memory_record(record, tmp_path / "memory.json")
    assert read_memory_record(tmp_path / "memory.json") == record
    assert record.verdict == ("unknown" if capacity_gib is None else "does not fit")
    assert (record.total_gib, record.usable_gib, record.changes) == (20, capacity_gib, list(changes_after(1)))
    assert (record.evaluation_gib, record.evaluation_verdict) == (20, record.verdict)
    assert json.loads((tmp_path / "memory.json").read_text())["budget_gib"] == {"weights": 20, "overhead": 0}


def test_a_record_has_each_of_several_gpus_and_says_nothing_of_them_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    fit = start(12)
    write_memory_record(fit.record(fit), path)
    assert "gpus" not in json.loads(path.read_text())
    gpus = (predicted(5), predicted(20))
    record = replace(fit, prediction=replace(fit.prediction, gpus=gpus)).record(fit)
    write_memory_record(record, path)
    assert read_memory_record(path) == record
    raw = json.loads(path.read_text())
    assert {name: (gpu["verdict"], gpu["total_gib"]) for name, gpu in raw["gpus"].items()} == {
        "0": ("fits", 5.0),
        "1": ("does not fit", 20.0),
    }
    assert raw["verdict"] == "does not fit"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-10],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace('"allocated_gib": 20.0', '"allocated_gib": "20"'),
        lambda text: text.replace('"backward"', '"sideways"'),
        lambda text: text.replace('"verdict"', '"judgement"'),
    ],
    ids=["cut", "a list", "empty", "text for a number", "unknown phase", "unknown key"],
)
def test_a_damaged_record_is_refused_with_the_command_that_mends_it(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "r1-llm-only/memory.json"
    path.parent.mkdir()
    write_memory_record(start(12).record(start(12)), path)
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    with pytest.raises(
        UserError, match=r"memory\.json is damaged: .*; rebuild it with: dvc repro -f -s plan@r1-llm-only"
    ):
        read_memory_record(path)
    path.unlink()
    with pytest.raises(UserError, match=r"memory\.json is missing; rebuild it with: dvc repro -f -s plan@r1-llm-only"):
        read_memory_record(path)


def test_a_tiny_models_error_is_not_lost_in_rounding() -> None:
    """Half a megabyte, and one hundredth more."""
    half = replace(predicted(1), allocated_bytes=500_000)
    record = replace(start(None), prediction=half).record(start(None))
    assert beside_measured(record, 505_000, on_cpu=False)["memory_error"] == pytest.approx(-0.0099, abs=0.002)
    assert beside_measured(record, 500_000, on_cpu=False)["memory_error"] == 0


def test_what_was_measured_on_a_cpu_has_no_optimizers_step() -> None:
    step = replace(predicted(3), phases={"load": GIB, "forward": GIB, "backward": 2 * GIB, "step": 3 * GIB})
    record = replace(start(None), prediction=step).record(start(None))
    assert beside_measured(record, 2 * GIB, on_cpu=True)["memory_error"] == 0
    assert beside_measured(record, 3 * GIB, on_cpu=False)["memory_error"] == 0


@given(data=st.data())
@quick(60)
def test_any_damage_to_a_record_is_said_on_one_line_or_it_compares(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "r1-llm-only/memory.json"
    write_memory_record(start(12).record(start(12)), path)
    good = path.read_bytes()
    tree = damaged_tree(json.loads(good)).map(lambda tree: json.dumps(tree).encode())
    path.write_bytes(data.draw(tree | damaged_bytes(good)))
    try:
        record = read_memory_record(path)
    except UserError as error:
        assert re.fullmatch(
            r".*memory\.json is damaged: .*; rebuild it with: dvc repro .* plan@r1-llm-only", error.message
        )
        return
    assert record.summary()
    assert beside_measured(record, GIB, on_cpu=True)
