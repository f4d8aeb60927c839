"""Micro-batches go without padding where that is faster, and never where no test shows that it computes the same."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen2_5_VLConfig, Qwen2Config, Qwen2MoeConfig

from stages.core.params.load import load_params
from stages.core.params.schema import DeviceParams
from stages.kit.families import family_of
from stages.kit.models.load import load_config
from stages.kit.planning import faster
from stages.kit.planning.faster import with_fused_kernels, without_padding
from stages.kit.planning.ladder import rungs
from stages.kit.planning.plan import Plan, resolve_plan
from tests import ROOT

PLAN = resolve_plan(load_params(ROOT / "params.yaml"), "r1-llm-only", train_samples=320)
GPU = replace(PLAN, device=DeviceParams(kind="cuda"), precision="bf16", attn="auto")
VLM = load_config(ROOT / "data/tiny/qwen2-vl")


@pytest.mark.parametrize(
    ("plan", "wanted", "config", "chosen", "why"),
    [
        (GPU, "auto", VLM, True, "variable lengths"),
        (replace(GPU, attn="sdpa"), "auto", Qwen2Config(), True, "variable lengths"),
        (replace(GPU, attn="flash_attention_2"), "auto", Qwen2MoeConfig(), True, "variable lengths"),
        (GPU, "off", VLM, False, "memory.padding_free"),
        (replace(GPU, attn="eager"), "auto", VLM, False, "eager"),
        (replace(GPU, precision="fp16"), "auto", VLM, False, "not every GPU for fp16"),
        (replace(GPU, precision="fp16"), "on", VLM, True, "memory.padding_free"),
        (PLAN, "auto", VLM, False, "of a CPU"),
        (PLAN, "on", VLM, True, "memory.padding_free"),
        (GPU, "on", Qwen2Config(use_sliding_window=True, max_window_layers=2), False, "sliding_attention"),
    ],
)
def test_a_plan_says_whether_it_pads_and_why(
    plan: Plan, wanted: Any, config: PreTrainedConfig, chosen: bool, why: str
) -> None:
    found, said = without_padding(plan, wanted, config)
    assert found == chosen
    assert why in said


@pytest.mark.parametrize(
    ("plan", "wanted", "config", "chosen", "why"),
    [
        (GPU, "auto", VLM, True, "is a GPU"),
        (GPU, "off", VLM, False, "memory.kernels"),
        (PLAN, "auto", VLM, False, "need a GPU"),
        (GPU, "auto", Qwen2_5_VLConfig(), False, "no test shows that a qwen2_5_vl"),
    ],
)
def test_a_plan_says_which_kernels_it_takes_and_why(
    plan: Plan, wanted: Any, config: PreTrainedConfig, chosen: bool, why: str
) -> None:
    found, said = with_fused_kernels(plan, wanted, config)
    assert found == chosen
    assert why in said


def test_a_family_that_no_test_shows_to_be_the_same_without_padding_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    untested = replace(family_of("llama"), same_without_padding=False)
    monkeypatch.setattr(faster, "family_of", {"llama": untested}.get)
    found, said = without_padding(GPU, "on", LlamaConfig())
    assert (found, "no test shows that a llama computes the same without" in said) == (False, True)


def test_they_stay_so_on_every_rung_of_the_ladder() -> None:
    lower = list(rungs(replace(GPU, padding_free=True, fused_kernels=True)))
    assert len(lower) > 1
    assert all(plan.padding_free and plan.fused_kernels for plan in lower)
