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
