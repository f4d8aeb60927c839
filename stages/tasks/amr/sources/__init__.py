"""Where AMR data comes from: a folder of text files, or a grammar."""

from stages.tasks.amr.sources.preparation import prepare

__all__ = ["prepare"]
