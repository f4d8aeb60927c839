"""The constants that follow from what was predicted and measured."""

import difflib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from stages.core.errors import UserError
from stages.kit.memory.calibration import SHIPPED_PATH, Calibration, load_calibration
from tools import calibrate
from tools.gpu import training
from tools.gpu.device import Device
from tools.gpu.memory import FLOOR, comparisons, constants, recalibrated
from tools.gpu.pieces import FACTS, SETTINGS, Piece, catalogue
from tools.gpu.results import Results
from tools.gpu.runner import Runner

MIB = 2**20
DEVICE = {"kind": "cuda", "name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 139 * 2**30}
DEVICE |= {"workspaces_bytes": 64 * MIB}
NAMES = [setting.name for setting in SETTINGS["cuda"]]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    results = Results(tmp_path / "cuda.jsonl")
    keep(results, FACTS, DEVICE)
    return results


def keep(results: Results, piece: Piece, data: dict[str, Any]) -> None:
    results.keep(piece, "done", seconds=1, problem="", data=data)


def measure(results: Results, allocated: int, reserved: int, beside: int = 500, exact: int = 1000) -> None:
    """One more setting, in MiB. 1,000 allocated and 1,100 reserved were predicted."""
    name = NAMES[sum("trainings" in key for key in results.by_piece)]
    amounts = {"allocated_bytes": 1000 * MIB, "reserved_bytes": 1100 * MIB}
    predicted = {"layers": [28, 32], "scaled": amounts, "exact": {**amounts, "allocated_bytes": exact * MIB}}
    keep(results, Piece(step="predictions", name=name), predicted)
    amounts = {"allocated_bytes": allocated * MIB, "reserved_bytes": reserved * MIB}
    keep(results, Piece(step="trainings", name=name), {**amounts, "total_bytes": (reserved + beside) * MIB})


def bounds(results: Results) -> dict[str, float]:
    return {name: value for name, value in constants(results).items() if "_error_" in name}


def test_errors_are_those_of_the_prediction(results: Results) -> None:
    measure(results, 800, 1000, beside=400)
    (row,) = comparisons(results).values()
    assert row["layers"] == 60
    assert row["allocated"] == pytest.approx(0.25)
    assert row["reserved"] == pytest.approx(0.10)
    assert row["total"] == pytest.approx(1500 / 1400 - 1)  # with the context as measured, not assumed


def test_bounds_are_wider_than_the_worst_that_was_seen_and_have_a_floor(results: Results) -> None:
    measure(results, 1000, 1100)
    assert set(bounds(results).values()) == {-FLOOR, FLOOR}
    assert set(bounds(results)) == {name for name in Calibration.__dataclass_fields__ if "_error_" in name}
    measure(results, 900, 1100)
    measure(results, 1080, 1210)
    assert bounds(results) == {
        "allocated_error_low": -0.11,
        "allocated_error_high": 0.09,
        "reserved_error_low": -FLOOR,
        "reserved_error_high": 0.11,
    }
    measure(results, 1000, 1100, exact=1250)
    assert bounds(results)["allocated_error_low"] == -0.21
    measure(results, 1000, 1100, beside=900)  # the total's errors count with the reserved ones
    assert bounds(results)["reserved_error_high"] == pytest.approx(0.26)


def test_the_context_is_the_median_and_workspaces_are_as_measured(results: Results) -> None:
    for beside in (400, 450, 900):
        measure(results, 1000, 1100, beside)
    found = {name: value for name, value in constants(results).items() if "_error_" not in name}
    assert found == {"context_mib": 450.0, "cublas_workspaces_mib": 64.0}
    keep(results, FACTS, {**DEVICE, "workspaces_bytes": 0})
    assert "cublas_workspaces_mib" not in constants(results)


def test_only_values_and_their_origin_change(tmp_path: Path) -> None:
    values = {"context_mib": 512.5, "cublas_workspaces_mib": 64, "reserved_error_low": -0.041}
    origin = "NVIDIA H200, 2026-12-01"
    before = SHIPPED_PATH.read_text()
    after = recalibrated(before, values, origin)
    changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] == "+"]
    assert sorted(changed) == sorted(["+   value: 512.5", "+   value: -0.041", *3 * [f"+   measured: {origin}"]])

    path = tmp_path / "calibration.yaml"
    path.write_text(before)
    with pytest.raises(UserError, match=r"context_mib\.value: input should be greater than 0"):
        calibrate.write_calibration({"context_mib": -1}, origin, path)
    assert path.read_text() == before
    calibrate.write_calibration(values, origin, path)
    assert load_calibration(path).context_mib.value == 512.5
    assert load_calibration(path).reserved_error_low.measured == origin


