"""How good the answers are: figures, rows and pictures."""

from stages.tasks.amr.scoring.metrics import PREDICTIONS, score, summary
from stages.tasks.amr.scoring.pictures import write_pictures

__all__ = ["PREDICTIONS", "score", "summary", "write_pictures"]
