"""Where detection data comes from: the hub, or a folder."""

from stages.tasks.detection.sources.preparation import read
from stages.tasks.detection.sources.rows import Reader

__all__ = ["Reader", "read"]
