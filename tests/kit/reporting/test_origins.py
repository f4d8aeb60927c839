from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.core.provenance import records_dir
from stages.kit.reporting.runs import Run, read_run
from stages.kit.reporting.sections import origin_warnings, origins_table
from tests.made_up_runs import project_params, write_made_up_record, write_made_up_run

NAMES = {"base-vlm": "baseline", "r1-llm-only": "train", "r2-vision-only": "train"}


def runs(tmp_path: Path, **changes: dict[str, Any]) -> list[Run]:
    """A baseline and two recipes; changes: of their records, by name with _ for -."""
    params, found = project_params(), []
    for name, stage in NAMES.items():
        trained = name in params.recipes
        run_dir = write_made_up_run(tmp_path / "runs", name, [0.5, 0.6], params=params if trained else None)
        write_made_up_record(tmp_path, f"{stage}@{name}", **changes.get(name.replace("-", "_"), {}))
        run = read_run(
            run_dir,
            identity=("image_id",),
            columns=("iou",),
            trained=trained,
            records_dir=records_dir(tmp_path, "detection"),
        )
        assert run is not None
        found.append(run)
    return found


def test_a_row_says_of_what_code_data_and_base_a_model_is(tmp_path: Path) -> None:
    table = origins_table(runs(tmp_path, r1_llm_only={"changed": ["params.yaml"]}))
    assert [str(row.cells[0]) for row in table.rows] == list(NAMES)
    row = dict(zip((column.heading for column in table.columns), table.rows[1].cells, strict=True))
    assert row == {
        "Model": "r1-llm-only",
        "Commit": "c0ffeec0ffee + 1 changed",
        "Ran in": "bakeoff:cpu-0123456789ab",
        "Packages": "10c410c410c4",
        "Device": "A CPU, 2 cores",
        "Seed": 42,
        "Base": "ba5eba5eba5e",
        "Data": "da7ada7ada7a",
        "Started (UTC)": "2026-11-21 09:00:00",
        "Took": 74.2,
    }


def test_runs_of_one_commit_on_one_device_are_nothing_to_warn_of(tmp_path: Path) -> None:
    assert origin_warnings(runs(tmp_path, r1_llm_only={"changed": ["params.yaml"]})) == []


OTHERS = "c0ffeec0ffee (base-vlm, r1-llm-only)"


@pytest.mark.parametrize(
    ("change", "said", "found"),
    [
        (
            {"changed": ["params.yaml", *(f"stages/{name}.py" for name in "abcdefg")]},
            "r2-vision-only was made with changes that no commit has",
            "stages/a.py, stages/b.py, stages/c.py, stages/d.py, stages/e.py and 2 more",
        ),
        (
            {"commit": "b" * 40},
            "The commits of the runs differ, though the code that made them is the same",
            f"{OTHERS}, bbbbbbbbbbbb (r2-vision-only)",
        ),
        (
            {"commit": None, "code": "6" * 64},
            "The commits of the runs differ, and so does the code that made them",
            f"{OTHERS}, not known (r2-vision-only)",
        ),
        (
            {"gpus": ["NVIDIA H200"] * 2, "driver": "580.95.05"},
            "Not all were trained on the same device",
            "A CPU, 2 cores (r1-llm-only), 2 x NVIDIA H200, driver 580.95.05 (r2-vision-only)",
        ),
        (
            {"lock": None},
            "The locked packages of the runs differ",
            "10c410c410c4 (base-vlm, r1-llm-only), not known (r2-vision-only)",
        ),
    ],
)
def test_what_keeps_runs_from_being_compared_is_said(
    tmp_path: Path, change: dict[str, Any], said: str, found: str
) -> None:
    assert origin_warnings(runs(tmp_path, r2_vision_only=change)) == [f"{said}: {found}."]


def test_a_base_may_be_evaluated_on_another_device_than_a_recipe_is_trained_on(tmp_path: Path) -> None:
    assert origin_warnings(runs(tmp_path, base_vlm={"gpus": ["NVIDIA H200"]})) == []


def test_runs_without_records_are_left_out(tmp_path: Path) -> None:
    run_dir = write_made_up_run(tmp_path, "base-vlm", [0.5])
    run = read_run(run_dir, identity=("image_id",), columns=("iou",), trained=False, records_dir=tmp_path / "absent")
    assert run is not None
    assert origins_table([run]).rows == ()
    assert origin_warnings([run]) == []
