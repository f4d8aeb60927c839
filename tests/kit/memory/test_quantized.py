"""Layers in nf4 take what bitsandbytes gives them."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from stages.kit.memory.stand_in import fill_without_contents
from tests.kit.memory.small import quantization_tensors


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
