"""Attention in a row of several samples, each of which sees itself alone; nothing is computed for what is masked.

transformers calls it by its name, as it does SDPA, and makes no mask for a name that has none: where one sample ends
and the next begins, the positions say. On a GPU all of a row is one call of torch's flash attention for variable
lengths; elsewhere each sample is a call of SDPA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKED = "packed"
"""What transformers calls it, as its other implementations of attention."""


@dataclass(frozen=True)
class Row:
    """The samples of a row."""

    lengths: list[int]
    ends: torch.Tensor
    """(samples + 1,) int32: 0, and where each sample ends."""


_rows = WeakTensorKeyDictionary()
"""By the positions of a row, which all layers are given: else every layer of a model would wait for its GPU."""


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_ids: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """(1, L, H, D), of one row.

    query: (1, H, L, D). key, value: likewise, with a divisor of H heads. position_ids: (1, L), 0 where a sample begins.
    A vision tower, which is not causal and keeps its pictures apart itself, gets SDPA.
    """
    options: dict[str, Any] = {"dropout": dropout, "scaling": scaling}
    if not module.is_causal:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options, **rest)
    assert attention_mask is None, "a row has no padding to mask"
    assert position_ids is not None, "only positions say which tokens are one sample's"
    assert query.shape[0] == 1, query.shape
    assert rest.get("sliding_window") is None, "a window would have to end where a sample begins"
    row = row_of(position_ids)
    if torch.is_autocast_enabled(query.device.type):  # SDPA is in autocast's list, varlen_attn is not
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if dropout == 0.0 and takes_variable_lengths(query):
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        limits = (row.ends, row.ends, max(row.lengths), max(row.lengths))
        output = varlen_attn(query, key, value, *limits, scale=scaling, window_size=(-1, 0), enable_gqa=True)
        assert isinstance(output, torch.Tensor)
        return output[None], None
    samples = zip(*(tensor.split(row.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, *sample, None, **options, is_causal=True)[0] for sample in samples]
    return torch.cat(outputs, dim=1), None


def row_of(position_ids: torch.Tensor) -> Row:
    """position_ids: (1, L)."""
    if (row := _rows.get(position_ids)) is None:
        starts = (position_ids[0] == 0).nonzero().flatten()
        ends = torch.cat([starts, starts.new_tensor([position_ids.shape[1]])])
        row = _rows[position_ids] = Row(ends.diff().tolist(), ends.int())
    return row


def takes_variable_lengths(query: torch.Tensor) -> bool:
    """Whether torch's flash attention takes such a tensor where it lies.

    From Ampere on, in half precision (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
    """
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


AttentionInterface.register(PACKED, packed_attention)
