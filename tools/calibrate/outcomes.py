"""What came of each setting: kept line by line as it is measured, compared with the prediction, made into bounds."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.kit.planning.prediction import Prediction
from tools.calibrate.measured import DeviceFacts, Measured
from tools.lines import append_line, complete_lines

GIB = 2**30

MARGIN = 0.01
"""By how much a bound is wider than the worst error seen: the next setting is none of these."""
FLOOR = 0.02
"""No bound is narrower, however good the settings measured were."""

_strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, config=_strict)
class Forecast:
    """Two predictions of the same."""

    layers: tuple[int, int]
    """Of the language model and of the vision tower: all of them, or as many as the device holds."""
    scaled: Prediction
    """From records of a few layers, as the plan stage does it."""
    exact: Prediction
    """From a record of all layers."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class Outcome:
    setting: str
    forecast: Forecast | None = None
    measured: Measured | None = None
    problem: str = ""
    """Why something is missing: `out of memory`, `left out: ...` or `failed: ...`."""

    @property
    def is_final(self) -> bool:
        """Whether measuring again would be of no use."""
        return not self.problem.startswith("failed")


@dataclass(frozen=True, kw_only=True, config=_strict)
class Session:
    """A device, and what came of each setting on it so far. One line of JSON each."""

    facts: DeviceFacts
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Session | None:
        """None where there is no such file. Of several lines on a setting the last one counts, and an unfinished last
        line does not.

        Raises UserError for a damaged one.
        """
        if not (all_lines := complete_lines(path)):
            return None
        first, *lines = all_lines
        try:
            outcomes = [TypeAdapter(Outcome).validate_json(line) for line in lines]
            facts = TypeAdapter(DeviceFacts).validate_json(first)
        except (ValueError, ValidationError) as error:
            raise UserError(f"{path} is damaged: {error}; begin anew by: rm {path}") from None
        return cls(facts=facts, outcomes={outcome.setting: outcome for outcome in outcomes})

    @classmethod
    def begin(cls, facts: DeviceFacts, path: Path) -> Session:
        """The session that is in the file already, or a new one. Raises UserError where it is of another device."""
        session = cls.read(path)
        if session is None:
            append_line(json.dumps(asdict(facts)), path)
            return cls(facts=facts)
        there, here = ((each.name, each.versions) for each in (session.facts, facts))
        if there != here:
            raise UserError(
                f"{path} was measured on {there[0]} with {there[1]}, and this is {here[0]} with {here[1]}; "
                f"begin anew by: rm {path}"
            )
        return session

    def keep(self, outcome: Outcome, path: Path) -> None:
        append_line(json.dumps(asdict(outcome)), path)
        self.outcomes[outcome.setting] = outcome

    def context_bytes(self) -> int:
        """In use beside torch's allocator while a model is trained; the median, as kernels differ by setting."""
        beside = [
            outcome.measured.total_bytes - outcome.measured.reserved_bytes
            for outcome in self.outcomes.values()
            if outcome.measured is not None
        ]
        return round(median(beside)) if beside else self.facts.context_bytes


@dataclass(frozen=True, kw_only=True, config=_strict)
class Comparison:
    """Predicted and measured bytes of one setting, by amount: allocated, reserved, total."""

    setting: str
    layers: tuple[int, int]
    predicted: dict[str, int]
    """Scaled up, as the plan stage does it."""
    exact: dict[str, int]
    measured: dict[str, int]

    def error(self, amount: str) -> float:
        """0.03 for a prediction that is 3 % above what was measured."""
        return self.predicted[amount] / self.measured[amount] - 1

    def exact_error(self, amount: str) -> float:
        return self.exact[amount] / self.measured[amount] - 1

    def excess(self, amount: str) -> tuple[float, float]:
        """How far what was measured lies above the predictions, relative to them: the lower and the higher."""
        both = [self.measured[amount] / predicted[amount] - 1 for predicted in (self.predicted, self.exact)]
        return min(both), max(both)


AMOUNTS = ("allocated", "reserved", "total")

_COLUMNS = (("predicted", 11), ("measured", 9), ("error", 8), ("exact", 7))


