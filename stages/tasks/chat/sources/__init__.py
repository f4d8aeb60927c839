"""Where conversations come from: files of messages, or the hub."""

from stages.tasks.chat.sources.preparation import Reader, prepare

__all__ = ["Reader", "prepare"]
