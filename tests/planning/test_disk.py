import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.core.params.schema import ModelParams
from stages.planning.disk import disk_use, require_room
from stages.planning.plan import Plan
from stages.planning.resolve import resolve_plan
from tests import ROOT
from tests.plans import changed

PARAMS = load_params(ROOT / "params.yaml")
LEAN = replace(PARAMS, models=ModelParams(keep_merged=False))


def counted_plan(recipe: str, precision: str, **trainable: int) -> Plan:
    parts = {"vision": 0, "projector": 0, "llm": 0, **trainable}
    plan = resolve_plan(PARAMS, recipe, train_samples=32)
    return changed(plan, precision=precision, trainable={**parts, "total": sum(trainable.values()), "all": 1_100})


def test_trained_weights_have_4_bytes_merged_ones_the_precision_and_adapters_are_merged_away() -> None:
    lora = disk_use(counted_plan("r1-llm-only", "bf16", llm=100), PARAMS)
    assert (lora.trained_bytes, lora.merged_bytes) == (400, 2_000)
    full = disk_use(counted_plan("r2-vision-only", "fp32", vision=100), PARAMS)
    assert (full.trained_bytes, full.merged_bytes) == (400, 4_400)
    assert full.checkpoints_bytes == (PARAMS.checkpoints.keep + 1) * 3 * 400
    plan = counted_plan("r2-vision-only", "fp32", vision=100)
    assert plan.validation is not None
    plan = replace(plan, validation=replace(plan.validation, keep_best=True))
    assert disk_use(plan, PARAMS).checkpoints_bytes == (2 * PARAMS.checkpoints.keep + 1) * 3 * 400


def test_without_merged_models_only_what_others_start_from_stays() -> None:
    assert {name: LEAN.leaves_weights(name) for name in ("r1-llm-only", "r2-vision-only", "r3-two-stage")} == {
        "r1-llm-only": False,
        "r2-vision-only": True,  # of r3-two-stage
        "r3-two-stage": False,
    }
    assert LEAN.leaves_weights("moe-expert-qmsum"), "a build's expert"
    assert LEAN.leaves_weights("amr-ptr"), "predictions take it"
    assert all(PARAMS.leaves_weights(name) for name in PARAMS.recipes)
    use = disk_use(counted_plan("r1-llm-only", "bf16", llm=100), LEAN)
    assert (use.merged_bytes, use.keeps_merged) == (2_000, False)
    assert "while it is certified" in str(use)


def test_too_little_room_is_refused_with_what_there_is_and_what_helps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30))
    require_room(2**30, tmp_path, what="train r1")
    with pytest.raises(UserError, match=r"train r1 takes up to 2.00 GiB of disk, but .* has 1.00 GiB free.*dvc gc"):
        require_room(2**31, tmp_path, what="train r1")
