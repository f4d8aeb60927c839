"""A run's card: the light files that a report needs of it, below the report of its task.

A report depends on one folder of cards, so that a new recipe joins its comparison without being listed anywhere.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from stages.core.lineage import LINEAGE_FILE
from stages.core.publish import published

MODEL_LINEAGE_FILE = "model_lineage.json"
"""The lineage of the model evaluated. Not under its own name: that would say what is in the card."""

CARD_FILES = (
    "merge.json",
    "metrics.json",
    "examples",
    "plan.yaml",
    "predictions.parquet",
    "training/plots/metrics/train/loss.tsv",
    "training/training.json",
)
"""Of a run folder; a baseline has no plan and no training."""


def cards_dir(data_dir: Path, task: str) -> Path:
    return data_dir / "report" / task / "runs"


def write_card(run_dir: Path, card_dir: Path, *, model_dir: Path) -> None:
    """Copy what a report needs of a run, in the run folder's own layout, and the lineage of the model evaluated."""
    with published(card_dir) as folder:
        shutil.copyfile(model_dir / LINEAGE_FILE, folder / MODEL_LINEAGE_FILE)
        for name in CARD_FILES:
            source, target = run_dir / name, folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target)
            elif source.exists():
                shutil.copyfile(source, target)
