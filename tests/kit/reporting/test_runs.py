from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.kit.reporting.runs import MODEL_LINEAGE_FILE, Run, read_run, refuse_different_samples
from stages.kit.reporting.sections import cost_table, memory_table, plan_settings, trainable_table
from stages.kit.reporting.tables import markdown
from tests.damage import damaged_bytes, damaged_tree, quick
from tests.made_up_runs import made_up_memory, project_params, write_made_up_memory, write_made_up_run


def read(run_dir: Path, *, trained: bool = False) -> Run | None:
    return read_run(run_dir, identity=("image_id", "truth"), columns=("iou",), trained=trained)


def evaluated(run_dir: Path) -> Run:
    run = read(run_dir)
    assert run is not None
    return run


def test_reads_all_that_a_trained_run_left(tmp_path: Path) -> None:
    run = read(write_made_up_run(tmp_path, "r1-llm-only", [0.5, 0.75], params=project_params()), trained=True)
    assert run is not None
    assert run.plan is not None
    assert run.training is not None
    assert run.loss is not None
    assert run.columns["iou"].tolist() == [0.5, 0.75]
    assert run.sample_ids == ("image-000", "image-001")
    assert run.plan.recipe == "r1-llm-only"
    assert run.training.num_steps == 30
    assert run.loss.steps.tolist() == list(range(1, 31))
    assert [path.name for path in run.examples["worst"]] == ["worst-1.png"]


@pytest.mark.parametrize("absent", ["metrics.json", "predictions.parquet"])
def test_a_run_that_was_not_evaluated_is_none(tmp_path: Path, absent: str) -> None:
    run_dir = write_made_up_run(tmp_path, "r1-llm-only", [0.5, 0.75])
    (run_dir / absent).unlink()
    assert read(run_dir) is None
    assert read(tmp_path / "nowhere") is None


@pytest.mark.parametrize("curve", ["", "step\tloss\n", "step\n1\n"])
def test_a_curve_without_points_is_left_out(tmp_path: Path, curve: str) -> None:
    run_dir = write_made_up_run(tmp_path, "r1-llm-only", [0.5], params=project_params())
    (run_dir / "training/plots/metrics/train/loss.tsv").write_text(curve, encoding="utf-8")
    run = read(run_dir, trained=True)
    assert run is not None
    assert run.loss is None


