"""What a model is asked about a picture, and how it is to answer."""

from stages.tasks.detection.samples.questions import ForModel, check, conversation, probes
from stages.tasks.detection.samples.records import read_split

__all__ = ["ForModel", "check", "conversation", "probes", "read_split"]
