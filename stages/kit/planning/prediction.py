"""What a run holds in its fullest moment, predicted before it is launched. All sizes are of one device, the fullest."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

Phase = Literal["load", "forward", "backward", "step"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Loading the weights, the two passes of a batch, and the optimizer's step."""

Budget = Literal["weights", "adapters", "gradients", "optimizer", "activations", "logits", "temporaries", "overhead"]
BUDGET: tuple[Budget, ...] = get_args(Budget)
"""What memory is spent on. logits: with the loss. temporaries: what lives for an instant within backward and step.
overhead: what torch's allocator keeps beyond what is asked of it, CUDA's context, and the workspaces of its libraries.
"""

_strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, config=_strict)
class Prediction:
    allocated_bytes: int
    """The peak of what tensors take, as torch.cuda.max_memory_allocated counts it."""
    reserved_bytes: int
    """The peak of what torch takes from the device for them, as torch.cuda.max_memory_reserved counts it."""
    total_bytes: int
    """With everything that the process holds on the device beside it, as nvidia-smi shows it."""
    low_bytes: int
    high_bytes: int
    """The interval that the total is expected in."""
    peak_phase: Phase
    """When the peak is reached."""
    phases: dict[Phase, int]
    """The peak of the allocated bytes in each phase."""
    budget: dict[Budget, int]
    """What the total is spent on in its fullest moment: sums to total_bytes."""
    calibration: str
    """What the constants were measured on, e.g. "NVIDIA H200, 2026-12-01"; or "assumed"."""
    gpus: tuple[Prediction, ...] = ()
    """One prediction per GPU where layers are spread over several; all other fields are those of the fullest."""

    @property
    def fullest_gpu(self) -> int:
        """Its index in `gpus`."""
        return max(range(len(self.gpus)), key=lambda gpu: self.gpus[gpu].total_bytes)

    def summary(self) -> str:
        spent = sorted(self.budget.items(), key=lambda entry: -entry[1])[:3]
        most = ", ".join(f"{entry} {size / 2**30:.2f}" for entry, size in spent)
        whose = f"memory of GPU {self.fullest_gpu}, the fullest of {len(self.gpus)}" if self.gpus else "memory"
        return f"{whose}: {self.total_bytes / 2**30:.2f} GiB expected, most in {self.peak_phase}: {most}"


Verdict = Literal["fits", "too close", "does not fit"]
