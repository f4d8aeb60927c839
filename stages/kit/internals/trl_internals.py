"""Private parts of TRL, for trl 1.16.0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from trl import SFTTrainer
from trl.kernels import chunked_logprob


def has_triton() -> bool:
    """Whether TRL's fused loss found Triton, without which it does not run on a GPU."""
    return bool(chunked_logprob._TRITON_AVAILABLE)  # noqa: SLF001


def launch_where_tensors_are() -> None:
    """Guard both kernels of the fused loss (trl/kernels/chunked_logprob.py), forward and backward, in this process."""
    for name in ("_forward_kernel", "_backward_kernel"):
        kernel = getattr(chunked_logprob, name)
        if not isinstance(kernel, GuardedKernel):
            setattr(chunked_logprob, name, GuardedKernel(kernel))


class GuardedKernel:
    """A Triton kernel that is launched on the device of its first argument, a tensor.

    Triton launches on the current device. With layers on several GPUs the head lies on the last one and the first is
    current: the launch fails, or, where the GPUs can read each other's memory, gives wrong numbers
    (triton-lang/triton#5205).
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with torch.cuda.device(tensor.device):
                return self.kernel[grid](tensor, *args, **kwargs)

        return launch


def metric_sums(trainer: SFTTrainer) -> dict[str, Any]:
    """SFTTrainer's sums for its next line of metrics."""
    return {"metrics": trainer._metrics["train"], "tokens": trainer._total_train_tokens}  # noqa: SLF001


def set_metric_sums(trainer: SFTTrainer, sums: Mapping[str, Any]) -> None:
    trainer._metrics["train"].clear()  # noqa: SLF001
    trainer._metrics["train"].update(sums["metrics"])  # noqa: SLF001
    trainer._total_train_tokens = sums["tokens"]  # noqa: SLF001


def set_token_count(trainer: SFTTrainer, tokens: int) -> None:
    """The tokens that the training has seen so far."""
    trainer._total_train_tokens = tokens  # noqa: SLF001
    trainer._metrics["train"]["num_tokens"] = [tokens]  # noqa: SLF001
