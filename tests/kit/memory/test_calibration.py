import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.kit.memory.calibration import SHIPPED_PATH, Calibration, load_calibration
from tests import ROOT

MEASURED = "NVIDIA H200, 2026-12-01"
ERRORS = ("allocated_error_low", "allocated_error_high", "reserved_error_low", "reserved_error_high")


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


def test_a_label_names_every_device_only_where_all_that_decides_was_measured(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    names = (*ERRORS, "context_mib")
    for name in names:
        assert load(raw, tmp_path).label(several=False) == "assumed"
        raw[name]["measured"] = MEASURED
    assert load(raw, tmp_path).label(several=False) == MEASURED
    # Several processes have NCCL's buffers too.
    assert load(raw, tmp_path).label(several=True) == "assumed"
    raw["nccl_buffers_mib"]["measured"] = "NVIDIA A10G, 2026-12-02"
    assert load(raw, tmp_path).label(several=True) == f"{MEASURED}; NVIDIA A10G, 2026-12-02"


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
        ("context_mib", 0, "greater than 0"),
        ("usable_share", 1.01, "less than or equal to 1"),
        ("usable_share_large", 0, "greater than 0"),
        ("allocated_error_low", 0.03, "less than or equal to 0"),
        ("reserved_error_low", -1, "greater than -1"),
        ("reserved_error_high", -0.08, "greater than or equal to 0"),
    ],
)
def test_a_value_out_of_its_range_is_refused(
    raw: dict[str, Any], tmp_path: Path, name: str, value: float, problem: str
) -> None:
    raw[name]["value"] = value
    message = refusal(raw, tmp_path)
    assert message.endswith(f" has 1 problem:\n  {name}.value: input should be {problem}, found {value}")


@pytest.mark.parametrize("text", ["[", "", "a: \xff"])
def test_a_damaged_file_is_refused_without_a_traceback(text: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"calibration\.yaml"):
        load_calibration(path)


def test_packages_hold_every_file_that_is_read_beside_the_code() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    below = (ROOT / "stages").rglob("*.*")
    files = [path for path in below if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert SHIPPED_PATH in files
    assert [path for path in files if not any(path.match(pattern) for pattern in patterns)] == []
