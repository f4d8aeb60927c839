"""The samples that a report shows, for any task."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image

from stages.kit.evaluation.score import EXAMPLES, write_examples

SCORING: Any = SimpleNamespace(
    ordered_by=lambda record: "score", draw_prediction=lambda record, row: Image.new("RGB", (record, 1))
)
"""Draws an image whose width is the record."""


def written(folder: Path, scores: list[float]) -> dict[str, int]:
    """The record, from 1, by file."""
    write_examples(range(1, len(scores) + 1), [{"score": score} for score in scores], SCORING, folder)
    return {path.stem: Image.open(path).width for path in folder.iterdir()}


def test_best_worst_and_random_examples_are_written(tmp_path: Path) -> None:
    shown = written(tmp_path / "new", [0.5, 0.9, 0.1, 0.7, 0.3])
    assert [shown.pop(f"{kind}-{rank}") for kind in ("best", "worst") for rank in (1, 2, 3)] == [2, 4, 1, 3, 5, 1]
    assert sorted(shown) == ["random-1", "random-2", "random-3"]
    assert len(set(shown.values())) == EXAMPLES == 3
    assert sorted(written(tmp_path / "one", [0.0])) == ["best-1", "random-1", "worst-1"]


def test_random_examples_are_the_same_for_every_model(tmp_path: Path) -> None:
    one, two = (written(tmp_path / str(score), [score] * 9) for score in (0.1, 0.9))
    assert [one[f"random-{rank}"] for rank in (1, 2, 3)] == [two[f"random-{rank}"] for rank in (1, 2, 3)]
