import pytest

from stages.core.params.schema import made_by


@pytest.mark.parametrize(
    ("base", "stage"),
    [("bases/vlm", "base@vlm"), ("runs/r3-stage1/merged", "merge@r3-stage1"), ("builds/moe", "build@moe")],
)
def test_every_base_is_made_by_a_stage(base: str, stage: str) -> None:
    assert made_by(base) == stage
