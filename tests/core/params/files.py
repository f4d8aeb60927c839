"""params.yaml as a test changes it."""

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.core.params.schema import Params
from tests import ROOT

SHIPPED = ROOT / "params.yaml"
SHIPPED_RAW: dict[str, Any] = YAML(typ="safe").load(SHIPPED)


def load(raw: Any, tmp_path: Path) -> Params:
    path = tmp_path / "params.yaml"
    path.write_text(json.dumps(raw), encoding="utf-8")  # which is YAML too
    return load_params(path)


def refusal(raw: Any, tmp_path: Path) -> str:
    with pytest.raises(UserError) as error:
        load(raw, tmp_path)
    return error.value.message
