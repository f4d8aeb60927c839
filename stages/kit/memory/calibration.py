"""calibration.yaml: the constants of a prediction of memory, each with its source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stages.kit.errors import UserError

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
    try:
        raw = YAML(typ="safe", pure=True).load(path)
        # JSON mode is strict about types, yet takes 1 for 1.0, as a person writing YAML does.
        calibration = TypeAdapter(Calibration).validate_json(json.dumps(raw, default=str), strict=True)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    except ValidationError as error:
        raise _refusal(path, [_problem(details) for details in error.errors()]) from None
    if problems := list(_contradictions(calibration)):
        raise _refusal(path, problems)
    return calibration


def _label(constants: tuple[Constant, ...]) -> str:
    sources = dict.fromkeys(constant.measured for constant in constants)
    return ASSUMED if ASSUMED in sources else "; ".join(sources)


def _refusal(path: Path, problems: list[str]) -> UserError:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return UserError(f"{path} has {count}:\n" + "\n".join(f"  {problem}" for problem in problems))


def _problem(details: Any) -> str:
    where = ".".join(map(str, details["loc"])) or "the file"
    if "unexpected_keyword" in details["type"]:
        known = [field.name for field in fields(Calibration if len(details["loc"]) == 1 else Constant)]
        match = get_close_matches(str(details["loc"][-1]), known, n=1)
        return f"{where}: unknown key" + (f" (did you mean {match[0]!r}?)" if match else "")
    if "missing" in details["type"]:
        return f"{where}: missing"
    return f"{where}: {details['msg'][0].lower()}{details['msg'][1:]}, found {details['input']!r}"


def _contradictions(calibration: Calibration) -> Iterator[str]:
    """Values that are no such thing as their name says."""
    for field in fields(calibration):
        constant: Constant = getattr(calibration, field.name)
        value = constant.value
        if constant.unit != (unit := _unit(field.name)):
            yield f"{field.name}.unit: {unit} was expected, found {constant.unit}"
        if field.name.endswith("_low"):
            expected, right = "above -1 and at most 0", -1 < value <= 0
        elif field.name.endswith("_high"):
            expected, right = "at least 0", value >= 0
        elif field.name.startswith("usable_share"):
            expected, right = "above 0 and at most 1", 0 < value <= 1
        else:
            expected, right = "above 0", value > 0
        if not right:
            yield f"{field.name}.value: {expected} was expected, found {value:g}"


def _unit(name: str) -> str:
    suffixes = {"_mib": "MiB", "_gb": "GB", "_workspaces": "count"}
    return next((unit for suffix, unit in suffixes.items() if name.endswith(suffix)), "share")
