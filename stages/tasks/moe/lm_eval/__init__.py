"""What lm-evaluation-harness is to score: the prepared questions as its documents, its tasks beside this file."""

from stages.tasks.moe.lm_eval.documents import documents
from stages.tasks.moe.lm_eval.figures import FIGURES, TASKS_DIR

__all__ = ["FIGURES", "TASKS_DIR", "documents"]
