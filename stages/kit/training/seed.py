"""One seed for everything, the deterministic algorithms that make it count, and where the random numbers are."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from transformers import set_seed


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, and refuse operations without a deterministic implementation.

    cuBLAS chooses kernels by the size of its workspaces, which CUBLAS_WORKSPACE_CONFIG=:4096:8 makes the same on every
    card; the launcher sets it, as it has to be there before the first kernel.
    """
    set_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # On by default under deterministic algorithms: every torch.empty is filled with NaN, a fifth of a small model's
    # step. It guards against operations that read memory they never wrote, which none of a training step's does.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def random_state() -> dict[str, Any]:
    """Where Python's, NumPy's and torch's random numbers are, on the CPU and every GPU, as states.py can write it."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - what libraries draw from
    return {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Draw on from where `random_state` found them."""
    version, numbers, next_gauss = state["python"]
    random.setstate((version, tuple(numbers), next_gauss))
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
