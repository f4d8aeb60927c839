"""What may differ between two runs of the same, and all that may: what was measured of the machine, not of the model.

A stage writes nothing else that depends on when or where it ran; its record of provenance is no output of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_HELD = ("before_load", "after_load", "end")

MEASURED = {
    "training.json": ("train_seconds", "samples_per_second", "peak_memory_bytes", "reserved_memory_bytes"),
    "metrics.json": ("samples_per_second", "memory_measured_gib", "memory_error"),
    # What a stage held, below data/report/TASK/memory. A certificate of the same name has none of these keys.
    **dict.fromkeys(("train.json", "merge.json", "build.json", "evaluate.json"), _HELD),
}
"""Keys of JSON files by the file's name, wherever a stage writes it."""

SHOWN = ("comparison.md", "index.html")
"""Of a report: pages that show some of that between what else the report holds, which lies in files beside them too."""


def without_measured(path: Path) -> Any:
    """What a JSON file holds beside that. Raises ValueError where it holds no JSON."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        return content
    return {key: value for key, value in content.items() if key not in MEASURED.get(path.name, ())}
