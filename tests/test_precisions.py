"""Every recipe in 16 bits, on a CPU: two steps of training, merge, evaluation. Faults of precision show here first."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stages.kit.training.resume import ResumableTrainer
from tests import test_build
from tests.kit.mixture.dense import save_base
from tests.test_stages import done, small_params, write_params

pytestmark = pytest.mark.pipeline

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "gemm_4bit")


class Products(TorchDispatchMode):
    """Notes the precisions of what each matrix product multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in PRODUCTS or "scaled_dot_product" in name:
            factors = [each for each in args if isinstance(each, torch.Tensor)][: 3 if "add" in name else 2]
            self.found.setdefault(name, set()).update(each.dtype for each in factors if each.is_floating_point())
        return func(*args, **kwargs or {})


@contextmanager
def products_of_training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Products]:
    products = Products()
    step = ResumableTrainer.training_step

    def noted(trainer: ResumableTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert (trainer.accelerator.scaler is not None) == (trainer.plan.precision == "fp16")
        with products:
            return step(trainer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ResumableTrainer, "training_step", noted)
        yield products


def all_the_way(recipe: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[torch.dtype]]:
    """Runs the stages of a recipe; returns the precisions that its training multiplied in, by operation."""
    with products_of_training(monkeypatch) as products:
        for stage in ("plan", "train", "merge", "evaluate"):
            done(stage, recipe)
    run_dir = Path("data/runs") / recipe
    assert json.loads((run_dir / "training/training.json").read_text())["num_steps"] == 2
    assert abs(json.loads((run_dir / "metrics.json").read_text())["memory_error"]) < 0.01
    return products.found


@pytest.mark.parametrize("precision", DTYPES)
def test_vision_recipes_multiply_in_the_precision_of_the_profile(
    precision: str, tiny_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = small_params(tiny_vlm)
    raw["profiles"]["tiny"]["memory"]["precision"] = precision
    operations = {"r1-llm-only": "gemm_4bit", "r2-vision-only": "addmm", "r4-joint": "gemm_4bit"}
    for recipe in operations:
        raw["recipes"][recipe]["max_steps"] = 2
    write_params(raw)
    done("base", "vlm")
    done("prepare", "nutrition-tables")
    for recipe, operation in operations.items():
        found = all_the_way(recipe, monkeypatch)
        assert operation in found
        assert "convolution" not in found
        assert set.union(*found.values()) == {DTYPES[precision]}, (recipe, found)


@pytest.mark.parametrize("precision", DTYPES)
def test_text_recipes_and_experts_multiply_in_the_precision_of_the_profile(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An AMR parser's LoRA, and a mixture that is trained whole."""
    monkeypatch.chdir(tmp_path)
    raw = test_build.params_of(save_base(tmp_path / "dense", max_position_embeddings=4096))
    raw["profiles"]["tiny"]["memory"]["precision"] = precision
    for recipe in raw["recipes"].values():
        recipe["max_steps"] = 2
    write_params(raw)
    test_build.write_prepared(Path("data/prepared/visempar"))
    done("base", "llm")
    operations = {**dict.fromkeys(test_build.EXPERTS, "mm"), "after": "_grouped_mm"}
    for recipe, operation in operations.items():
        if recipe == "after":
            done("build", "moe")
        found = all_the_way(recipe, monkeypatch)
        assert operation in found
        assert set.union(*found.values()) == {DTYPES[precision]}, (recipe, found)
