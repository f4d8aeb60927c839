"""The constants that follow from what `make gpu` has measured."""

import difflib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stages.memory.calibration import SHIPPED_PATH, Calibration, load_calibration
from tools import calibrate
from tools.calibrate import LEAST_HIGH, LEAST_LOW, constants, recalibrated

MIB = 2**20
DEVICE = {"name": "NVIDIA H200", "versions": "torch 2.13.0"}


def training(allocated: int, reserved: int, beside: int = 500) -> dict[str, Any]:
    """In MiB. 1,000 allocated and 1,100 reserved were predicted."""
    predicted = {"allocated_bytes": 1000 * MIB, "reserved_bytes": 1100 * MIB}
    sizes = {"allocated": allocated, "reserved": reserved, "total": reserved + beside}
    measured = {f"{name}_bytes": size * MIB for name, size in sizes.items()}
    return {"predicted": predicted, **measured, "share_of_peak": beside / 1000, "operator_us": 100 * 1000 / beside}


def bounds(*trainings: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in constants(trainings).items() if "_error_" in name}


def test_bounds_are_wider_than_the_worst_error_and_have_a_floor() -> None:
    exact = training(1000, 1100)
    assert set(bounds(exact).values()) == {-LEAST_LOW, LEAST_HIGH}
    assert set(bounds(exact)) == {name for name in Calibration.__dataclass_fields__ if "_error_" in name}
    both = (exact, training(900, 990), training(1080, 1210))
    assert list(bounds(*both).values()) == [-0.11, 0.11]
    # The total's errors count too, with the context as measured, not assumed.
    assert bounds(*both, training(1000, 1100, beside=900))["reserved_error_high"] == pytest.approx(0.26)


def test_the_context_is_a_median_the_best_share_of_peak_counts_and_operators_where_the_gpu_waits_for_them() -> None:
    values = constants([training(1000, 1100, beside) for beside in (200, 250, 450, 900)])
    found = {name: value for name, value in values.items() if "_error_" not in name}
    assert found == {"context_mib": 350.0, "share_of_peak": 0.9, "operator_us": 450}


def test_only_values_and_their_source_change() -> None:
    values = {"context_mib": 512.5, "cublas_workspaces_mib": 64, "reserved_error_low": -0.041}
    before, source = SHIPPED_PATH.read_text(), "NVIDIA H200, 2026-12-01"
    after = recalibrated(before, values, source)
    changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] == "+"]
    assert sorted(changed) == sorted(["+   value: 512.5", "+   value: -0.041", *3 * [f"+   measured: {source}"]])


def test_the_trainings_after_the_latest_facts_are_written_to_the_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, results = tmp_path / "calibration.yaml", tmp_path / "results.jsonl"
    shipped.write_text(SHIPPED_PATH.read_text())
    monkeypatch.setattr(calibrate, "SHIPPED_PATH", shipped)

    def ended(*lines: tuple[str, dict[str, Any]]) -> Any:
        text = (json.dumps({"job": job, "data": data, "date": "2026-12-01T10:00:00"}) for job, data in lines)
        results.write_text("\n".join(text))
        return CliRunner().invoke(calibrate.main, [str(results)])

    other = ("facts", {"name": "NVIDIA L4", "versions": "torch 2.13.0"}), ("trainings", training(1, 1))
    without = ended(*other, ("facts", DEVICE), ("trainings", {}))
    assert "make gpu" in without.output
    assert shipped.read_text() == SHIPPED_PATH.read_text()
    assert ended(*other, ("facts", DEVICE), ("trainings", training(1000, 1100))).exit_code == 0
    context = load_calibration(shipped).context_mib
    assert (context.value, context.measured) == (500, "NVIDIA H200, torch 2.13.0, 2026-12-01")
