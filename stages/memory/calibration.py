"""calibration.yaml: the constants of memory predictions, each with its source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.records import STRICT, read_settings

ASSUMED = "assumed"
SHIPPED_PATH = Path(__file__).with_name("calibration.yaml")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Constant:
    value: float
    measured: Annotated[str, Field(pattern=r"^(assumed|\S.*, \d{4}-\d{2}-\d{2})$")]
    """`assumed`, or device and day."""
    why: Annotated[str, Field(min_length=1)]
    """Source of the value."""

    @property
    def num_bytes(self) -> int:
        """For constants in MiB."""
        return round(self.value * 2**20)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Calibration:
    """calibration.yaml describes each constant; the end of its name is its unit, without one it is a share."""

    context_mib: Constant
    cublas_workspaces_mib: Constant
    nccl_buffers_mib: Constant
    share_of_peak: Constant
    operator_us: Constant
    reserved_error_low: Constant
    reserved_error_high: Constant
    process_mib: Constant
    malloc_share: Constant

    def label(self, *, several: bool) -> str:
        """Sources of the constants that decide a prediction on a GPU; `assumed` if one of them is.

        The workspaces' size is set by the stage, and time is no part of a prediction of memory: neither counts.
        several: for a run of several processes, ddp or sharded, NCCL's buffers count too.
        """
        deciding = (self.context_mib, *((self.nccl_buffers_mib,) if several else ()))
        sources = {each.measured: None for each in (*deciding, self.reserved_error_low, self.reserved_error_high)}
        return ASSUMED if ASSUMED in sources else "; ".join(sources)


def load_calibration(path: Path = SHIPPED_PATH) -> Calibration:
    """Raises UserError with every problem found, each under its dotted path."""
    return read_settings(Calibration, path)
