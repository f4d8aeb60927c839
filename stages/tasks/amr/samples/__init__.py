"""What a model is asked about a sentence, and how it is to answer."""

from stages.tasks.amr.samples.questions import check, completion, conversation, probes
from stages.tasks.amr.samples.records import read_split

__all__ = ["check", "completion", "conversation", "probes", "read_split"]
