"""Layers in nf4 take what bitsandbytes gives them."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from stages.kit.memory.allocator import rounded_bytes
from stages.kit.memory.predict import with_depth
from stages.kit.memory.stand_in import fill_without_contents
from stages.kit.memory.step import record_step
from stages.kit.models.load import load_config, meta_model
from stages.kit.planning.plan import resolve_plan
from tests import ROOT
from tests.kit.memory.small import batch_of, processor_of, quantization_tensors, shipped_params


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (200, 96), (8, 20)])
def test_a_layer_is_packed_as_bitsandbytes_packs_it(rows: int, columns: int) -> None:
    packed, state = bnb.functional.quantize_4bit(
        torch.randn(rows, columns), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    layer = bnb.nn.Linear4bit(columns, rows, bias=False)
    fill_without_contents(layer)
    expected = [packed, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    made_up = [layer.weight, *quantization_tensors(nn.Sequential(layer))]
    assert [(tensor.shape, tensor.dtype) for tensor in made_up] == [(t.shape, t.dtype) for t in expected]


def nf4_bytes(numel: int) -> int:
    """Half a byte a weight, a scale of one byte for 64 of them, a float for 256 of those, and the tables."""
    blocks = ceil(numel / 64)
    sizes = (numel // 2, blocks, ceil(blocks / 256) * 4, 16 * 4, 256 * 4, 4)
    return sum(map(rounded_bytes, sizes))


def test_r1_on_a_48_gb_card_holds_its_linear_layers_in_nf4() -> None:
    plan = resolve_plan(replace(shipped_params(), profile="qwen2-vl-7b-48gb"), "r1-llm-only", train_samples=8)
    plan = replace(plan, max_length=64)
    config = with_depth(load_config(ROOT / "stages/kit/models/geometries/Qwen/Qwen2-VL-7B-Instruct"), (2, 1))
    peak = record_step(plan, config, processor_of("detection"), batch_of(plan, config)).peaks()["backward"]

    model = meta_model(config)
    quantized = {
        f"{name}.weight": module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    assert len(quantized) == 2 * 7 + 1 * 4 + 2  # of each layer, each block, and the merger
    others = [
        rounded_bytes(parameter.numel() * 2) for name, parameter in model.named_parameters() if name not in quantized
    ]
    by_hand = sum(map(nf4_bytes, quantized.values())) + sum(others)
    assert peak["weights"] - by_hand == pytest.approx(0, abs=4096)  # inverse frequencies
    # Weights are dequantized one at a time, the largest to bf16, beside its product.
    assert peak["temporaries"] > 3584 * 18944 * 2
