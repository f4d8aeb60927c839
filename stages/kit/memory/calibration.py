"""calibration.yaml: the constants of a prediction of memory, each with its source."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from stages.core.documents import read_settings, refusal

ASSUMED = "assumed"
SHIPPED_PATH = Path(__file__).with_name("calibration.yaml")

_strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, config=_strict)
class Constant:
    value: float
    unit: Literal["MiB", "GB", "share", "count"]
    measured: Annotated[str, Field(pattern=r"^(assumed|\S.*, \d{4}-\d{2}-\d{2})$")]
    """`assumed`, or device and day."""
    why: Annotated[str, Field(min_length=1)]
    """Where the value comes from."""

    @property
    def num_bytes(self) -> int:
        """Of a constant in MiB."""
        assert self.unit == "MiB", self.unit
        return round(self.value * 2**20)


@dataclass(frozen=True, kw_only=True, config=_strict)
class Calibration:
    """What each is, calibration.yaml says."""

    context_mib: Constant
    cublas_workspace_mib: Constant
    cublas_workspace_hopper_mib: Constant
    cublas_workspaces: Constant
    nccl_buffers_mib: Constant
    usable_share: Constant
    usable_share_large: Constant
    large_card_gb: Constant
    allocated_error_low: Constant
    allocated_error_high: Constant
    reserved_error_low: Constant
    reserved_error_high: Constant

    @property
    def label(self) -> str:
        """`assumed` where a constant that decides a prediction is; else what they were measured on.

        The sizes of workspaces are torch's defaults, and what a card offers is no part of a prediction: neither counts.
        """
        return _label((self.context_mib, *self._errors))

    @property
    def ddp_label(self) -> str:
        """The same for a run of several processes, ddp or sharded, which NCCL's buffers decide too."""
        return _label((self.context_mib, self.nccl_buffers_mib, *self._errors))

    @property
    def _errors(self) -> tuple[Constant, ...]:
        return (
            *(self.allocated_error_low, self.allocated_error_high),
            *(self.reserved_error_low, self.reserved_error_high),
        )


def load_calibration(path: Path = SHIPPED_PATH) -> Calibration:
    """Raises UserError with every problem found, each under its dotted path."""
    calibration = read_settings(Calibration, path)
    if found := _contradictions(calibration):
        raise refusal(path, found)
    return calibration


def _label(constants: tuple[Constant, ...]) -> str:
    sources = dict.fromkeys(constant.measured for constant in constants)
    return ASSUMED if ASSUMED in sources else "; ".join(sources)


def _contradictions(calibration: Calibration) -> dict[str, str]:
    """Values that are no such thing as their name says, by dotted path."""
    found = {}
    for field in fields(calibration):
        constant: Constant = getattr(calibration, field.name)
        value = constant.value
        if constant.unit != (unit := _unit(field.name)):
            found[f"{field.name}.unit"] = f"{unit} was expected, found {constant.unit}"
        if field.name.endswith("_low"):
            expected, right = "above -1 and at most 0", -1 < value <= 0
        elif field.name.endswith("_high"):
            expected, right = "at least 0", value >= 0
        elif field.name.startswith("usable_share"):
            expected, right = "above 0 and at most 1", 0 < value <= 1
        else:
            expected, right = "above 0", value > 0
        if not right:
            found[f"{field.name}.value"] = f"{expected} was expected, found {value:g}"
    return found


def _unit(name: str) -> str:
    suffixes = {"_mib": "MiB", "_gb": "GB", "_workspaces": "count"}
    return next((unit for suffix, unit in suffixes.items() if name.endswith(suffix)), "share")
