import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.memory.calibration import SHIPPED_PATH, Calibration, load_calibration
from tests import ROOT

MEASURED = "NVIDIA H200, 2026-12-01"


@pytest.fixture
def raw() -> dict[str, Any]:
    return dict(YAML(typ="safe").load(SHIPPED_PATH))


def load(raw: Any, tmp_path: Path) -> Calibration:
    path = tmp_path / "calibration.yaml"
    with path.open("w") as file:
        YAML().dump(json.loads(json.dumps(raw)), file)
    return load_calibration(path)


def test_a_label_names_every_device_only_where_all_that_decides_was_measured(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    for constant in raw.values():
        constant["measured"] = "assumed"
    for name in ("reserved_error_low", "reserved_error_high", "context_mib"):
        assert load(raw, tmp_path).label(several=False) == "assumed"
        raw[name]["measured"] = MEASURED
    assert load(raw, tmp_path).label(several=False) == MEASURED
    # Several processes have NCCL's buffers too.
    assert load(raw, tmp_path).label(several=True) == "assumed"
    raw["nccl_buffers_mib"]["measured"] = "NVIDIA A10G, 2026-12-02"
    assert load(raw, tmp_path).label(several=True) == f"{MEASURED}; NVIDIA A10G, 2026-12-02"


def test_every_problem_is_reported_with_its_path(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["context_mib"]["value"] = "600"
    raw["share_of_peak"]["whyy"] = raw["share_of_peak"].pop("why")
    with pytest.raises(UserError, match=r"(?s)yaml has 3 problems:.*context_mib\.value:.*share_of_peak\.why: "):
        load(raw, tmp_path)


def test_packages_hold_every_file_that_is_read_beside_the_code() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    below = (ROOT / "stages").rglob("*.*")
    files = [path for path in below if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert SHIPPED_PATH in files
    assert [path for path in files if not any(path.match(pattern) for pattern in patterns)] == []
