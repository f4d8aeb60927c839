"""What a model is asked, and how it is to answer."""

from stages.tasks.chat.samples.questions import check, conversation, probes
from stages.tasks.chat.samples.records import read_split

__all__ = ["check", "conversation", "probes", "read_split"]
