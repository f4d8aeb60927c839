"""A tiny random model of each family through all stages: plan, training, certificate, evaluation; some in 16 bits."""

import filecmp
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stages.core.families import FAMILIES
from stages.models.certificate import MergeCertificate
from stages.models.load import load_config
from stages.planning.plan import read_plan
from tests.stage_runs import all_the_way, done, made, small_params, write_params
from tests.tiny_families import save_tiny_family

pytestmark = pytest.mark.pipeline

# Shipped recipes of the other families: tests/test_stages.py, tests/test_tasks.py, tests/test_build.py.
LORA = {"rank": 8, "alpha": 16, "targets": {"llm": ["all-linear"]}}
TRIED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3_text": ("bf16", "amr-ptr", {"lora": LORA}),
    "llama": ("fp16", "amr-ptr", {"lora": LORA}),
    "phi3": ("fp32", "amr-ptr", {"lora": LORA}),
    "qwen3": (
        "fp32",
        "amr-baseline",
        {"parts": {"llm": "full"}, "lora": None, "template_options": {"enable_thinking": True}},
    ),
    "qwen2_5_vl": ("bf16", "r4-joint", {}),
    "qwen3_vl": ("fp16", "r2-vision-only", {}),
}
"""Precision and recipe of each."""


def test_every_family_is_tried() -> None:
    assert FAMILIES.keys() == {*TRIED, "qwen2", "qwen2_moe", "qwen2_vl"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data for texts and for images."""
    stages = (("prepare", "nutrition-tables"), ("prepare", "visempar"))
    return made(tmp_path_factory.mktemp("prepared"), small_params(), *stages)


@pytest.mark.parametrize("name", TRIED)
def test_a_family_goes_all_the_way(name: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    precision, recipe, changes = TRIED[name]
    sees, padding_free = FAMILIES[name].vision is not None, FAMILIES[name].same_without_padding
    (tmp_path / "model").mkdir()
    raw = small_params(save_tiny_family(name, tmp_path / "model"))
    tiny = raw["profiles"]["tiny"]
    tiny["bases"]["llm"] = f"folder:{tmp_path / 'model'}"
    tiny["memory"] |= {"precision": precision, "padding_free": "on" if padding_free else "off"}
    raw["recipes"][recipe].update({"quantization": "none", "max_length": 4096, "max_steps": 2, **changes})
    write_params(raw)
    done("base", "vlm" if sees else "llm")
    all_the_way(recipe)
    run_dir = Path("data/runs", recipe)
    assert read_plan(recipe).padding_free is padding_free
    certificate = MergeCertificate.read(run_dir / "merge.json", fix="")
    assert not certificate.problems()
    assert precision != "fp32" or certificate.logit_deviation < 1e-3
    assert abs(json.loads((run_dir / "metrics.json").read_text())["memory_error"]) < 0.01
    assert load_config(run_dir / "merged").model_type == name
    template = (run_dir / "merged/chat_template.jinja").read_text()
    assert ("set enable_thinking = true %}" in template) == ("template_options" in changes)
    assert filecmp.cmp(tmp_path / "model/tokenizer.json", run_dir / "merged/tokenizer.json", shallow=False)
