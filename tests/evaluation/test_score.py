"""The samples that a report shows, and answers of another system, for any task."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from stages.core.errors import UserError
from stages.evaluation.score import EXAMPLES, Task, failures, mark_examples, read_completions
from tests.tasks.chat.conversations import record as conversation
from tests.tasks.detection.rows import record

SCORING: Any = SimpleNamespace(ordered_by=lambda record: "score")


def marked(folder: Path, scores: list[float], **scoring: Any) -> dict[str, int]:
    """The record, from 1, by mark."""
    rows, scoring = [{"score": score} for score in scores], vars(SCORING) | scoring
    marks = mark_examples(range(1, len(scores) + 1), rows, SimpleNamespace(**scoring), folder)  # type: ignore[arg-type]
    return {mark: record for record, each in enumerate(marks, start=1) for mark in each}


def test_best_worst_and_random_examples_are_marked(tmp_path: Path) -> None:
    shown = marked(tmp_path, [0.5, 0.9, 0.1, 0.7, 0.3])
    assert [shown.pop(f"{kind}-{rank}") for kind in ("best", "worst") for rank in (1, 2, 3)] == [2, 4, 1, 3, 5, 1]
    assert sorted(shown) == ["random-1", "random-2", "random-3"]
    assert len(set(shown.values())) == EXAMPLES == 3
    assert sorted(marked(tmp_path, [0.0])) == ["best-1", "random-1", "worst-1"]
    assert [*tmp_path.iterdir()] == []


def test_an_example_has_the_image_that_its_task_draws(tmp_path: Path) -> None:
    shown = marked(
        tmp_path,
        [0.5, 0.9, 0.1, 0.7],
        example_image=lambda record, row: Image.new("RGB", (record, 1)) if row["score"] > 0.4 else None,
    )
    widths = {path.stem: Image.open(path).width for path in tmp_path.iterdir()}
    assert widths == {mark: record for mark, record in shown.items() if record != 3}


def test_each_kind_of_failure_has_its_examples(tmp_path: Path) -> None:
    def failure(row: dict[str, float]) -> str | None:
        return None if row["score"] > 0.5 else "low" if row["score"] else "no_box"

    scores = [0.9, 0.0, 0.2, 0.3, 0.1, 0.4, 0.0]
    rows: Any = [{"score": score} for score in scores]
    found: Any = SimpleNamespace(failure=failure)
    assert failures(rows, found) == {"low": [2, 3, 4, 5], "no_box": [1, 6]}
    kinds = {mark: record for mark, record in marked(tmp_path, scores, failure=failure).items() if mark[0] in "ln"}
    assert kinds == {"low-1": 3, "low-2": 4, "low-3": 5, "no_box-1": 2, "no_box-2": 7}
    assert failures(rows, SCORING) == {}


def test_random_examples_are_the_same_for_every_model(tmp_path: Path) -> None:
    one, two = (marked(tmp_path, [score] * 9) for score in (0.1, 0.9))
    assert [one[f"random-{rank}"] for rank in (1, 2, 3)] == [two[f"random-{rank}"] for rank in (1, 2, 3)]


def test_a_question_with_its_answer_is_refused() -> None:
    asked = conversation("Who?", "You.")
    answered = replace(asked, messages=(*asked.messages, asked.messages[-1]))
    with pytest.raises(ValueError, match=r"task chat: conversation\(answered=False\) answers a:1"):
        Task(name="chat", answer_format=None, records=[asked, answered]).questions  # noqa: B018


def test_answers_to_samples_of_one_id_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "peer.jsonl"
    path.write_text('{"id": "1", "answer": "none"}\n')
    task = Task(name="detection", answer_format=None, records=[record([(0.1, 0.1, 0.5, 0.5)], "1")] * 2)
    with pytest.raises(UserError, match="several samples have this id: '1'"):
        read_completions(path, task)
    assert read_completions(path, replace(task, records=task.records[:1])) == ["none"]
