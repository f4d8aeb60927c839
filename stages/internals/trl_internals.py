"""Private parts of TRL, for trl 1.16.0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from trl import SFTTrainer
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_trainer


def has_triton() -> bool:
    """Whether TRL's fused loss found Triton, without which it does not run on a GPU."""
    return bool(chunked_logprob._TRITON_AVAILABLE)


def scoring_answers_only() -> AbstractContextManager[Any]:
    """In the block the fused loss scores tokens with a label alone, as on a GPU; on a CPU it would score them all
    (trl/trainer/utils.py: a compiler may want one shape, but nothing is compiled here)."""
    return patch.object(trl_trainer, "_use_triton", lambda _: True)


def launch_where_tensors_are() -> None:
    """Guard both kernels of the fused loss (trl/kernels/chunked_logprob.py), forward and backward, in this process."""
    for name in ("_forward_kernel", "_backward_kernel"):
        setattr(chunked_logprob, name, GuardedKernel(getattr(chunked_logprob, name)))


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


def note_metric(trainer: SFTTrainer, name: str, value: float) -> None:
    """Add a value to those that the next line of the log has the mean of."""
    trainer._metrics["train"][name].append(value)


def metric_sums(trainer: SFTTrainer) -> dict[str, Any]:
    """SFTTrainer's sums for its next line of metrics."""
    metrics = {name: [*values] for name, values in trainer._metrics["train"].items()}
    return {"metrics": metrics, "tokens": trainer._total_train_tokens}


def set_metric_sums(trainer: SFTTrainer, sums: Mapping[str, Any]) -> None:
    trainer._metrics["train"].clear()
    trainer._metrics["train"].update(sums["metrics"])
    trainer._total_train_tokens = sums["tokens"]


def set_token_count(trainer: SFTTrainer, tokens: int) -> None:
    """The tokens that the training has seen so far."""
    trainer._total_train_tokens = tokens
    trainer._metrics["train"]["num_tokens"] = [tokens]


LOSS_TILE: int = trl_trainer._CHUNKED_LOGPROB_CHUNK_SIZE
"""Width of the logits that the fused loss computes at once, however small the vocabulary is."""


class NoKernel:
    """A kernel that is launched over a grid and allocates nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


def _add_in_place(total: torch.Tensor, rows: torch.Tensor, others: torch.Tensor) -> None:
    """A product of the same size that allocates nothing, as CUDA's writes fp32 sums of 16-bit factors in place."""
    total = total.view(rows.dtype)[..., : others.shape[-1]]
    torch.addmm(total, rows, others, out=total)


def loss_allocates_as_on_gpu() -> AbstractContextManager[Any]:
    """In the block the fused loss of CPU tensors allocates what it does on a GPU, and computes nothing.

    There Triton scores a tile of logits in place; elsewhere many steps take a tile each. Triton need not be installed.
    """
    return patch.multiple(
        chunked_logprob,
        create=True,
        _forward_kernel=NoKernel(),
        _backward_kernel=NoKernel(),
        _addmm_fp32=_add_in_place,
        _use_triton=lambda _: True,
        triton=SimpleNamespace(cdiv=lambda *_: 0),  # sizes of grids
    )
