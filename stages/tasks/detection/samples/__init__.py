"""Names that the stages use."""

from stages.tasks.detection.samples.records import ForModel, check, conversation, probes, read_split

__all__ = ["ForModel", "check", "conversation", "probes", "read_split"]
