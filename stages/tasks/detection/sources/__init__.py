"""Names that the stages use."""

from stages.tasks.detection.sources.dataset import read
from stages.tasks.detection.sources.rows import Reader

__all__ = ["Reader", "read"]
