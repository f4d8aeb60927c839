"""Where detection data comes from: the hub, a folder, or drawn packages."""

from stages.tasks.detection.sources.preparation import prepare

__all__ = ["prepare"]
