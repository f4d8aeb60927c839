"""Whether a plan fits its device, and the smallest change that makes it fit."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, TypeAlias

from stages.core.errors import UserError, bytes_text
from stages.core.params.schema import PriceParams
from stages.memory.calibration import load_calibration
from stages.planning.cards import CARDS, cards_for
from stages.planning.ladder import MAX_BATCH_SIZE, changes_between, rungs
from stages.planning.memory_use import free_and_total_bytes
from stages.planning.plan import Plan, sorted_steps
from stages.planning.prediction import PlannedMemory, Prediction, Verdict, gib_text

Predict: TypeAlias = Callable[[Plan], Prediction]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A plan, its predicted memory, and the changes that led to it."""

    plan: Plan
    prediction: Prediction
    capacity_bytes: int | None
    """Usable memory of the device; None if unknown: then nothing is refused."""
    changes: tuple[str, ...] = ()
    """Differences from the plan that was asked for, e.g. "micro_batch 16 -> 4"."""

    @property
    def verdict(self) -> Verdict | None:
        return None if self.capacity_bytes is None else self.prediction.verdict(self.capacity_bytes)

    def changed_to(self, plan: Plan, predict: Predict) -> Fit:
        return replace(self, plan=plan, prediction=predict(plan), changes=changes_between(self.plan, plan))

    def relative_time(self) -> float:
        """Time of a step, to compare plans of one recipe: the mean of its cards; on a CPU its arithmetic."""
        plan = self.plan
        if not plan.on_gpu:
            return self.prediction.flops * plan.schedule.grad_accumulation
        cards = cards_for(plan.device, plan.memory.precision) or CARDS
        return fmean(step_seconds(plan, self.prediction, card.tflops) for card in cards)

    def lines(self) -> list[str]:
        """Schedule, disk for features, changes and memory, for logs; on a CPU in short if the plan fits."""
        plan, schedule = self.plan, self.plan.schedule
        steps = f"{schedule.num_steps} steps of {plan.recipe.effective_batch}"
        micro_batches = f"micro-batch {plan.memory.micro_batch} x {schedule.grad_accumulation}"
        lines = [f"{schedule.train_samples} samples, {steps} ({micro_batches})"]
        if plan.features_bytes:
            lines.append(f"features of the frozen tower are kept, at most {bytes_text(plan.features_bytes)} of disk")
        lines += [f"to fit the device: {change}" for change in self.changes]
        short = self.verdict is None or (self.verdict == "fits" and not plan.on_gpu)
        lines += [self.prediction.summary()] if short else self.prediction.lines(self.capacity_bytes)
        return lines if plan.on_gpu else [*lines, process_words(self.prediction)]

    def record(self, evaluation: Fit, batch_size: int) -> PlannedMemory:
        """evaluation: how the same plan's evaluation fits, so many completions at once."""
        of_this_machine = self.plan.device.kind == "cpu" and self.plan.device.memory_gb is None
        return PlannedMemory(
            verdict=self.verdict or "unknown",
            prediction=self.prediction,
            usable_bytes=None if of_this_machine else self.capacity_bytes,
            changes=list(self.changes),
            evaluation_verdict=evaluation.verdict or "unknown",
            evaluation_bytes=evaluation.prediction.total_bytes,
            evaluation_batch_size=batch_size,
        )


def process_words(prediction: Prediction) -> str:
    """Resident memory of a process on a CPU, an upper estimate, and what this machine has free."""
    calibration, tensors = load_calibration(), prediction.total_bytes
    libraries, kept = calibration.process_mib.num_bytes, round(calibration.malloc_share.value * tensors)
    return (
        f"the process takes up to {gib_text(libraries + tensors + kept)} GiB, {gib_text(libraries)} of them libraries "
        f"and {gib_text(kept)} what malloc keeps; {gib_text(free_and_total_bytes()[0])} GiB are free now"
    )


