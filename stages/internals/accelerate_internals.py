"""Parts of accelerate that its interface does not offer, for accelerate 1.15.0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn


def use_fp16_on_cpu(accelerator: Accelerator) -> None:
    """Autocast and a gradient scaler on a CPU too: accelerate enables fp16 on GPUs only, without a warning."""
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu")


def set_last_batch(accelerator: Accelerator, remainder: int) -> None:
    """Tell the active data loader how many samples its last batch has (0: as many as the others).

    A loader that begins after skipped batches does not know it, and accelerate counts on it.
    """
    loader = accelerator.gradient_state.active_dataloader
    if loader is not None:
        loader.remainder = remainder


@contextmanager
def hooks_kept(model: nn.Module) -> Iterator[None]:
    """A `forward` that is set on a module in the block goes below accelerate's hook on it, instead of replacing it.

    A model with layers on several GPUs has hooks, and each of them holds the `forward` that it found.
    """
    hooks = {module: vars(module)["forward"] for module in model.modules() if "_old_forward" in vars(module)}
    yield
    for module, hook in hooks.items():
        if module.forward is not hook:
            vars(module).update(_old_forward=module.forward, forward=hook)


def reset_accelerator() -> None:
    """Forget the settings that accelerate keeps from a process's first trainer, its precision among them."""
    AcceleratorState._reset_state(reset_partial_state=True)
