"""How good the answers are: figures, rows and pictures."""

from stages.tasks.moe.scoring.metrics import PREDICTIONS, candidates, check, score, summary
from stages.tasks.moe.scoring.pictures import write_pictures

__all__ = ["PREDICTIONS", "candidates", "check", "score", "summary", "write_pictures"]
