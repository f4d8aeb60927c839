"""How good the answers are: figures, rows and pictures."""

from stages.tasks.moe.scoring.metrics import PREDICTIONS, candidates, check, score, summary
from stages.tasks.moe.scoring.pictures import draw_prediction, ordered_by

__all__ = ["PREDICTIONS", "candidates", "check", "draw_prediction", "ordered_by", "score", "summary"]
