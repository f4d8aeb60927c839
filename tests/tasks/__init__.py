import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import UserError
from stages.core.params.schema import DataParams, DatasetParams, LimitParams, SplitParams
from stages.core.tasks import load_task
from stages.data.prepared import prepare as prepare_dataset
from tests import ROOT

TASKS = sorted(path.parent.name for path in ROOT.glob("stages/tasks/*/report.py"))


def asked_of_a_model(task: str) -> Any:
    """The object with the task's `conversation`; in detection, for a model that sees images in their own size."""
    samples = load_task(task, "samples")
    return samples.ForModel("qwen2_vl", lambda *size: size) if hasattr(samples, "ForModel") else samples


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
    repeat: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Prepares a dataset as the stage does. reader: the task's Reader. Returns the content of stats.json."""
    settings = asdict(reader) if reader else {}
    named = SplitParams(**splits or {})
    entries: dict[str, Any] = {"limit": limit, "mix": mix, "reader": settings, "repeat": repeat or {}}
    dataset = DatasetParams(task=task, source=source, splits=named, **entries)
    data = DataParams(skip_invalid=skip_invalid, selection=selection)
    return prepare_dataset(load_task(task, "sources"), dataset, data, out_dir, path="datasets.made-up")


def refusal(task: str, source: str, out_dir: Path, **options: Any) -> str:
    """The message with which a dataset is refused, of which nothing is left."""
    with pytest.raises(UserError) as refused:
        prepare(task, source, out_dir=out_dir, **options)
    assert not out_dir.exists()
    return refused.value.message


def write_lines(path: Path, *contents: Any, newline: str = "\n") -> None:
    """JSON Lines; a text is a line as it is."""
    lines = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) for content in contents]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + newline for line in lines).encode())
