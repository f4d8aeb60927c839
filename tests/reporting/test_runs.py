from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.core.errors import UserError
from stages.reporting.compare import TaskReport, guard_metric
from stages.reporting.runs import (
    LOSS_CURVE,
    MAX_TEXT,
    MODEL_LINEAGE_FILE,
    Run,
    read_run,
    refuse_different_samples,
    report_runs_dir,
)
from stages.reporting.sections import memory_table
from stages.tasks.detection.report import REPORT
from tests.made_up_runs import made_up_memory, project_params, write_made_up_memory, write_made_up_run


def written(data_dir: Path, name: str, scores: Any, **options: Any) -> Path:
    return write_made_up_run(report_runs_dir(data_dir, "detection"), name, scores, **options)


def read(run_dir: Path, report: TaskReport = REPORT) -> Run | None:
    """A run that is not of a recipe is of a baseline."""
    params = project_params()
    params = replace(params, baselines={**params.baselines, run_dir.name: params.baselines["base-vlm"]})
    return read_run(params, report, run_dir.name, run_dir.parents[3])


def found(run_dir: Path, report: TaskReport = REPORT) -> Run:
    run = read(run_dir, report)
    assert run is not None
    return run


def test_a_trained_run_is_read(tmp_path: Path) -> None:
    scores = np.array([1 / 3, 2 / 3])
    run = found(written(tmp_path, "r1-llm-only", scores, params=project_params()))
    assert run.plan is not None
    assert run.training is not None
    assert run.columns["iou"].tolist() == scores.tolist()
    assert run.sample_ids == ("image-000", "image-001")
    assert (run.plan.name, run.training.num_steps) == ("r1-llm-only", 30)
    assert {figure: curve[0].tolist() for figure, curve in run.curves.items()} == {
        "training loss": list(range(1, 31)),
        "validation loss": [15, 30],
    }
    assert {number: path.name for number, path in run.examples["worst"].items() if path} == {0: "worst-1.png"}
    assert run.texts == ()


def test_the_texts_of_a_run_are_those_of_its_predictions_cut_where_they_are_long(tmp_path: Path) -> None:
    run_dir = written(tmp_path, "one", [0.5, 0.75, 0.25], num_examples=2)
    long = "x" * (MAX_TEXT + 1_234)
    texts: dict[str, list[str | None]] = {
        "asked": ["A?", long, "C?"],
        "read": ["a", None, None],
        "written": ["1", "", long],
    }
    rows = pq.read_table(run_dir / "predictions.parquet").to_pydict() | texts
    pq.write_table(pa.table(rows), run_dir / "predictions.parquet")
    (run_dir / "examples/best-1.png").unlink()
    run = found(run_dir, replace(REPORT, identity=("image_id", "asked", "text"), shown=("read", "written")))
    cut = f"{long[:MAX_TEXT]}\n... 1,234 more characters"
    assert [question for question, _, _ in run.texts] == ["A?", cut, "C?"]
    assert [answer for _, answer, _ in run.texts] == ["completion 0.5", "completion 0.75", "completion 0.25"]
    assert [completion for _, _, completion in run.texts] == ["a\n\n1", "", cut]
    assert [*run.examples["best"].items()] == [(0, None), (1, run_dir / "examples/best-2.png")]


@pytest.mark.parametrize("absent", ["metrics.json", "predictions.parquet"])
def test_a_run_that_was_not_evaluated_is_none(tmp_path: Path, absent: str) -> None:
    run_dir = written(tmp_path, "one", [0.5, 0.75])
    (run_dir / absent).unlink()
    assert read(run_dir) is None


