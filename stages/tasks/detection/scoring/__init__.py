"""Names that the stages use."""

from stages.tasks.detection.scoring.drawing import draw_prediction
from stages.tasks.detection.scoring.metrics import PREDICTIONS, failure, ordered_by, score, summary

__all__ = ["PREDICTIONS", "draw_prediction", "failure", "ordered_by", "score", "summary"]
