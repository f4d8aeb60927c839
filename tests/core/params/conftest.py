from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.core.params.files import SHIPPED


@pytest.fixture
def raw() -> dict[str, Any]:
    return dict(YAML(typ="safe").load(SHIPPED))
