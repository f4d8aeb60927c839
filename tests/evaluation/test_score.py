"""The samples that a report shows, for any task."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image

from stages.evaluation.score import EXAMPLES, failures, write_examples

SCORING: Any = SimpleNamespace(
    ordered_by=lambda record: "score", draw_prediction=lambda record, row: Image.new("RGB", (record, 1))
)
"""Draws an image as wide as the record says."""


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


def test_each_kind_of_failure_has_its_examples(tmp_path: Path) -> None:
    scoring: Any = SimpleNamespace(
        **vars(SCORING), failure=lambda row: None if row["score"] > 0.5 else "low" if row["score"] else "no_box"
    )
    rows = [{"score": score} for score in (0.9, 0.0, 0.2, 0.3, 0.1, 0.4, 0.0)]
    assert failures(rows, scoring) == {"low": [2, 3, 4, 5], "no_box": [1, 6]}
    write_examples(range(1, 8), rows, scoring, tmp_path)
    widths = {path.stem: Image.open(path).width for path in tmp_path.iterdir()}
    kinds = {name: width for name, width in widths.items() if name.startswith(("low", "no_box"))}
    assert kinds == {"low-1": 3, "low-2": 4, "low-3": 5, "no_box-1": 2, "no_box-2": 7}
    assert failures(rows, SCORING) == {}


def test_random_examples_are_the_same_for_every_model(tmp_path: Path) -> None:
    one, two = (written(tmp_path / str(score), [score] * 9) for score in (0.1, 0.9))
    assert [one[f"random-{rank}"] for rank in (1, 2, 3)] == [two[f"random-{rank}"] for rank in (1, 2, 3)]
