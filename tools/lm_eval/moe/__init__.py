"""What lm-evaluation-harness is to score: the prepared questions as its documents, its tasks beside this file."""

from tools.lm_eval.moe.documents import documents
from tools.lm_eval.moe.figures import FIGURES, TASKS_DIR

__all__ = ["FIGURES", "TASKS_DIR", "documents"]
