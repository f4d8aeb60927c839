"""How good the answers are: figures, rows and pictures."""

from stages.tasks.chat.scoring.metrics import PREDICTIONS, candidates, score, summary
from stages.tasks.chat.scoring.pictures import draw_prediction, ordered_by

__all__ = ["PREDICTIONS", "candidates", "draw_prediction", "ordered_by", "score", "summary"]
