"""How good the answers are: figures, rows and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.tasks.detection.metrics import PREDICTIONS, score
from stages.tasks.detection.pictures import write_pictures

__all__ = ["PREDICTIONS", "score", "summary", "write_pictures"]


def summary(metrics: Mapping[str, Any]) -> str:
    """The original experiment's figures in a line."""
    return (
        f"mean IoU {metrics['mean_iou']:.3f}, detection rate {metrics['detection_rate']:.0%}, "
        f"IoU>0.5 {metrics['iou_over_50']:.0%}, IoU>0.7 {metrics['iou_over_70']:.0%} of {metrics['samples']} samples"
    )
