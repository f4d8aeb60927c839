"""What a model is asked, and how it is to answer."""

from stages.tasks.moe.samples.questions import check, conversation, probes
from stages.tasks.moe.samples.records import domain, read_split

__all__ = ["check", "conversation", "domain", "probes", "read_split"]
