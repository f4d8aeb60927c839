"""The real trainer takes the same step of every family that sees pictures, whichever way its samples are put together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.kit.models import packed_attention
from stages.kit.models.packed_attention import Row
from stages.kit.training.trainer import RecipeTrainer
from tests.kit.training.test_packing import assert_unlike, one_step, taken, unlike
from tests.tiny_families import save_tiny_family

Build = Callable[..., RecipeTrainer]


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
def tiny_vlm(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """In place of the Qwen2-VL that `build` takes elsewhere."""
    folder = tmp_path / "model"
    folder.mkdir()
    return save_tiny_family(request.param, folder)


def test_micro_batches_and_rows_without_padding_give_the_same_loss_and_gradients_part_by_part(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = taken(build(one_step()))
    different: tuple[dict[str, Any], ...] = ({"micro_batch": 2}, {"padding_free": True}, {"gradient_checkpointing": True})
    for settings in different:
        found = unlike(whole, taken(build(one_step(**settings))))
        assert found.keys() == {"loss", "vision", "projector", "llm"}
        assert max(found.values()) < 1e-5, (settings, found)
    import torch

    def all_one(position_ids: torch.Tensor) -> Row:
        length = position_ids.shape[1]
        return Row([length], torch.tensor([0, length], dtype=torch.int32))

    monkeypatch.setattr(packed_attention, "row_of", all_one)
    assert_unlike(whole, taken(build(one_step(padding_free=True))))
