"""Whether a plan fits its GPU, and the least that would have to change where it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from stages.core.errors import UserError
from stages.kit.memory.budget import budget_lines, verdict
from stages.kit.planning.ladder import changes_between, rungs, settings, sharded_over
from stages.kit.planning.memory_record import GpuRecord, MemoryRecord, in_gib
from stages.kit.planning.plan import Plan
from stages.kit.planning.prediction import Budget, Prediction, Verdict

Predict: TypeAlias = Callable[[Plan], Prediction]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A plan, what it takes, and how it came about."""

    plan: Plan
    prediction: Prediction
    capacity_bytes: int | None
    """What can be used of the device; None where that is not known, and so nothing is refused."""
    changes: tuple[str, ...] = ()
    """What differs from the plan that was asked for, e.g. "micro_batch 16 -> 4"."""

    @property
    def verdict(self) -> Verdict | None:
        return None if self.capacity_bytes is None else verdict(self.prediction, self.capacity_bytes)

    @property
    def gpus(self) -> tuple[Fit, ...]:
        """The same of each GPU, where layers are spread over several."""
        return tuple(replace(self, prediction=gpu) for gpu in self.prediction.gpus)

    def record(self, evaluation: Fit) -> MemoryRecord:
        """evaluation: how the same plan's evaluation fits."""
        prediction, device = self.prediction, self.plan.device
        of_this_machine = device.kind == "cpu" and device.memory_gb is None
        return MemoryRecord(
            verdict=self.verdict or "unknown",
            allocated_gib=in_gib(prediction.allocated_bytes),
            reserved_gib=in_gib(prediction.reserved_bytes),
            total_gib=in_gib(prediction.total_bytes),
            low_gib=in_gib(prediction.low_bytes),
            high_gib=in_gib(prediction.high_bytes),
            usable_gib=None if self.capacity_bytes is None or of_this_machine else in_gib(self.capacity_bytes),
            peak_phase=prediction.peak_phase,
            phases_gib={phase: in_gib(size) for phase, size in prediction.phases.items()},
            budget_gib={entry: in_gib(size) for entry, size in prediction.budget.items()},
            calibration=prediction.calibration,
            changes=list(self.changes),
            evaluation_verdict=evaluation.verdict or "unknown",
            evaluation_gib=in_gib(evaluation.prediction.total_bytes),
            gpus={
                str(number): GpuRecord(
                    verdict=gpu.verdict or "unknown",
                    total_gib=in_gib(gpu.prediction.total_bytes),
                    peak_phase=gpu.prediction.peak_phase,
                    budget_gib={entry: in_gib(size) for entry, size in gpu.prediction.budget.items()},
                )
                for number, gpu in enumerate(self.gpus)
            },
        )

    def lines(self) -> list[str]:
        return budget_lines(self.prediction, self.capacity_bytes)


def fit_of(plan: Plan, predict: Predict, capacity_bytes: int | None) -> Fit:
    """The plan as it is."""
    return Fit(plan=plan, prediction=predict(plan), capacity_bytes=capacity_bytes)


def cheapest_fit(fit: Fit, predict: Predict) -> Fit:
    """The first plan down the ladder that fits; where none does, the first that might; else the last there is."""
    asked, might = fit.plan, None
    for rung in rungs(fit.plan):
        if fit.verdict in (None, "fits"):
            return fit
        if fit.verdict == "too close":
            might = might or fit
        fit = Fit(
            plan=rung.plan,
            prediction=predict(rung.plan),
            capacity_bytes=fit.capacity_bytes,
            changes=changes_between(asked, rung.plan),
        )
    return fit if fit.verdict == "fits" else might or fit


def decide(fit: Fit, predict: Predict, how: str) -> Fit:
    """What is to be run: the plan, or with `auto` the cheapest change of it that fits.

    how: memory.fit. Raises UserError with the budget where nothing of that fits.
    """
    if how == "off" or fit.verdict != "does not fit":
        return fit if how != "auto" else cheapest_fit(fit, predict)
    cheapest = cheapest_fit(fit, predict)
    if how == "auto" and cheapest.verdict != "does not fit":
        return cheapest
    raise UserError(refusal(fit, cheapest, predict))


def refusal(fit: Fit, cheapest: Fit, predict: Predict) -> str:
    plan = fit.plan
    gpu = f"GPU {fit.prediction.fullest_gpu}" if fit.prediction.gpus else "the GPU"
    count = plan.device.count
    share = f"the share of each of {count} processes in " if count > 1 else ""
    device = gpu if plan.device.kind == "cuda" else f"{share}the memory of this machine, the CPU"
    lines = [f"recipe {plan.recipe} does not fit {device} of profile {plan.profile}:", *fit.lines()]
    lines.append(advice(cheapest))
    if cheapest.verdict == "does not fit" and (sharded := sharded_fit(cheapest, predict)) is not None:
        lines.append(sharded_advice(sharded))
    if cheapest.verdict != "does not fit":
        lines.append(f"take that: add to the command, as in dvc exp run -S profiles.{plan.profile}.memory.fit=auto")
    lines.append(f"run it as it is: add to the command, as in dvc exp run -S profiles.{plan.profile}.memory.fit=off")
    return "\n  ".join(lines)


MORE_DEVICES = (2, 4, 8)
"""As machines have them."""
SHARED_OUT: tuple[Budget, ...] = ("weights", "adapters", "gradients", "optimizer")


def sharded_fit(cheapest: Fit, predict: Predict) -> Fit | None:
    """Over the fewest GPUs that a plan fits if it is sharded over them, where nothing on its own ladder helps.

    cheapest: the last of that ladder. None where no machine's GPUs would do, or sharding is none for it.
    """
    plan, spent = cheapest.plan, cheapest.prediction.budget
    if plan.device.kind != "cuda" or cheapest.capacity_bytes is None:
        return None
    shared_out = sum(spent.get(entry, 0) for entry in SHARED_OUT)
    if cheapest.prediction.total_bytes - shared_out > cheapest.capacity_bytes:
        return None  # what every process needs for itself is too much already
    for count in MORE_DEVICES:
        if count > plan.device.count and (over_more := sharded_over(plan, count)) is not None:
            fit = fit_of(over_more, predict, cheapest.capacity_bytes)
            if fit.verdict == "fits":
                return fit
    return None


def sharded_advice(fit: Fit) -> str:
    """fit: as `sharded_fit` found it."""
    changed = ", ".join(f"{name} {value}" for name, value in settings(fit.plan).items())
    return (
        f"on {fit.plan.device.count} such GPUs it fits with memory.placement sharded ({changed}): "
        f"{fit.prediction.total_bytes / 2**30:.2f} GiB each"
    )


def advice(cheapest: Fit) -> str:
    """What would make a plan fit, on one line. cheapest: as `cheapest_fit` found it."""
    if cheapest.verdict == "does not fit":
        return f"nothing that keeps its result would make it fit; the least is with {said(cheapest)}"
    return f"it {'fits' if cheapest.verdict == 'fits' else 'might just fit'} with {said(cheapest)}"


def said(fit: Fit) -> str:
    """The changes and what it then takes, on one line."""
    return f"{', '.join(fit.changes) or 'no change'}: {fit.prediction.total_bytes / 2**30:.2f} GiB"
