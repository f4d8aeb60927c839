"""Weights & Biases: where its runs are kept, what they are called, and what the Trainer has to know of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stages.core.params.schema import TrackingParams


def trainer_settings(tracking: TrackingParams, recipe: str) -> dict[str, Any]:
    """Trainer arguments for Weights & Biases; nothing is tracked where it is off."""
    if not tracking.wandb:
        return {"report_to": "none"}
    set_environment(tracking)
    return {"report_to": "wandb", "run_name": run_name(recipe)}


def set_environment(tracking: TrackingParams) -> None:
    """What wandb reads: everything that it keeps, what is still to be sent too, lies below the repository."""
    # Also when DVC runs an experiment in a clone that it throws away.
    runs_dir = Path(os.environ.get("DVC_ROOT", "."), ".bakeoff/tracking").absolute()  # wandb adds a folder of its name
    runs_dir.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "WANDB_DIR": str(runs_dir),
        "WANDB_DATA_DIR": str(runs_dir / "data"),  # artifacts, until they are sent
        "WANDB_CACHE_DIR": str(runs_dir / "cache"),
        "WANDB_MODE": tracking.wandb_mode,
        "WANDB_PROJECT": tracking.wandb_project,
    }


def run_name(name: str) -> str:
    """The name of a tracked run: what it is of, and the experiment."""
    experiment = os.environ.get("DVC_EXP_NAME")
    return f"{name}-{experiment}" if experiment else name
