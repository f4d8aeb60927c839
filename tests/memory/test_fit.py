"""A prediction decides whether a plan is run, changed or refused, and is recorded."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams, PriceParams
from stages.memory.calibration import load_calibration
from stages.memory.fit import (
    Fit,
    cheapest_fit,
    computed_length,
    decide,
    duration,
    fastest_fit,
    fitting_batch_size,
    relative_length,
)
from stages.planning.ladder import changes_between, rungs
from stages.planning.plan import Plan
from stages.planning.prediction import PlannedMemory, Prediction, prediction_metrics
from tests.planning.test_ladder import plan_with
from tests.plans import changed

GIB = 2**30
PLAN = plan_with(4, 4, optimizer="adamw_torch_fused", may_quantize=True)
LADDER = list(rungs(PLAN))
SIZES = (20, 15, 11, 10, *[9] * (len(LADDER) - 6), 8, 7)
"""GiB that each rung takes."""
LAST = re.escape(", ".join(changes_between(PLAN, LADDER[-1])))


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


def falling(plan: Plan) -> Prediction:
    return predicted(SIZES[LADDER.index(plan)])


def start(capacity_gib: float | None, predict: Callable[[Plan], Prediction] = falling) -> Fit:
    capacity_bytes = None if capacity_gib is None else round(capacity_gib * GIB)
    return Fit(plan=PLAN, prediction=predict(PLAN), capacity_bytes=capacity_bytes)


@pytest.mark.parametrize(("capacity_gib", "size"), [(0.1, 1), (10.9, 4), (11, 8), (900, 128)])
def test_the_batch_size_auto_is_the_largest_that_surely_fits(capacity_gib: float, size: int) -> None:
    """For 8 completions of 1 GiB each and 2 GiB of weights, the interval ends at 11 GiB."""
    asked = []

    def predict(batch_size: int) -> Prediction:
        asked.append(batch_size)
        return predicted(2 + batch_size)

    assert fitting_batch_size("auto", predict, round(capacity_gib * GIB)) == size
    assert len(asked) <= 3, "each takes seconds"
    assert fitting_batch_size(48, predict, None) == 48
    assert len(asked) <= 3, "nothing is predicted of a size that is given"


@pytest.mark.parametrize(
    ("capacity_gib", "rung", "verdict"),
    [
        (None, 0, None),
        (23, 0, "fits"),
        (18.5, 1, "fits"),  # the plan itself might: 18 to 22
        (11.5, 3, "fits"),  # two changes might: 9.9 to 12.1
        (7.5, -2, "too close"),  # 7.2 to 8.8; the last, 6.3 to 7.7, no better
        (6.5, -1, "too close"),
        (6, -1, "does not fit"),
    ],
)
def test_the_cheapest_fit_is_the_first_rung_that_fits_else_the_first_that_might(
    capacity_gib: float | None, rung: int, verdict: str | None
) -> None:
    cheapest = cheapest_fit(start(capacity_gib), falling)
    assert cheapest.changes == changes_between(PLAN, LADDER[rung])
    assert (cheapest.plan, cheapest.verdict) == (LADDER[rung], verdict)
    assert cheapest.prediction == falling(cheapest.plan)


@pytest.mark.parametrize(
    ("capacity_gib", "how", "rung"),
    [
        *((None, "refuse", 0), (None, "auto", 0), (None, "off", 0)),
        *((19, "refuse", 0), (19, "auto", 1), (19, "off", 0)),  # too close as it is
        *((11.5, "auto", 3), (6.5, "auto", -1), (1, "off", 0)),
    ],
)
def test_what_is_run_is_what_was_asked_for(capacity_gib: float | None, how: str, rung: int) -> None:
    assert decide(start(capacity_gib), falling, how).plan == LADDER[rung]


def filled(capacity_gib: float | None, *, work: float = 4 / 3) -> tuple[str, ...]:
    """Changes by `fill` in a plan of 2 x 8 with checkpointing, where a sample takes 2 GiB, without it 6. work: of a
    sample with checkpointing, relative to one without, which takes a second; a micro-batch's operators take two."""
    device, calibration = DeviceParams(kind="cuda", card="L4"), load_calibration()

    def predict(plan: Plan) -> Prediction:
        size, checkpointed = plan.memory.micro_batch, plan.memory.gradient_checkpointing
        flops = size * (work if checkpointed else 1.0) * 121e12 * calibration.share_of_peak.value
        memory = predicted(4 + size * (2 if checkpointed else 6))
        return replace(memory, flops=flops, operators=2e6 / calibration.operator_us.value)

    plan = replace(plan_with(2, 8, gradient_checkpointing=True), device=device)
    fit = replace(start(capacity_gib), plan=plan, prediction=predict(plan))
    full = fastest_fit(fit, predict)
    assert full.prediction == predict(full.plan)
    assert decide(fit, predict, "fill") == (full if full.verdict == "fits" else cheapest_fit(fit, predict))
    return full.changes