def test_a_damaged_curve_is_refused_by_name(tmp_path: Path) -> None:
    run_dir = write_made_up_run(tmp_path, "r1-llm-only", [0.5], params=project_params())
    (run_dir / "training/plots/metrics/train/loss.tsv").write_text("step\tloss\n1\toops\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"loss\.tsv is damaged.*oops.*train@r1-llm-only"):
        read(run_dir, trained=True)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_damaged_metrics_are_refused_with_the_command_that_mends_them(tmp_path: Path, content: str) -> None:
    run_dir = write_made_up_run(tmp_path, "base-vlm", [0.5])
    (run_dir / "metrics.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"metrics\.json.*dvc repro -f -s baseline@base-vlm"):
        read(run_dir)


def test_a_missing_training_record_is_refused_with_the_command_that_mends_it(tmp_path: Path) -> None:
    run_dir = write_made_up_run(tmp_path, "r1-llm-only", [0.5], params=project_params())
    (run_dir / "training" / "training.json").unlink()
    with pytest.raises(UserError, match=r"training\.json is missing; .* train@r1-llm-only"):
        read(run_dir, trained=True)


def test_what_stages_held_is_read_in_their_order_and_one_that_left_nothing_is_left_out(tmp_path: Path) -> None:
    run_dir = write_made_up_run(tmp_path, "base-vlm", [0.5])
    held = [made_up_memory(stage, "base-vlm") for stage in ("train", "evaluate")]
    paths = {memory.stage: write_made_up_memory(tmp_path, "detection", memory) for memory in held}
    by_stage = {"evaluate": paths["evaluate"], "merge": tmp_path / "nowhere.json", "train": paths["train"]}
    run = read_run(run_dir, identity=("image_id",), columns=("iou",), trained=False, memory_by_stage=by_stage)
    assert run is not None
    assert run.memory == (held[1], held[0])


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    run_dir = write_made_up_run(tmp_path, "r1-llm-only", [0.5])
    pq.write_table(pa.table({"image_id": ["a"], "truth": [[[0.0, 0.0, 1.0, 1.0]]]}), run_dir / "predictions.parquet")
    with pytest.raises(UserError, match="has no column iou; it has image_id, truth"):
        read(run_dir)


@pytest.mark.parametrize("broken", [None, float("nan")])
def test_a_sample_without_a_score_is_refused_not_dropped(tmp_path: Path, broken: float | None) -> None:
    run_dir = write_made_up_run(tmp_path, "r1-llm-only", [0.5, 0.6])
    rows = pq.read_table(run_dir / "predictions.parquet").to_pylist()
    rows[1]["iou"] = broken
    pq.write_table(pa.Table.from_pylist(rows), run_dir / "predictions.parquet")
    with pytest.raises(UserError, match="1 of 2 values of iou"):
        read(run_dir)


def test_other_samples_are_refused_naming_the_runs_and_the_first_difference(tmp_path: Path) -> None:
    one = evaluated(write_made_up_run(tmp_path, "one", [0.5, 0.6]))
    two = evaluated(write_made_up_run(tmp_path, "two", [0.5, 0.6]))
    other = evaluated(write_made_up_run(tmp_path, "other", [0.5, 0.6], image_ids=["image-000", "unlike"]))
    refuse_different_samples([one, two])
    with pytest.raises(UserError) as refusal:
        refuse_different_samples([one, two, other])
    assert "one, two: 2 samples" in refusal.value.message
    assert "one and other first differ in row 1 ('image-001' against 'unlike')" in refusal.value.message


def test_the_same_names_with_another_truth_are_other_samples(tmp_path: Path) -> None:
    one = evaluated(write_made_up_run(tmp_path, "one", [0.5]))
    other = evaluated(write_made_up_run(tmp_path, "other", [0.5], truth=(0.1, 0.1, 0.8, 0.8)))
    with pytest.raises(UserError, match="the truth of 'image-000'"):
        refuse_different_samples([one, other])


def test_fewer_or_reordered_samples_are_other_samples(tmp_path: Path) -> None:
    one = evaluated(write_made_up_run(tmp_path, "one", [0.5, 0.6]))
    fewer = evaluated(write_made_up_run(tmp_path, "fewer", [0.5]))
    turned = evaluated(write_made_up_run(tmp_path, "turned", [0.6, 0.5], image_ids=["image-001", "image-000"]))
    with pytest.raises(UserError, match="one has more than the 1 samples of fewer"):
        refuse_different_samples([one, fewer])
    with pytest.raises(UserError, match="first differ in row 0"):
        refuse_different_samples([one, turned])


def test_a_run_of_numpy_scores_keeps_their_precision(tmp_path: Path) -> None:
    scores = np.array([1 / 3, 2 / 3])
    run_dir = write_made_up_run(tmp_path, "one", scores)
    assert evaluated(run_dir).columns["iou"].tolist() == scores.tolist()
    assert json.loads((run_dir / "metrics.json").read_text())["mean_iou"] == scores.mean()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained and evaluated run; beside it what its stages held."""
    folder = tmp_path_factory.mktemp("runs")
    run_dir = write_made_up_run(folder, "r1-llm-only", [0.5, 0.6], params=project_params())
    write_made_up_memory(folder, "detection", made_up_memory("train", "r1-llm-only"))
    return run_dir


FILES = {
    "metrics.json": "evaluate@r1-llm-only",
    MODEL_LINEAGE_FILE: "evaluate@r1-llm-only",
    "predictions.parquet": "evaluate@r1-llm-only",
    "plan.yaml": "plan@r1-llm-only",
    "training/training.json": "train@r1-llm-only",
    "training/plots/metrics/train/loss.tsv": "train@r1-llm-only",
    "../report/detection/memory/r1-llm-only/train.json": "train@r1-llm-only",
}
"""Below a run's folder, and the stage that makes each."""


@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
@quick(60)
def test_damage_to_any_file_is_said_with_the_stage_that_mends_it_or_the_run_can_be_shown(
    finished: Path, name: str, data: st.DataObject
) -> None:
    path = finished / name
    good = path.read_bytes()
    damaged = damaged_bytes(good)
    if name.endswith((".json", ".yaml")):
        damaged |= damaged_tree(YAML(typ="safe").load(good)).map(lambda tree: json.dumps(tree).encode())
    path.write_bytes(data.draw(damaged))
    memory = {"train@r1-llm-only": finished / "../report/detection/memory/r1-llm-only/train.json"}
    try:
        run = read_run(finished, identity=("image_id", "truth"), columns=("iou",), trained=True, memory_by_stage=memory)
        assert run is not None
        for table in (cost_table([run]), memory_table([run]), trainable_table([run])):
            assert markdown(table).encode()
        assert run.plan is not None
        assert plan_settings(run.plan)
    except UserError as error:
        assert path.name in error.message
        assert f"dvc repro -f -s {FILES[name]}" in error.message
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("values", [["a", "b"], [[0.5], [0.6]], [10**400, 1]])
def test_a_score_that_is_no_number_is_refused(tmp_path: Path, values: list[object]) -> None:
    run_dir = write_made_up_run(tmp_path, "r1-llm-only", [0.5, 0.6])
    if isinstance(values[0], int):
        metrics = json.loads((run_dir / "metrics.json").read_text())
        (run_dir / "metrics.json").write_text(json.dumps({**metrics, "mean_iou": values[0]}))
        reason = r"metrics\.json is damaged: mean_iou"
    else:
        rows = pq.read_table(run_dir / "predictions.parquet")
        index = rows.column_names.index("iou")
        pq.write_table(rows.set_column(index, "iou", pa.array(values)), run_dir / "predictions.parquet")
        reason = r"predictions\.parquet.* is no number|values of iou"
    with pytest.raises(UserError, match=rf"{reason}.*; rebuild it with: dvc repro"):
        read(run_dir)
