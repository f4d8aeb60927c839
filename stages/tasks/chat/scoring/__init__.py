"""How good the answers are: figures, rows and pictures."""

from stages.tasks.chat.scoring.metrics import PREDICTIONS, candidates, score, summary
from stages.tasks.chat.scoring.pictures import write_pictures

__all__ = ["PREDICTIONS", "candidates", "score", "summary", "write_pictures"]
