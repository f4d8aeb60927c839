import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.core.params.schema import DataParams, DatasetParams, LimitParams, SplitParams
from stages.core.tasks import load_task
from stages.kit.data import prepared


def prepare(
    task: str,
    source: str,
    *,
    out_dir: Path,
    skip_invalid: bool = False,
    selection: float = 0.0,
    limit: LimitParams | None = None,
    mix: dict[str, int | None] | None = None,
    reader: Any = None,
    splits: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Prepares a dataset as the stage does. reader: the task's Reader. Returns the content of stats.json."""
    settings = asdict(reader) if reader else {}
    named = SplitParams(**splits or {})
    dataset = DatasetParams(task=task, source=source, splits=named, limit=limit, mix=mix, reader=settings)
    data = DataParams(skip_invalid=skip_invalid, selection=selection)
    return prepared.prepare(load_task(task, "sources"), dataset, data, out_dir, path="datasets.made-up")


def write_lines(path: Path, *contents: Any, newline: str = "\n") -> None:
    """JSON Lines; a text is a line as it is."""
    lines = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) for content in contents]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + newline for line in lines).encode())
