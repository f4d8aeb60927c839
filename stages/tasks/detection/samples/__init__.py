"""What a model is asked about a picture, and how it is to answer."""

from stages.tasks.detection.samples.questions import check, completion, conversation, probes
from stages.tasks.detection.samples.records import read_split

__all__ = ["check", "completion", "conversation", "probes", "read_split"]
