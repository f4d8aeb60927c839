"""Liger's kernels compute what torch's operations do, and take the memory that is predicted, in every family."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

from stages.core.families import FAMILIES
from stages.models import kernels
from stages.models.kernels import fused_kernels
from tests import ROOT
from tests.memory.small import FULL, config_of, plan_of
from tools.timing import random_model

FUSED = [model_type for model_type, family in FAMILIES.items() if family.fused_like]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """The output of interpreted.py."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed: it is for Linux")
    result = subprocess.run(
        [sys.executable, "-m", "tests.models.interpreted"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert found["left"] == [], "modules of transformers are as before"
    return found


@pytest.mark.parametrize("model_type", FUSED)
def test_fused_loss_and_gradients_are_those_of_torch(interpreted: dict[str, Any], model_type: str) -> None:
    found = interpreted["differences"][model_type]
    assert found.keys() == {"loss", "llm", *(["vision"] if FAMILIES[model_type].vision else [])}
    assert max(found.values()) < 5e-6, found
    assert max(found.values()) > 0, "other kernels round differently: these were the same ones"


@pytest.mark.parametrize("model_type", FUSED)
def test_fused_training_takes_the_memory_that_is_recorded(interpreted: dict[str, Any], model_type: str) -> None:
    measured, predicted = interpreted["memory"][model_type]
    assert predicted == pytest.approx(measured, rel=1e-4)


def test_a_kernel_that_computes_something_else_is_refused(interpreted: dict[str, Any]) -> None:
    (refusal,) = interpreted["refused"]  # of the wrong one alone
    assert "memory.kernels: off" in refusal


def test_accelerates_hooks_call_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with layers on several GPUs has hooks, which hold the `forward` that they found."""

    def fuse(model: Any) -> None:
        model.model.norm.forward = lambda hidden: hidden * 0

    class Moved(ModelHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            return output + 1

    model: Any = random_model(plan_of(**FULL), config_of("text"))
    norm = model.model.norm
    add_hook_to_module(norm, Moved())
    monkeypatch.setattr(kernels, "fuse_layers", fuse)
    with fused_kernels(model, used=True):
        assert (norm(torch.ones(1, 2, len(norm.weight))) == 1).all()
