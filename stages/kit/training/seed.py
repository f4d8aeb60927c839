"""One seed for everything, and the deterministic algorithms that make it count."""

from __future__ import annotations

import torch
from transformers import set_seed


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, and refuse operations without a deterministic implementation.

    On CUDA this also needs CUBLAS_WORKSPACE_CONFIG=:4096:8 before the first kernel, which the launcher sets
    (https://docs.pytorch.org/docs/stable/notes/randomness.html).
    """
    set_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # On by default under deterministic algorithms: every torch.empty is filled with NaN, a fifth of a small model's
    # step. It guards against operations that read memory they never wrote, which none of a training step's does.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
