"""Where conversations come from: files of messages, or the hub."""

from stages.tasks.chat.sources.preparation import prepare

__all__ = ["prepare"]
