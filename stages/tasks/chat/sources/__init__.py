"""Where conversations come from: files of messages, or the hub."""

from stages.tasks.chat.sources.preparation import Reader, read

__all__ = ["Reader", "read"]
