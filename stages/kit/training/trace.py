"""trace.csv: loss and gradient norm of every optimizer step, bit for bit; two runs part at the first row that differs.

Floats are written as `float.hex` does, which loses nothing and needs no rounding rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stages.core.errors import UserError
from stages.core.publish import publish_text

TRACE_FILE = "trace.csv"

HEADER = "step,loss,grad_norm"


class StepBits(NamedTuple):
    """What a step came to, as hexadecimal floats, e.g. "0x1.8000000000000p+1"."""

    loss: str
    """Of the first process's micro-batches, added up in fp32; before the step."""
    grad_norm: str
    """Of all that is trained, over all processes; before clipping."""

    @classmethod
    def of(cls, loss: float, grad_norm: float) -> StepBits:
        return cls(loss.hex(), grad_norm.hex())


def write_trace(trace: Sequence[StepBits], path: Path) -> None:
    rows = (f"{step},{bits.loss},{bits.grad_norm}" for step, bits in enumerate(trace, start=1))
    publish_text("\n".join((HEADER, *rows)) + "\n", path)


def read_trace(path: Path) -> list[StepBits]:
    """Raises UserError where it is missing or damaged."""
    try:
        header, *lines = path.read_text(encoding="utf-8").splitlines()
        rows = [line.split(",") for line in lines]
        trace = [StepBits.of(float.fromhex(loss), float.fromhex(grad_norm)) for _, loss, grad_norm in rows]
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"{path} is missing or damaged: {error}") from None
    if header != HEADER or [step for step, _, _ in rows] != [str(step) for step in range(1, len(rows) + 1)]:
        raise UserError(f"{path} is damaged: its rows are not {HEADER}, step by step")
    return trace
