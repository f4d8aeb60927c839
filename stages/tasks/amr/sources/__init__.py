"""Where AMR data comes from: a folder of text files, or a grammar."""

from stages.tasks.amr.sources.preparation import read

__all__ = ["read"]
