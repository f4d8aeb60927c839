"""Private parts of transformers, for transformers 5.23.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer


def on_device(trainer: Trainer, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A batch on the trainer's device."""
    return dict(trainer._prepare_inputs(dict(inputs)))  # noqa: SLF001