@pytest.mark.parametrize(
    ("column", "values", "problem"),
    [
        ("other", [0.5, 0.6], "has no column iou; it has image_id, "),
        ("iou", [0.5, float("nan")], "1 of 2 values of iou"),
        ("iou", ["a", "b"], "is no number"),
    ],
)
def test_a_sample_without_a_score_is_refused(tmp_path: Path, column: str, values: list[Any], problem: str) -> None:
    run_dir = written(tmp_path, "one", [0.5, 0.6])
    rows = pq.read_table(run_dir / "predictions.parquet")
    rows = rows.drop_columns(["iou"]).append_column(column, pa.array(values))
    pq.write_table(rows, run_dir / "predictions.parquet")
    with pytest.raises(UserError, match=rf"{problem}.*dvc repro -f -s baseline@one"):
        read(run_dir)


@pytest.mark.parametrize(
    "other", [{"image_ids": ["image-001", "image-000"]}, {"truth": (0.1, 0.1, 0.8, 0.8)}, {"ious": [0.5]}]
)
def test_different_samples_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    one, two = (found(written(tmp_path, name, [0.5, 0.6])) for name in ("one", "two"))
    refuse_different_samples([one, two])
    third = found(written(tmp_path, "other", other.pop("ious", [0.5, 0.6]), **other))
    with pytest.raises(UserError, match=r"(?s)one, two: 2 samples.*other: [12] samples.*dvc repro baseline@one"):
        refuse_different_samples([one, two, third])


def test_runs_with_other_groups_are_refused(tmp_path: Path) -> None:
    runs = []
    for name, groups in (("one", [0, 1, 0]), ("two", [0, 1, 0]), ("other", [0, 1, 1])):
        path = written(tmp_path, name, [0.5, 0.6, 0.7]) / "predictions.parquet"
        pq.write_table(pq.read_table(path).append_column("group", pa.array(groups)), path)
        runs.append(found(path.parent))
    assert [run.groups.tolist() for run in runs if run.groups is not None] == [[0, 1, 0], [0, 1, 0], [0, 1, 1]]
    refuse_different_samples(runs[:2])
    with pytest.raises(UserError, match="these runs were evaluated on different samples"):
        refuse_different_samples(runs)


def test_models_measured_on_other_guards_are_refused_and_files_of_completions_have_none(tmp_path: Path) -> None:
    runs = []
    for name, ids in (("one", "ab"), ("two", "ab"), ("completions", ""), ("other", "a")):
        run_dir = written(tmp_path, name, [0.5, 0.6, 0.7])
        rows = [{"guard": "g", "id": each, "nats": 1.5, "tokens": 2.0} for each in ids]
        if rows:
            pq.write_table(pa.Table.from_pylist(rows), run_dir / "guards.parquet")
        runs.append(found(run_dir, replace(REPORT, metrics=(*REPORT.metrics, guard_metric("g")))))
    assert [run.columns["guard_g_nats"].tolist() for run in runs] == [[1.5, 1.5], [1.5, 1.5], [], [1.5]]
    refuse_different_samples(runs[:3])
    with pytest.raises(UserError, match=r"(?s)one, two, completions: 3 samples.*other: 3 samples"):
        refuse_different_samples(runs)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained and evaluated run, with the memory of a stage below its parent."""
    folder = tmp_path_factory.mktemp("runs")
    run_dir = written(folder, "r1-llm-only", [0.5, 0.6], params=project_params())
    write_made_up_memory(folder, "detection", made_up_memory("train", "r1-llm-only"))
    return run_dir


MEMORY = "../../memory/r1-llm-only/train.json"
CARD = ("metrics.json", MODEL_LINEAGE_FILE, "predictions.parquet", "plan.yaml", "merge.json", LOSS_CURVE)
MAKERS = {
    **dict.fromkeys((*CARD, "training/training.json"), "evaluate@r1-llm-only"),
    MEMORY: "train@r1-llm-only",
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_damaged_file_is_refused_with_its_stage(finished: Path, name: str) -> None:
    path = finished / name
    good = path.read_bytes()
    path.write_bytes(b"{")
    try:
        with pytest.raises(UserError) as error:
            memory_table([found(finished)])
    finally:
        path.write_bytes(good)
    assert path.name in error.value.message
    assert f"dvc repro -f -s {MAKERS[name]}" in error.value.message