@pytest.mark.parametrize(
    ("capacity_gib", "changes"),
    [
        (400, ("micro_batch 2 -> 16", "grad_accumulation 8 -> 1", "gradient_checkpointing on -> off")),
        (32, ("micro_batch 2 -> 4", "grad_accumulation 8 -> 4", "gradient_checkpointing on -> off")),
        (24, ("gradient_checkpointing on -> off",)),
        (14, ("micro_batch 2 -> 4", "grad_accumulation 8 -> 4")),  # a third more work, in micro-batches of 4, not 1
        (9, ()),
        (7, ("micro_batch 2 -> 1", "grad_accumulation 8 -> 16")),
        (None, ()),
    ],
)
def test_a_card_is_filled_with_the_fastest_settings(capacity_gib: float | None, changes: tuple[str, ...]) -> None:
    assert filled(capacity_gib) == changes


@pytest.mark.parametrize(
    ("how", "changes"),
    [
        ("auto", ("micro_batch 8 -> 1", "grad_accumulation 2 -> 16", "optimizer adamw_torch_fused -> adamw_8bit")),
        ("fill", ("optimizer adamw_torch_fused -> adamw_8bit",)),
    ],
)
def test_what_a_rung_frees_is_filled_again(how: str, changes: tuple[str, ...]) -> None:
    """The ladder takes smaller micro-batches before smaller optimizer states; these leave room for larger ones."""

    def predict(plan: Plan) -> Prediction:
        states = 10 if plan.memory.optimizer == "adamw_torch_fused" else 0
        activations = plan.memory.micro_batch * (1 if plan.memory.gradient_checkpointing else 10)
        return replace(predicted(10 + states + activations), flops=plan.memory.micro_batch)

    plan = plan_with(8, 2, gradient_checkpointing=True, optimizer="adamw_torch_fused")
    fit = replace(start(20), plan=plan, prediction=predict(plan))
    lowered = decide(fit, predict, how)
    assert (lowered.changes, lowered.verdict) == (changes, "fits")


def test_the_counted_work_of_checkpointing_decides_whether_it_is_worth_a_larger_micro_batch() -> None:
    smallest = ("micro_batch 2 -> 1", "grad_accumulation 8 -> 16", "gradient_checkpointing on -> off")
    assert filled(14, work=4.0) == smallest


def test_a_refusal_says_so_where_the_change_might_not_suffice_or_does_not() -> None:
    with pytest.raises(UserError, match=rf"it might just fit with {LAST}: 7\.00 GiB\n.*fit=auto\n.*fit=off$"):
        decide(start(6.5), falling, "refuse")
    for how in ("refuse", "auto"):
        with pytest.raises(UserError, match=rf"the least is with {LAST}: 7\.00 GiB\n.*fit=off$") as caught:
            decide(start(6), falling, how)
        assert "fit=auto" not in str(caught.value)
    last = replace(start(1), plan=LADDER[-1], prediction=predicted(7))
    assert cheapest_fit(last, falling) == last
    with pytest.raises(UserError, match=r"the least is with no change: 7\.00 GiB"):
        decide(last, falling, "auto")


@pytest.mark.parametrize("capacity_gib", [None, 12])
def test_a_record_comes_back_as_it_was_written(capacity_gib: float | None, tmp_path: Path) -> None:
    path, fit = tmp_path / "memory.json", start(capacity_gib)
    record = replace(fit, changes=("optimizer a -> b",)).record(start(capacity_gib), 64)
    record.write(path)
    assert PlannedMemory.read(path, fix="") == record
    assert record.verdict == record.evaluation_verdict == ("unknown" if capacity_gib is None else "does not fit")
    assert record.usable_bytes == (None if capacity_gib is None else capacity_gib * GIB)
    assert (record.evaluation_bytes, record.evaluation_batch_size, record.changes) == (
        20 * GIB,
        64,
        ["optimizer a -> b"],
    )


