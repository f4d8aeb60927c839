import copy
import json
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.kit.memory.calibration import SHIPPED_PATH, Calibration, load_calibration
from tests import ROOT

MEASURED = "NVIDIA H200, 2026-12-01"
DECISIVE = (
    *("context_mib", "allocated_error_low", "allocated_error_high"),
    *("reserved_error_low", "reserved_error_high"),
)


@pytest.fixture
def raw() -> dict[str, Any]:
    return dict(YAML(typ="safe").load(SHIPPED_PATH))


def load(raw: Any, tmp_path: Path) -> Calibration:
    path = tmp_path / "calibration.yaml"
    with path.open("w") as file:
        YAML().dump(json.loads(json.dumps(raw)), file)
    return load_calibration(path)


def refusal(raw: Any, tmp_path: Path) -> str:
    with pytest.raises(UserError) as error:
        load(raw, tmp_path)
    return error.value.message


def test_the_shipped_file_loads() -> None:
    calibration = load_calibration()
    assert calibration.cublas_workspace_mib.num_bytes == 8_519_680  # what torch allocates for its first matmul
    assert calibration.cublas_workspace_hopper_mib.num_bytes == 32 * 2**20


def test_an_interval_holds_what_is_predicted() -> None:
    calibration = load_calibration()
    assert calibration.allocated_error_low.value < 0 < calibration.allocated_error_high.value
    assert calibration.reserved_error_low.value < 0 < calibration.reserved_error_high.value


def test_only_sizes_are_in_bytes() -> None:
    with pytest.raises(AssertionError, match="share"):
        _ = load_calibration().usable_share.num_bytes


def test_a_label_is_measured_only_where_all_that_decides_is(raw: dict[str, Any], tmp_path: Path) -> None:
    assert load(raw, tmp_path).label == "assumed"
    for name in DECISIVE:
        raw[name]["measured"] = MEASURED
    assert load(raw, tmp_path).label == MEASURED
    for name in DECISIVE:
        doubtful = copy.deepcopy(raw)
        doubtful[name]["measured"] = "assumed"
        assert load(doubtful, tmp_path).label == "assumed"


def test_a_label_names_every_device(raw: dict[str, Any], tmp_path: Path) -> None:
    for name in DECISIVE:
        raw[name]["measured"] = MEASURED
    raw["context_mib"]["measured"] = "NVIDIA A10G, 2026-12-02"
    assert load(raw, tmp_path).label == f"NVIDIA A10G, 2026-12-02; {MEASURED}"


def test_several_processes_need_nccls_buffers_measured_too(raw: dict[str, Any], tmp_path: Path) -> None:
    for name in DECISIVE:
        raw[name]["measured"] = MEASURED
    assert load(raw, tmp_path).ddp_label == "assumed"
    raw["nccl_buffers_mib"]["measured"] = MEASURED
    assert load(raw, tmp_path).ddp_label == MEASURED


def test_every_problem_is_reported_with_its_path(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["context_mib"]["value"] = "600"
    raw["usable_share"]["whyy"] = raw["usable_share"].pop("why")
    raw["large_card_gb"]["measured"] = "yesterday"
    raw["contxt_mib"] = raw["nccl_buffers_mib"]
    del raw["nccl_buffers_mib"]
    message = refusal(raw, tmp_path)
    assert message.startswith(f"{tmp_path / 'calibration.yaml'} has 6 problems:\n")
    assert "  context_mib.value: input should be a valid number, found '600'\n" in message
    assert "  usable_share.why: missing\n" in message
    assert "  usable_share.whyy: unknown key (did you mean 'why'?)\n" in message
    assert "  large_card_gb.measured: string should match pattern" in message
    assert "  nccl_buffers_mib: missing\n" in message
    assert "  contxt_mib: unknown key (did you mean 'context_mib'?)" in message


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("context_mib", 0, "above 0 was expected, found 0"),
        ("cublas_workspaces", -1, "above 0 was expected, found -1"),
        ("usable_share", 1.01, "above 0 and at most 1 was expected, found 1.01"),
        ("usable_share_large", 0, "above 0 and at most 1 was expected, found 0"),
        ("allocated_error_low", 0.03, "above -1 and at most 0 was expected, found 0.03"),
        ("reserved_error_low", -1, "above -1 and at most 0 was expected, found -1"),
        ("reserved_error_high", -0.08, "at least 0 was expected, found -0.08"),
    ],
)
def test_a_value_out_of_its_range_is_refused(
    raw: dict[str, Any], tmp_path: Path, name: str, value: float, problem: str
) -> None:
    raw[name]["value"] = value
    assert refusal(raw, tmp_path).endswith(f" has 1 problem:\n  {name}.value: {problem}")


def test_a_unit_is_what_the_name_says(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["context_mib"]["unit"] = "share"
    raw["usable_share"]["unit"] = "MiB"
    message = refusal(raw, tmp_path)
    assert "context_mib.unit: MiB was expected, found share" in message
    assert "usable_share.unit: share was expected, found MiB" in message


@pytest.mark.parametrize("text", ["[", "", "- 1", "a: \xff"])
def test_a_damaged_file_is_refused_without_a_traceback(text: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"calibration\.yaml"):
        load_calibration(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing"):
        load_calibration(tmp_path / "calibration.yaml")


def test_the_file_says_what_the_class_holds(raw: dict[str, Any]) -> None:
    assert list(raw) == [field.name for field in fields(Calibration)]


def test_packages_hold_every_file_that_is_read_beside_the_code() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    below = (ROOT / "stages").rglob("*.*")
    files = [path for path in below if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert SHIPPED_PATH in files
    assert [path for path in files if not any(path.match(pattern) for pattern in patterns)] == []


def test_memory_is_reckoned_without_torch() -> None:
    program = (
        "import sys; from stages.kit.memory import allocator, budget, calibration; calibration.load_calibration(); "
        "print(sorted({'torch', 'transformers', 'peft', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
