"""The only values that may differ between two runs of the same stage: times and memory, which the stage measured;
and a signature, of which each is drawn at random.

A stage writes nothing else that depends on when or where it ran; its record of provenance is the launcher's output.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MEASURED = {
    "training.json": (*("train_seconds", "samples_per_second", "peak_memory_bytes", "reserved_memory_bytes"),),
    "metrics.json": ("samples_per_second", "memory_measured_gib", "memory_error"),
    # A stage's memory, below data/report/TASK/memory. A certificate of the same name has none of these keys.
    **dict.fromkeys(("train.json", "merge.json", "build.json", "evaluate.json"), ("before_load", "after_load", "end")),
    "model.sig": ("dsseEnvelope",),
}
"""Keys of JSON files by the file's name, wherever a stage writes it."""

SHOWN = ("comparison.md", "index.html")
"""Pages of a report that show measured values between others, all of which are also in files beside them."""


def without_measured(path: Path) -> Any:
    """The content of a JSON file without measured values. Raises ValueError where it is not JSON."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        return content
    return {key: value for key, value in content.items() if key not in MEASURED.get(path.name, ())}