def test_measured_and_predicted_are_of_the_same_phases_and_an_error_is_not_lost_in_rounding() -> None:
    """A CPU's measurement has no optimizer step. Half a megabyte, and one hundredth more."""
    step = replace(predicted(3), phases={"load": GIB, "forward": GIB, "backward": 2 * GIB, "step": 3 * GIB})
    assert prediction_metrics(step, 2 * GIB, on_cpu=True)["memory_error"] == 0
    assert prediction_metrics(step, 3 * GIB, on_cpu=False)["memory_error"] == 0
    half = replace(predicted(1), allocated_bytes=500_000)
    assert prediction_metrics(half, 505_000, on_cpu=False)["memory_error"] == -0.0099


def test_on_a_cpu_the_process_takes_more_than_its_tensors() -> None:
    constants, prediction = load_calibration(), predicted(2)
    process_bytes = constants.process_mib.num_bytes + (1 + constants.malloc_share.value) * prediction.total_bytes
    on_cpu = Fit(plan=changed(PLAN, device=DeviceParams(kind="cpu")), prediction=prediction, capacity_bytes=9 * GIB)
    on_gpu = replace(on_cpu, plan=changed(PLAN, device=DeviceParams(kind="cuda")))
    assert f"the process takes up to {process_bytes / GIB:.2f} GiB, " in on_cpu.lines()[-1]
    assert "are free now" in on_cpu.lines()[-1]
    assert not any("the process takes" in line for line in on_gpu.lines())


def test_a_training_takes_the_time_of_its_arithmetic_or_of_its_operators() -> None:
    """On an L4 the arithmetic takes longer, on an H100 the operators."""
    device = DeviceParams(kind="cuda", count=2, card="L4")
    plan = changed(PLAN, precision="bf16", device=device, num_steps=100)
    fit = Fit(plan=plan, prediction=replace(predicted(3), flops=6.05e12, operators=800), capacity_bytes=None)
    lengths = [400, 400, 400, 400, 100, 100]  # the four longest are the batch that is counted
    calibration = load_calibration()
    share = calibration.share_of_peak.value
    found = duration(fit, lengths, PriceParams(gpu_hour=0.5, kwh=0.25))
    assert found is not None
    step_flops = 4 * 6.05e12 * 300 / 400
    hours = 100 * step_flops / (121e12 * share) / 3600
    assert found.num_steps == 100
    assert found.step_flops == pytest.approx(step_flops)
    assert found.step_operators == 4 * 800
    assert found.hours == {"L4": pytest.approx(hours)}
    assert found.kwh == pytest.approx(hours * 2 * 72 / 1000)
    assert found.cost == pytest.approx(hours * 2 * 0.5 + hours * 2 * 72 / 1000 * 0.25)
    assert f"18.1 TFLOP in 3,200 operators, at {share:.0%} of peak or " in str(found)

    by_size = replace(fit, plan=replace(plan, device=DeviceParams(kind="cuda", memory_gb=80)))
    without_data = duration(by_size, [], PriceParams(gpu_hour=0.5))
    assert without_data is not None
    assert {"A100-80GB", "H100", "H100 PCIe"} == set(without_data.hours)
    assert (without_data.num_steps, without_data.kwh, without_data.cost) == (None, None, None)
    assert without_data.hours["H100"] == pytest.approx(4 * 800 * calibration.operator_us.value / 1e6 / 3600)
    for changes in ({"precision": "fp32"}, {"device": DeviceParams(kind="cpu")}):
        assert duration(replace(fit, plan=changed(plan, **changes)), lengths, PriceParams()) is None


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=50), st.integers(1, 8), st.integers(1, 8))
def test_a_sample_is_computed_with_its_padding(lengths: list[int], micro_batch: int, accumulation: int) -> None:
    lengths.sort(reverse=True)
    step = micro_batch * accumulation
    plan = changed(PLAN, micro_batch=micro_batch, grad_accumulation=accumulation, effective_batch=step)
    mean, computed = sum(lengths) / len(lengths), computed_length(plan, lengths)
    assert computed_length(replace(plan, padding_free=True), lengths) == pytest.approx(mean)
    assert mean - 1e-9 <= computed <= lengths[0]
    assert computed_length(plan, [lengths[0]] * 9) == lengths[0]
    if len(lengths) <= step:  # all in one step: each pads to the longest of its micro-batch
        rows = (lengths[first : first + micro_batch] for first in range(0, len(lengths), micro_batch))
        assert computed == pytest.approx(sum(max(row) * len(row) for row in rows) / len(lengths))
    assert relative_length(plan, lengths) == pytest.approx(computed / lengths[0])
    assert relative_length(plan, []) == 1
