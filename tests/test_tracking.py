"""Results in Weights & Biases, offline, read back from what wandb itself keeps."""

import csv
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from stages.core.lineage import read_lineage
from stages.core.params import load_params
from stages.kit.reporting.tables import Column, Row, Table
from stages.kit.reporting.tracking import track_comparison
from stages.kit.statistics import Interval
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
        raw["tracking"] = {"wandb": True, "wandb_mode": "offline", "wandb_project": "bakeoff-test"}
        write_params(raw)
        done("base", "vlm")
        done("prepare", "nutrition-tables")
        assert not KEPT.exists()
        done("evaluate", "base-vlm")
        done("compare", "detection")
        track_comparison(load_params().tracking, "made-up", MADE_UP)
        wandb.teardown()  # as at the end of a stage's process: all is written
    return workspace


def records_of(content: bytes) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format, after a header of seven bytes."""
    place, record = 7, b""
    while place < len(content):
        if 32768 - place % 32768 < 7:  # no header fits: the rest of the block is padding
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(record)
            record = b""


def tracked_run(workspace: Path, name: str) -> tuple[Path, list[Any]]:
    """The folder of media of the run of that name, and its records."""
    for folder in (workspace / KEPT / "wandb").glob("offline-run-*"):
        (path,) = folder.glob("*.wandb")
        records = list(records_of(path.read_bytes()))
        ((run, project),) = {(each.run.display_name, each.run.project) for each in records if each.HasField("run")}
        assert project == "bakeoff-test"
        if run == name:
            return folder / "files/media", records
    raise AssertionError(f"no run is called {name}")


def table(media: Path, name: str) -> dict[str, Any]:
    (path,) = (media / "table").glob(f"{name}_*.table.json")
    return dict(json.loads(path.read_text()))


def test_an_evaluation_is_tracked_with_its_metrics_examples_and_model_but_no_weights(finished: Path) -> None:
    media, records = tracked_run(finished, "base-vlm-evaluation")
    metrics = json.loads((finished / "data/runs/base-vlm/metrics.json").read_text())
    tracked = table(media, "metrics")
    assert (tracked["columns"], tracked["data"]) == (["figure", "value"], [list(item) for item in metrics.items()])
    updates = [update for record in records if record.HasField("summary") for update in record.summary.update]
    summary = {update.key: json.loads(update.value_json) for update in updates}
    assert {name: summary[name] for name in metrics} == metrics
    examples = sorted(path.read_bytes() for path in (finished / "data/runs/base-vlm/examples").glob("*.png"))
    assert sorted(path.read_bytes() for path in (media / "images").rglob("*.png")) == examples != []
    (model,) = [each.artifact for each in records if each.HasField("artifact") and each.artifact.type == "model"]
    lineage = read_lineage(finished / "data/bases/vlm")
    assert (model.name, json.loads(model.metadata)) == ("base-vlm", {"digest": lineage.digest})
    assert [entry.path for entry in model.manifest.contents] == ["lineage.json"]
    assert Path(model.manifest.contents[0].local_path).is_relative_to(finished / KEPT)
    kept = [path for path in (finished / KEPT).rglob("*") if path.is_file()]
    weights = (finished / "data/bases/vlm/model.safetensors").stat().st_size
    assert max(path.stat().st_size for path in kept) < weights / 2


def test_the_tracked_table_of_a_comparison_is_its_csv(finished: Path) -> None:
    media, _ = tracked_run(finished, "detection-comparison")
    header, *rows = csv.reader((finished / "data/report/detection/comparison.csv").open(newline=""))
    tracked = table(media, "comparison")
    assert (tracked["columns"], [row[0] for row in tracked["data"]]) == (header, [row[0] for row in rows])
    media, _ = tracked_run(finished, "made-up-comparison")
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