def comparisons(session: Session) -> list[Comparison]:
    context_bytes = session.context_bytes()

    def amounts(prediction: Prediction) -> dict[str, int]:
        allocated, reserved = prediction.allocated_bytes, prediction.reserved_bytes
        return dict(zip(AMOUNTS, (allocated, reserved, reserved + context_bytes), strict=True))

    return [
        Comparison(
            setting=outcome.setting,
            layers=outcome.forecast.layers,
            predicted=amounts(outcome.forecast.scaled),
            exact=amounts(outcome.forecast.exact),
            measured={
                "allocated": outcome.measured.allocated_bytes,
                "reserved": outcome.measured.reserved_bytes,
                "total": outcome.measured.total_bytes,
            },
        )
        for outcome in session.outcomes.values()
        if outcome.forecast is not None and outcome.measured is not None
    ]


def table_lines(session: Session) -> list[str]:
    """A line a setting; of each amount predicted and measured GiB, the error, and that of the exact prediction."""
    compared = {comparison.setting: comparison for comparison in comparisons(session)}
    width = max((len(name) for name in session.outcomes), default=0)
    amounts = "".join(f"{amount:>35}" for amount in AMOUNTS)
    columns = "".join(f"{column:>{width}}" for _ in AMOUNTS for column, width in _COLUMNS)
    lines = [f"{'':{width}}        {amounts}", f"{'setting':{width}}  layers{columns}"]
    for name, outcome in session.outcomes.items():
        if name not in compared:
            lines.append(f"{name:{width}}  {outcome.problem}")
            continue
        comparison = compared[name]
        cells = "".join(
            f"{comparison.predicted[amount] / GIB:11.3f}{comparison.measured[amount] / GIB:9.3f}"
            f"{comparison.error(amount):+8.1%}{comparison.exact_error(amount):+7.1%}"
            for amount in AMOUNTS
        )
        layers = "+".join(str(count) for count in comparison.layers if count)
        retries = outcome.measured.num_retries if outcome.measured is not None else 0
        lines.append(f"{name:{width}}  {layers:>6}{cells}" + (f"  {retries} retries" if retries else ""))
    return lines


def summary_lines(session: Session) -> list[str]:
    compared = comparisons(session)
    lines = []
    for amount in AMOUNTS if compared else ():
        errors = [abs(comparison.error(amount)) for comparison in compared]
        lines.append(f"{amount}: median error {median(errors):.1%}, worst {max(errors):.1%} of {len(errors)} settings")
    lines += [
        f"predicted to fit, and did not: {outcome.setting}"
        for outcome in session.outcomes.values()
        if outcome.problem == "out of memory"
    ]
    return lines


def bounds(compared: Sequence[Comparison]) -> dict[str, float]:
    """Each bound of calibration.yaml: the worst that was seen, widened, and the floor at least.

    The total's errors count with the reserved ones. In thousandths, rounded outward.
    """
    assert compared
    values = {}
    for name, amounts in (("allocated", ("allocated",)), ("reserved", ("reserved", "total"))):
        seen = [side for comparison in compared for amount in amounts for side in comparison.excess(amount)]
        low, high = min(min(seen) - MARGIN, -FLOOR), max(max(seen) + MARGIN, FLOOR)
        values[f"{name}_error_low"] = math.floor(round(low * 1000, 6)) / 1000
        values[f"{name}_error_high"] = math.ceil(round(high * 1000, 6)) / 1000
    return values


def measured_constants(session: Session) -> dict[str, float]:
    """What the session says of calibration.yaml's constants.

    A stage asks for workspaces of 32 MiB on every card (CUBLAS_WORKSPACE_CONFIG=:4096:8), which is also the default
    from compute capability 9.0 on: only there the size is one of the constants.
    """
    facts = session.facts
    values: dict[str, float] = {}
    if context_bytes := session.context_bytes():
        values["context_mib"] = round(context_bytes / 2**20, 1)
    if facts.workspaces:
        values["cublas_workspaces"] = facts.workspaces
        if facts.capability >= (9, 0):
            values["cublas_workspace_hopper_mib"] = round(facts.workspace_bytes / 2**20, 3)
    return values


def recalibrated(text: str, values: Mapping[str, float], measured: str) -> str:
    """calibration.yaml with these values in place of its own; comments, reasons and all else as they were.

    measured: device, versions and day.
    """
    yaml = YAML()
    yaml.width = 120
    yaml.preserve_quotes = True
    content: Any = yaml.load(text)
    for name, value in values.items():
        content[name]["value"] = int(value) if value == int(value) else value
        content[name]["measured"] = measured
    out = io.StringIO()
    yaml.dump(content, out)
    return out.getvalue()