def test_a_file_is_written_once_every_setting_was_tried(
    results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.yaml"
    path.write_text(SHIPPED_PATH.read_text())
    pieces = catalogue("cuda", DEVICE)
    # A name may begin another's.
    first, second = ([piece for piece in pieces if piece.name in ("device", name)] for name in NAMES[:2])
    with pytest.raises(UserError, match="no setting was measured"):
        calibrate.finish(results, first, path, dry_run=False)
    measure(results, 1000, 1100)
    calibrate.finish(results, first, path, dry_run=True)
    calibrate.finish(results, [*first, *second[1:]], path, dry_run=False)
    output = capsys.readouterr().out
    assert (
        f"context_mib: 500 (NVIDIA H200, torch {results.versions['torch']}, transformers {transformers.__version__}"
        in output
    )
    assert "2 of 5 pieces are still to be tried" in output
    assert path.read_text() == SHIPPED_PATH.read_text()
    calibrate.finish(results, first, path, dry_run=False)
    assert load_calibration(path).context_mib.value == 500


def test_a_changed_predictor_is_compared_with_what_was_measured_elsewhere(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(results, 1000, 1100)
    results.path.write_text(results.path.read_text().replace(results.versions["torch"], "2.99+cu999"))

    def predict(self: Runner, piece: Piece) -> dict[str, Any]:
        assert piece.task["layers"] == [28, 32]
        amounts = {"allocated_bytes": 990 * MIB, "reserved_bytes": 1100 * MIB}
        return {"layers": piece.task["layers"], "scaled": amounts, "exact": amounts}

    monkeypatch.setattr(Runner, "_answer", predict)
    again = Results(results.path, measured_here=False)
    pieces = calibrate.predicted_again(Device(kind="cuda", name="NVIDIA H200"), again)
    assert [piece.name for piece in pieces] == ["device", NAMES[0], NAMES[0]]
    assert comparisons(Results(results.path, measured_here=False))[NAMES[0]]["allocated"] == pytest.approx(-0.01)
    assert again.versions["torch"] == "2.99+cu999"


def test_layers_are_left_out_until_a_prediction_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(plan: Any, config: Any, *_: Any, exact: bool = False) -> Any:
        return SimpleNamespace(allocated_bytes=config.num_hidden_layers, reserved_bytes=0)

    monkeypatch.setattr(training, "predict", predict)
    fits = {True: "fits", False: "too close"}
    monkeypatch.setattr(training, "verdict", lambda found, capacity: fits[found.allocated_bytes <= capacity])
    setting = {"geometry": "qwen2.5-7b", "recipe": "lora", "max_length": 64}

    def layers(capacity: int, **options: Any) -> Any:
        facts = {**DEVICE, "memory_bytes": capacity}
        return training.predict_memory("cuda", setting=setting, facts=facts, **options)["layers"]

    assert [layers(capacity) for capacity in (28, 27, 20)] == [(28, 0), (21, 0), (14, 0)]
    assert layers(1, layers=(5, 0)) == (5, 0)
    with pytest.raises(UserError, match=r"does not fit with 12\.5% of its layers"):
        layers(1)


def test_workspaces_are_part_of_what_is_predicted() -> None:
    calibration = training.with_workspaces(load_calibration(), {"workspaces_bytes": 24 * MIB})
    assert calibration.cublas_workspaces_mib.num_bytes == 24 * MIB
    assert training.with_workspaces(load_calibration(), {"workspaces_bytes": 0}) == load_calibration()