def cheapest_fit(fit: Fit, predict: Predict, *, fill: bool = False) -> Fit:
    """The first plan down the ladder that fits; else the first that might; else the last.

    fill: of the plans with the same result as the first that fits, the fastest that fits.
    """
    might, rung = None, fit
    for plan in rungs(fit.plan):
        if plan is not fit.plan:
            rung = fit.changed_to(plan, predict)
        if rung.verdict in (None, "fits"):
            fills = fill and rung is not fit
            return fit.changed_to(fastest_fit(rung, predict).plan, predict) if fills else rung
        if rung.verdict == "too close":
            might = might or rung
    return might or rung


def fastest_fit(fit: Fit, predict: Predict) -> Fit:
    """The fastest plan of the same result that fits, as predicted; the plan itself if none fits."""
    fitting = []
    for plans in same_results(fit.plan):
        num_fitting = bisect_left(plans, True, key=lambda plan: fit.changed_to(plan, predict).verdict != "fits")
        fitting += [fit.changed_to(plans[num_fitting - 1], predict)] if num_fitting else []
    return min(fitting, key=lambda each: each.relative_time(), default=fit)


def same_results(plan: Plan) -> list[list[Plan]]:
    """The plan with every micro-batch of the same result, from the least memory up: without gradient checkpointing, and
    with it if the plan has it."""
    sizes = [size for size in range(1, plan.samples_per_step + 1) if plan.samples_per_step % size == 0]
    return [
        [plan.with_micro_batch(size).with_memory(gradient_checkpointing=checkpointing) for size in sizes]
        for checkpointing in {False, plan.memory.gradient_checkpointing}
    ]


def step_seconds(plan: Plan, prediction: Prediction, tflops: float, *, length: float = 1.0) -> float:
    """Time of a step on a card: that of its arithmetic, or of its operators if the core that calls them needs longer.

    tflops: the card's peak. length: mean length of samples, relative to those of the batch that is predicted.
    """
    calibration = load_calibration()
    arithmetic_s = prediction.flops * length / (tflops * 1e12 * calibration.share_of_peak.value)
    operators_s = prediction.operators * calibration.operator_us.value / 1e6
    return plan.schedule.grad_accumulation * max(arithmetic_s, operators_s)


def decide(fit: Fit, predict: Predict, how: str) -> Fit:
    """The plan to run: as it is; with `auto` the cheapest change of it that fits; with `fill` the fastest, if any.

    how: memory.fit. Raises UserError with the budget if none of that fits.
    """
    if how == "fill":
        fit = fastest_fit(fit, predict)
    if how == "off" or (how == "refuse" and fit.verdict != "does not fit"):
        return fit
    cheapest = cheapest_fit(fit, predict, fill=how == "fill")
    if how in ("auto", "fill") and cheapest.verdict != "does not fit":
        return cheapest
    raise UserError(refusal(fit, cheapest))


def fitting_batch_size(
    wanted: int | Literal["auto"],
    predict: Callable[[int], Prediction],
    capacity_bytes: int | None,
) -> int:
    """The generation batch size: the profile's, or with `auto` the largest power of two that is predicted to fit.

    predict: memory of a batch of that size; 1 is not predicted.
    """
    if wanted != "auto":
        return wanted
    assert capacity_bytes is not None, "params.yaml is refused if it names no GPU"

    def does_not_fit(exponent: int) -> bool:
        return predict(1 << exponent).verdict(capacity_bytes) != "fits"

    return 1 << bisect_left(range(1, MAX_BATCH_SIZE.bit_length()), True, key=does_not_fit)


def refusal(fit: Fit, cheapest: Fit) -> str:
    plan, count = fit.plan, fit.plan.device.count
    share = f"the share of each of {count} processes in " if count > 1 else ""
    device = "the GPU" if plan.on_gpu else f"{share}the memory of this machine, the CPU"
    flag = f"add to the command, as in dvc exp run -S ++profiles.{plan.profile}.memory.fit"
    lines = [
        f"recipe {plan.name} does not fit {device} of profile {plan.profile}:",
        *fit.prediction.lines(fit.capacity_bytes),
        advice(cheapest),
        *([f"take that change: {flag}=auto"] if cheapest.verdict != "does not fit" else []),
        f"run it as it is: {flag}=off",
    ]
    return "\n  ".join(lines)


