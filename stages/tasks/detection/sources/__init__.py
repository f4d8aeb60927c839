"""Where detection data comes from: the hub, or a folder."""

from stages.tasks.detection.sources.preparation import prepare

__all__ = ["prepare"]
