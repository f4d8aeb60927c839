"""A recipe without padding, by the pipeline's stages: as planned, as predicted, and with the result of a padded one."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.core.params.schema import PaddingFree
from stages.kit.planning.plan import read_plan
from tests.test_stages import done, run, small_params, write_params

pytestmark = pytest.mark.pipeline

RECIPE = "r4-joint"


def trained(tiny_vlm: Path, how: PaddingFree) -> dict[str, Any]:
    raw = small_params(tiny_vlm)
    raw["profiles"]["tiny"]["memory"]["padding_free"] = how
    raw["profiles"]["tiny"]["dataloader_workers"] = 1
    raw["recipes"][RECIPE]["lora"]["dropout"] = 0.0
    write_params(raw)
    planned = run("plan", RECIPE)
    assert planned.exit_code == 0, planned.output
    done("train", RECIPE)
    run_dir = Path("data/runs", RECIPE)
    memory = json.loads((run_dir / "memory.json").read_text())
    return {
        "said": planned.output,
        "padding_free": read_plan(RECIPE).padding_free,
        "predicted_gib": memory["allocated_gib"],
        **json.loads((run_dir / "training/training.json").read_text()),
    }


def test_a_recipe_without_padding_is_planned_predicted_and_trained_as_one_with(
    tiny_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_params(small_params(tiny_vlm))
    done("base", "vlm")
    done("prepare", "nutrition-tables")
    packed, padded = trained(tiny_vlm, "on"), trained(tiny_vlm, "auto")
    assert (packed["padding_free"], padded["padding_free"]) == (True, False)
    assert "micro-batches are without padding, as memory.padding_free says" in packed["said"]
    assert "micro-batches are padded, as the published results of a CPU" in padded["said"]
    assert packed["final_loss"] == pytest.approx(padded["final_loss"], rel=1e-4)
    for one in (packed, padded):
        assert one["predicted_gib"] == pytest.approx(one["peak_memory_bytes"] / 2**30, rel=0.01)
