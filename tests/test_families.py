"""A tiny random model of each family through all stages: plan, training, certificate, evaluation; some in 16 bits."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.kit.families import FAMILIES
from stages.kit.models.certificate import MergeCertificate
from stages.kit.models.load import load_config
from stages.kit.planning.plan import read_plan
from tests.stage_runs import all_the_way, done, small_params, write_params
from tests.tiny_families import save_tiny_family

pytestmark = pytest.mark.pipeline

# Shipped recipes of the other families: tests/test_stages.py, tests/test_tasks.py, tests/test_build.py.
PRECISIONS = {
    "gemma3_text": "bf16",
    "llama": "fp16",
    "phi3": "fp32",
    "qwen2_5_vl": "bf16",
    "qwen3": "fp32",
    "qwen3_vl": "fp16",
    "qwen2_vl": "fp16",
}
LORA = {"rank": 8, "alpha": 16, "targets": {"llm": ["all-linear"]}}
TEXT: dict[str, Any] = {"amr-ptr": {"lora": LORA}, "amr-baseline": {"parts": {"llm": "full"}, "lora": None}}
IMAGES: dict[str, Any] = {"r2-vision-only": {}, "r4-joint": {}}
WITHOUT_PADDING = ("amr-ptr", "r4-joint")


def test_every_family_is_tried() -> None:
    assert FAMILIES.keys() == {*PRECISIONS, "qwen2", "qwen2_moe"}


@pytest.mark.parametrize(("name", "precision"), PRECISIONS.items())
def test_a_family_goes_all_the_way(name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sees = FAMILIES[name].vision is not None
    recipes = IMAGES if sees else TEXT
    (tmp_path / "model").mkdir()
    raw = small_params(save_tiny_family(name, tmp_path / "model"))
    tiny = raw["profiles"]["tiny"]
    tiny["bases"]["llm"] = f"folder:{tmp_path / 'model'}"
    tiny["memory"]["precision"] = precision
    for recipe, changes in recipes.items():
        raw["recipes"][recipe].update(changes, max_length=4096, max_steps=2)
        if name != "qwen2_vl":
            raw["recipes"][recipe]["quantization"] = "none"
    write_params(raw)
    done("base", "vlm" if sees else "llm")
    done("prepare", "nutrition-tables" if sees else "visempar")
    for recipe in recipes:
        padding_free = recipe in WITHOUT_PADDING and FAMILIES[name].same_without_padding
        tiny["memory"]["padding_free"] = "on" if padding_free else "off"
        write_params(raw)
        all_the_way(recipe)
        run_dir = Path("data/runs", recipe)
        assert read_plan(recipe).padding_free is padding_free
        certificate = MergeCertificate.read(run_dir / "merge.json")
        assert not certificate.problems()
        assert precision != "fp32" or certificate.logit_deviation < 1e-3
        assert abs(json.loads((run_dir / "metrics.json").read_text())["memory_error"]) < 0.01, recipe
        assert load_config(run_dir / "merged").model_type == name
