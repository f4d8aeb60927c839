"""What a model is asked about a sentence, and how it is to answer."""

from stages.tasks.amr.samples.questions import check_family, conversation, probes
from stages.tasks.amr.samples.records import Record, read_split
from stages.tasks.amr.samples.targets import TARGETS, complete

__all__ = ["TARGETS", "Record", "check_family", "complete", "conversation", "probes", "read_split"]
