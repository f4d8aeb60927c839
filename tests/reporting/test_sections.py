"""Tables and sentences about settings, cost, memory and origin of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.reporting.runs import Run, read_run, report_runs_dir
from stages.reporting.sections import (
    cost_table,
    origin_warnings,
    origins_table,
    settings_tables,
    trainable_table,
)
from stages.tasks.detection.report import REPORT
from tests.made_up_runs import project_params, write_made_up_record, write_made_up_run

MAKERS = {"base-vlm": "baseline", "r1-llm-only": "train", "r2-vision-only": "train"}


def runs_with_records(tmp_path: Path, **changes: dict[str, Any]) -> dict[str, Run]:
    """A baseline and two recipes by name; changes: of their records, by name with _ for -."""
    params, found = project_params(), {}
    for name, stage in MAKERS.items():
        trained = name in params.recipes
        runs_dir = report_runs_dir(tmp_path, "detection")
        write_made_up_run(runs_dir, name, [0.5, 0.6], params=params if trained else None)
        write_made_up_record(tmp_path, f"{stage}@{name}", **changes.get(name.replace("-", "_"), {}))
        run = read_run(params, REPORT, name, tmp_path)
        assert run is not None
        found[name] = run
    return found


def test_settings_are_split_and_the_uncommon_ones_stand_out() -> None:
    by_run = {
        "one": {"rank": "64", "seed": "42", "rate": "0.1"},
        "two": {"rank": "8", "seed": "42", "rate": "0.1"},
        "three": {"rank": "64", "seed": "42"},
    }
    differing, shared = settings_tables(by_run)
    assert [row.cells for row in differing.rows] == [("rank", "64", "8", "64"), ("rate", "0.1", "0.1", "–")]
    assert [row.marked for row in differing.rows] == [{2}, {3}]
    assert [row.cells for row in shared.rows] == [("seed", "42")]
    assert settings_tables({})[0].rows == ()


def test_parameters_and_costs_by_run(tmp_path: Path) -> None:
    base, trained, _ = runs_with_records(tmp_path).values()
    table = trainable_table([trained])
    assert [column.key for column in table.columns] == ["model", "llm", "total", "all", "share"]
    assert table.rows[0].cells == ("r1-llm-only", 688_000, 688_000, 3_100_000, 688 / 3100)
    assert [row.cells for row in cost_table([base, trained]).rows] == [
        ("base-vlm", *[None] * 7, 12.5),
        ("r1-llm-only", 30, 74.2, 16.1, 1_300_000_000, None, "tensors on the CPU", 0.61, 12.5),
    ]
    assert trained.training is not None
    on_gpu = replace(trained, training=replace(trained.training, gpu_utilization=0.8, gpu_watts=300.5, gpu_kwh=0.02))
    table = cost_table([base, on_gpu])
    assert [column.heading for column in table.columns[7:10]] == ["GPU busy", "Power, W", "Energy, kWh"]
    assert [row.cells[7:10] for row in table.rows] == [(None, None, None), (0.8, 300.5, 0.02)]


def test_origins_by_run(tmp_path: Path) -> None:
    runs = list(runs_with_records(tmp_path, r1_llm_only={"changed": ["params.yaml"]}).values())
    table = origins_table(runs)
    assert [str(row.cells[0]) for row in table.rows] == list(MAKERS)
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
    assert origin_warnings(runs) == []
    without_records = [replace(run, provenance=()) for run in runs]
    assert (origins_table(without_records).rows, origin_warnings(without_records)) == ((), [])


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"changed": ["params.yaml", *(f"stages/{name}.py" for name in "abcdefg")]}, "stages/e.py and 2 more"),
        ({"commit": "b" * 40}, "is the same: c0ffeec0ffee (base-vlm, r1-llm-only), bbbbbbbbbbbb (r2-vision-only)"),
        ({"commit": None, "code": "6" * 64}, "and so does the code that made them: c0ffeec0ffee"),
        ({"gpus": ["NVIDIA H200"] * 2, "driver": "580.95.05"}, "2 x NVIDIA H200, driver 580.95.05 (r2-vision-only)"),
        ({"lock": None}, "10c410c410c4 (base-vlm, r1-llm-only), not known (r2-vision-only)"),
    ],
)
def test_other_code_devices_and_packages_are_warned_of(tmp_path: Path, change: dict[str, Any], warning: str) -> None:
    (found,) = origin_warnings(list(runs_with_records(tmp_path, r2_vision_only=change).values()))
    assert warning in found
