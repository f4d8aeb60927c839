"""YAML files that tests write."""

import json
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML


def write_yaml(value: Any, path: Path) -> None:
    """Every value is written out: what occurs twice would have an alias, which params.yaml may not have."""
    YAML().dump(json.loads(json.dumps(value)), path)
