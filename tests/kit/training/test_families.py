"""The real trainer takes the same step with each family that sees pictures, however its samples are put together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.core.params.schema import LoraParams
from stages.kit.families import FAMILIES
from stages.kit.models import kernels
from stages.kit.models.kernels import PackedRow
from stages.kit.training.trainer import RecipeTrainer
from tests.kit.training.small import plan_for
from tests.kit.training.test_packing import assert_unlike, one_step, taken, unlike
from tests.kit.training.test_resume import Workplace, kill, text_workplace
from tests.kit.training.two_processes import At
from tests.tiny_families import save_tiny_family

LORA = LoraParams(rank=8, alpha=16, targets={"llm": ("all-linear",)})
PLAN = plan_for("amr-ptr", quantization="none", max_length=4096, lora=LORA)
Build = Callable[..., RecipeTrainer]


def new_folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
def tiny_vlm(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """In place of the Qwen2-VL that `build` takes elsewhere."""
    return save_tiny_family(request.param, new_folder(tmp_path / "vlm"))


def test_micro_batches_and_rows_without_padding_give_the_same_loss_and_gradients_part_by_part(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = taken(build(one_step()))
    different: tuple[dict[str, Any], ...] = (
        {"micro_batch": 2},
        {"padding_free": True},
        {"gradient_checkpointing": True},
    )
    for settings in different:
        found = unlike(whole, taken(build(one_step(**settings))))
        assert found.keys() == {"loss", "vision", "projector", "llm"}
        assert max(found.values()) < 1e-5, (settings, found)

    def all_one(position_ids: torch.Tensor) -> PackedRow:
        length = position_ids.shape[1]
        return PackedRow([length], torch.tensor([0, length], dtype=torch.int32))

    monkeypatch.setattr(kernels, "row_of", all_one)
    assert_unlike(whole, taken(build(one_step(padding_free=True))))


# Those of the shipped recipes are killed in test_resume.py.
TEXT = {name for name, family in FAMILIES.items() if family.vision is None} - {"qwen2", "qwen2_moe"}


@pytest.mark.parametrize("name", sorted(TEXT))
def test_a_killed_training_of_a_text_family_ends_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    model_dir = save_tiny_family(name, new_folder(tmp_path / "model"))
    undisturbed = text_workplace(model_dir, new_folder(tmp_path / "undisturbed")).train(PLAN)
    workplace = text_workplace(model_dir, new_folder(tmp_path / "killed"))
    workplace.interrupt(PLAN, at=At(2, kill))
    workplace.train(PLAN).assert_same(undisturbed)


def test_so_does_one_of_a_family_that_sees_pictures(build: Build, tmp_path: Path) -> None:
    plan = plan_for("r4-joint", quantization="none")
    undisturbed = Workplace(build, new_folder(tmp_path / "undisturbed")).train(plan)
    workplace = Workplace(build, new_folder(tmp_path / "killed"))
    workplace.interrupt(plan, at=At(2, kill))
    workplace.train(plan).assert_same(undisturbed)
