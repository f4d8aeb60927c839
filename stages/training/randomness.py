"""Random numbers of Python, NumPy and torch: their seed, and their state in a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from transformers import set_seed


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, and refuse operations without a deterministic implementation.

    cuBLAS chooses kernels by the size of its workspaces: CUBLAS_WORKSPACE_CONFIG=:4096:8 makes it the same on every
    card. The launcher sets that, before the first kernel.
    """
    set_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # On by default under deterministic algorithms: every torch.empty is filled with NaN, a fifth of a small model's
    # step. It guards against reading uninitialized memory, which no operation of a training step does.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def random_state() -> dict[str, Any]:
    """State of the random numbers of Python, NumPy and torch, on the CPU and every GPU, for `save_state`."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002 - libraries draw from it
    name, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
