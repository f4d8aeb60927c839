"""Liger's kernels compute what torch's operations do, take the memory that is predicted, and are refused where not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from stages.kit.models import kernels
from stages.kit.models.kernels import ROTATE, FusedMLP, FusedRMSNorm, fused_kernels
from tests import ROOT
from tests.kit.memory.small import FULL, config_of, peak_bytes, plan_of, recorded
from tools.gpu.models import random_model

PLAN = plan_of(**FULL, fused_kernels=True)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What interpreted.py found."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed: it is for Linux")
    result = subprocess.run(
        [sys.executable, "-m", "tests.kit.models.interpreted"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("model", "parts"), [("detection", {"loss", "vision", "llm"}), ("text", {"loss", "llm"}), ("moe", {"loss", "llm"})]
)
def test_loss_and_gradients_are_those_of_torch(interpreted: dict[str, Any], model: str, parts: set[str]) -> None:
    found = interpreted["differences"][model]
    assert found.keys() == parts
    assert max(found.values()) < 5e-6, found
    assert max(found.values()) > 0, "other kernels round differently: these were the same ones"


@pytest.mark.parametrize("model", ["detection", "text", "moe"])
def test_a_training_takes_the_memory_that_is_recorded(interpreted: dict[str, Any], model: str) -> None:
    measured, predicted = interpreted["memory"][model]
    assert predicted == pytest.approx(measured, rel=0.002)


@pytest.mark.parametrize(
    ("wrong", "what"), [("no weight", "RMS norm"), ("no gradient of up", "gated product"), ("turned back", "rotation")]
)
def test_a_kernel_that_computes_something_else_is_refused(interpreted: dict[str, Any], wrong: str, what: str) -> None:
    assert interpreted["refused"][""] == ""
    assert f"Liger's kernel for the {what} is off" in interpreted["refused"][wrong]
    assert interpreted["left"] == []


def test_less_is_kept_for_backward() -> None:
    settings = {**FULL, "max_length": 512, "micro_batch": 4, "precision": "bf16", "kind": "cuda"}
    fused, plain = (peak_bytes(recorded("text", plan_of(**settings, fused_kernels=used))) for used in (True, False))
    assert fused < 0.97 * plain


def test_only_what_is_known_is_replaced_and_the_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(PLAN, config_of("text"))
    names, other = model.state_dict().keys(), nn.LayerNorm(8)
    model.extra = other
    home = sys.modules[type(model).__module__]
    before = getattr(home, ROTATE)
    with fused_kernels(model, used=True):
        monkeypatch.setattr(kernels, "rotated", lambda *args: ("rotated", *args))
        assert getattr(home, ROTATE)(1, 2, 3, 4) == ("rotated", 1, 2, 3, 4)
    assert getattr(home, ROTATE) is before
    assert type(other) is nn.LayerNorm
    assert model.state_dict().keys() - {"extra.weight", "extra.bias"} == names
    assert sum(type(module) is FusedRMSNorm for module in model.modules()) == 2 * 2 + 1
    assert sum(type(module) is FusedMLP for module in model.modules()) == 2


def test_accelerates_hooks_call_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep the `forward` that they found, on a model whose layers are spread over GPUs."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = random_model(PLAN, config_of("text"))
    norm = model.model.norm
    add_hook_to_module(norm, ModelHook())
    monkeypatch.setattr(kernels, "rms_norm", lambda hidden, *_: hidden * 0)
    with fused_kernels(model, used=True):
        assert not norm(torch.ones(1, 2, len(norm.weight))).any()
