"""How good the answers are: figures, rows and pictures."""

from stages.tasks.moe.scoring.metrics import PREDICTIONS, candidates, score, summary
from stages.tasks.moe.scoring.pictures import write_pictures

__all__ = ["PREDICTIONS", "candidates", "score", "summary", "write_pictures"]
