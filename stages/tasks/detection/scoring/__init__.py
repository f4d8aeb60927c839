"""How good the answers are: figures, rows and pictures."""

from stages.tasks.detection.scoring.metrics import PREDICTIONS, score, summary
from stages.tasks.detection.scoring.pictures import draw_prediction, ordered_by

__all__ = ["PREDICTIONS", "draw_prediction", "ordered_by", "score", "summary"]
