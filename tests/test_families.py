"""A tiny random model of each family through all stages: plan, training, certificate, evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.kit.families import FAMILIES
from stages.kit.models.certificate import read_certificate
from stages.kit.models.load import load_config
from stages.kit.planning.plan import read_plan
from tests.test_stages import done, small_params, write_params
from tests.tiny_families import save_tiny_family

pytestmark = pytest.mark.pipeline

LORA = {"rank": 8, "alpha": 16, "targets": {"llm": ["all-linear"]}}
TEXT: dict[str, Any] = {"amr-ptr": {"lora": LORA}, "amr-baseline": {"parts": {"llm": "full"}, "lora": None}}
PICTURES: dict[str, Any] = {"r1-llm-only": {}, "r2-vision-only": {}, "r4-joint": {}}
WITHOUT_PADDING = ("amr-ptr", "r4-joint")


def prepared(name: str, recipes: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Parameters in the working folder, a base of the family and data. recipes: with what is changed of each."""
    folder = tmp_path / "model"
    folder.mkdir()
    raw = small_params(save_tiny_family(name, folder))
    tiny = raw["profiles"]["tiny"]
    tiny["bases"]["llm"] = f"folder:{folder}"
    tiny["datasets"]["visempar"]["limit"] = {"train": 10, "val": 4}
    for recipe, changes in recipes.items():
        raw["recipes"][recipe].update(changes, quantization="none", max_length=4096, max_steps=2)
    write_params(raw)
    done("base", "vlm" if FAMILIES[name].vision else "llm")
    done("prepare", "nutrition-tables" if FAMILIES[name].vision else "visempar")
    return raw


# Those of the shipped recipes go all the way in tests/test_stages.py, test_amr_stages.py and test_build.py.
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"qwen2_vl", "qwen2", "qwen2_moe"}))
def test_a_model_of_the_family_goes_all_the_way(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipes = PICTURES if FAMILIES[name].vision else TEXT
    raw = prepared(name, recipes, tmp_path)
    for recipe in recipes:
        padding_free = recipe in WITHOUT_PADDING and FAMILIES[name].same_without_padding
        raw["profiles"]["tiny"]["memory"]["padding_free"] = "on" if padding_free else "off"
        write_params(raw)
        for stage in ("plan", "train", "merge", "evaluate"):
            done(stage, recipe)
        run_dir = Path("data/runs", recipe)
        assert read_plan(recipe).padding_free is padding_free
        certificate = read_certificate(run_dir / "merge.json", recipe)
        assert not certificate.problems()
        assert certificate.logit_deviation < 1e-3
        metrics = json.loads((run_dir / "metrics.json").read_text())
        assert abs(metrics["memory_error"]) < 0.01, recipe
        assert load_config(run_dir / "merged").model_type == name
