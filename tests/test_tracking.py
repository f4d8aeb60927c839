"""Results in trackers, offline, read back from what they themselves keep."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import wandb

from stages.core.errors import UserError
from stages.core.lineage import read_lineage
from stages.core.params import load_params
from stages.core.params.schema import TrackingParams
from stages.evaluation.statistics import Interval
from stages.reporting.tables import Column, Row, Table
from stages.reporting.tracking import track_comparison
from stages.training.records import tracking_arguments
from tests import ROOT
from tests.stage_runs import done, small_params, write_params

pytestmark = pytest.mark.pipeline
KEPT = Path(".bakeoff/tracking")
MADE_UP = Table(
    columns=(Column("model", "Model"), Column("mean_iou", "Mean IoU"), Column("mean_iou", "95% interval")),
    rows=(
        Row(cells=("a", 0.1234567890123456, Interval(1e-05, 0.5)), note="x y"),
        Row(cells=("b", -2, None)),
    ),
)


@pytest.fixture(scope="module")
def finished(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which a base was evaluated and compared, tracked offline."""
    workspace = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        # Set by the stages, in this process; what they were is put back.
        for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_MODE", "WANDB_PROJECT"):
            patch.setenv(name, "")
        raw = small_params(tiny_vlm)
        raw["tracking"] = {"to": ["wandb"], "wandb_mode": "offline", "project": "bakeoff-test"}
        write_params(raw)
        done("base", "vlm")
        done("prepare", "nutrition-tables")
        assert not KEPT.exists()
        done("evaluate", "base-vlm")
        done("compare", "detection")
        track_comparison(load_params().tracking, "made-up", MADE_UP)
        wandb.teardown()  # as at the end of a stage's process: all is written
    return workspace


def media_of(workspace: Path, name: str) -> Path:
    """The folder of media of the run of that name."""
    (path,) = (
        path
        for path in (workspace / KEPT / "wandb").glob("offline-run-*/*.wandb")
        if name.encode() in path.read_bytes()
    )
    assert b"bakeoff-test" in path.read_bytes()
    return path.parent / "files/media"


def table(media: Path, name: str) -> dict[str, Any]:
    (path,) = (media / "table").glob(f"{name}_*.table.json")
    return dict(json.loads(path.read_text()))


def test_an_evaluation_is_tracked_with_its_metrics_examples_and_model_but_no_weights(finished: Path) -> None:
    media, run_dir = media_of(finished, "base-vlm-evaluation"), finished / "data/runs/base-vlm"
    metrics = json.loads((run_dir / "metrics.json").read_text())
    tracked = table(media, "metrics")
    assert (tracked["columns"], tracked["data"]) == (["figure", "value"], [list(item) for item in metrics.items()])
    rows = pq.read_table(run_dir / "predictions.parquet").to_pylist()
    shown = table(media, "examples")
    completions = [dict(zip(shown["columns"], each, strict=True))["text"] for each in shown["data"]]
    assert completions == [row["text"] for row in rows if row["examples"]] != []
    examples = sorted(path.read_bytes() for path in (run_dir / "examples").glob("*.png"))
    assert sorted(path.read_bytes() for path in (media / "images").rglob("*.png")) == examples != []
    (record,) = media.parents[1].glob("*.wandb")
    assert read_lineage(finished / "data/bases/vlm").digest.encode() in record.read_bytes()
    kept = [path for path in (finished / KEPT).rglob("*") if path.is_file()]
    weights = (finished / "data/bases/vlm/model.safetensors").stat().st_size
    assert max(path.stat().st_size for path in kept) < weights / 2


def test_the_tracked_table_of_a_comparison_is_its_csv(finished: Path) -> None:
    media = media_of(finished, "detection-comparison")
    header, *rows = csv.reader((finished / "data/report/detection/comparison.csv").open(newline=""))
    tracked = table(media, "comparison")
    assert (tracked["columns"], [row[0] for row in tracked["data"]]) == (header, [row[0] for row in rows])
    media = media_of(finished, "made-up-comparison")
    tracked = table(media, "comparison")
    assert tracked["columns"] == ["model", "mean_iou", "mean_iou_low", "mean_iou_high", "note"]
    assert tracked["data"] == [["a", 0.1234567890123456, 1e-05, 0.5, "x y"], ["b", -2, None, None, None]]


def test_results_that_cannot_be_sent_are_refused_in_words(finished: Path, tmp_path: Path) -> None:
    """Online, without a key; in a process of its own, as wandb reads its settings once."""
    workspace = tmp_path / "workspace"
    shutil.copytree(finished, workspace)
    path = workspace / "params.yaml"
    path.write_text(path.read_text().replace("offline", "online"))
    unreachable = {"WANDB_BASE_URL": "http://127.0.0.1:1", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    stage = subprocess.run(
        [sys.executable, "-m", "stages.compare", "detection"],
        cwd=workspace,
        env={"PATH": os.environ["PATH"], **unreachable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert stage.returncode == 1
    assert "Weights & Biases refused the results of detection-comparison" in stage.stderr
    assert "tracking.wandb_mode=offline" in stage.stderr
    assert "Traceback" not in stage.stderr


def test_curves_go_to_each_tracker_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer, TrainingArguments

    monkeypatch.chdir(tmp_path)
    for name in ("TENSORBOARD_LOGGING_DIR", "MLFLOW_TRACKING_URI", "WANDB_DIR"):
        monkeypatch.setenv(name, "")
    tracking = TrackingParams(to=("tensorboard",), project="p")
    arguments = tracking_arguments(tracking, "r1-llm-only")
    settings = TrainingArguments(output_dir="out", max_steps=3, logging_steps=1, use_cpu=True, **arguments)

    class Weights(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": (self.weight * x).sum()}

    Trainer(model=Weights(1, 1), args=settings, train_dataset=[{"x": torch.ones(1)}] * 8).train()
    (written,) = Path(".bakeoff/tracking/tensorboard/r1-llm-only").glob("events.*")
    assert written.read_bytes().count(b"train/loss") == 3
    assert tracking_arguments(TrackingParams(), "r1-llm-only") == {"report_to": "none"}


def test_a_tracker_that_is_not_installed_is_refused_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.training.records.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tracking\.to names mlflow, .*uv pip install --overrides .*lock mlflow"):
        tracking_arguments(TrackingParams(to=("mlflow",)), "r1-llm-only")