def advice(cheapest: Fit) -> str:
    """The change that would make a plan fit. cheapest: from `cheapest_fit`."""
    least = f"{', '.join(cheapest.changes) or 'no change'}: {gib_text(cheapest.prediction.total_bytes)} GiB"
    if cheapest.verdict != "does not fit":
        return f"it {'fits' if cheapest.verdict == 'fits' else 'might just fit'} with {least}"
    return f"no change that keeps its result makes it fit; the least is with {least}"


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Time of a training, or without data of one of its steps, by card; energy and cost on the card that is named.

    Arithmetic and operators of a step are counted (`step_seconds`). Loading, checkpoints, features of images and
    evaluation are not in it.
    """

    num_steps: int | None
    step_flops: float
    """Arithmetic of a step on one device, for samples of mean length; without data, for the largest."""
    step_operators: float
    hours: dict[str, float]
    kwh: float | None
    """Upper bound: every device at the largest power of its board."""
    cost: float | None
    """Cost by the prices of params.yaml; None without one."""

    def __str__(self) -> str:
        times = ", ".join(f"{card} {time_text(hours)}" for card, hours in self.hours.items())
        what = f"{self.num_steps:,} steps" if self.num_steps else "no data yet: a step"
        calibration = load_calibration()
        speeds = f"{calibration.share_of_peak.value:.0%} of peak or {calibration.operator_us.value:.0f} us an operator"
        used = "" if self.kwh is None else f"; at most {self.kwh:.2g} kWh"
        price = "" if self.cost is None else f"; costs {self.cost:.2f} by params.yaml"
        work = f"{self.step_flops / 1e12:,.1f} TFLOP in {self.step_operators:,.0f} operators"
        return f"{what} of {work}, at {speeds}: {times}{used}{price}"


def duration(fit: Fit, lengths: Sequence[int], prices: PriceParams) -> Duration | None:
    """The time of training a plan on its card, or on every card of its size; None if there is none, or in fp32.

    lengths: of the training samples in tokens, the longest first; none without data.
    """
    plan, schedule, device = fit.plan, fit.plan.schedule, fit.plan.device
    cards = cards_for(device, plan.memory.precision)
    if not plan.on_gpu or plan.memory.precision == "fp32" or not cards:
        return None
    length, num_steps = relative_length(plan, lengths), schedule.num_steps if lengths else None
    steps_h = (num_steps or 1) / 3600
    hours = {card.name: steps_h * step_seconds(plan, fit.prediction, card.tflops, length=length) for card in cards}
    kwh = cost = None
    if device.card:
        gpu_hours = hours[cards[0].name] * device.total
        kwh = gpu_hours * cards[0].watts / 1000
        if prices != PriceParams():
            cost = gpu_hours * (prices.gpu_hour or 0) + kwh * (prices.kwh or 0)
    return Duration(
        num_steps=num_steps,
        step_flops=fit.prediction.flops * schedule.grad_accumulation * length,
        step_operators=fit.prediction.operators * schedule.grad_accumulation,
        hours=hours,
        kwh=kwh,
        cost=cost,
    )


def computed_length(plan: Plan, lengths: Sequence[int]) -> float:
    """Mean tokens of a sample as it is computed, with the padding of one drawn order."""
    if plan.padding_free:
        return fmean(lengths)
    drawn, size, computed = random.Random(0).sample(range(len(lengths)), len(lengths)), plan.memory.micro_batch, 0
    for step in sorted_steps(drawn, lengths, plan.recipe.effective_batch):
        computed += sum(lengths[step[start]] * len(step[start : start + size]) for start in range(0, len(step), size))
    return computed / len(lengths)


def relative_length(plan: Plan, lengths: Sequence[int]) -> float:
    """`computed_length`, relative to that of the predicted batch of the longest samples; 1 without data."""
    longest = lengths[: plan.memory.micro_batch]
    return computed_length(plan, lengths) / computed_length(plan, longest) if lengths else 1.0


def time_text(hours: float) -> str:
    """Two digits, of hours one behind the point."""
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{hours * 60:.2g} min" if hours >= 1 / 60 else f"{hours * 3600:.2g} s"
