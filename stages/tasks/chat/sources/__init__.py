"""Where conversations come from: files of messages, the hub, or a made-up shop."""

from stages.tasks.chat.sources.preparation import prepare

__all__ = ["prepare"]
