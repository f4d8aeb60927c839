"""Each sample of a row sees itself alone, by whichever kernels it is computed."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from stages.kit.models import kernels as module
from stages.kit.models.kernels import packed_attention, row_of, takes_variable_lengths

LENGTHS = [5, 1, 9, 3]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
HEADS, KEY_HEADS, WIDTH = 4, 2, 16
DECODER: Any = SimpleNamespace(is_causal=True, num_key_value_groups=HEADS // KEY_HEADS)


def states(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query, *rest = (torch.randn(1, heads, sum(LENGTHS), WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    return query.to(dtype), rest[0].to(dtype), rest[1].to(dtype)


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The same by a block mask. (1, L, H, D)"""
    sample = (POSITIONS == 0).cumsum(1)
    mask = (sample == sample.T) & torch.ones(len(sample[0]), len(sample[0]), dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True, scale=0.3).transpose(1, 2)


def plain_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest: int,
    key_longest: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What torch's does on a GPU, as its documentation has it. (L, H, D)"""
    assert starts.dtype == key_starts.dtype == torch.int32
    assert starts.tolist() == key_starts.tolist() == [0, 5, 6, 15, 18]
    assert longest == key_longest == 9
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    options: Any = {"is_causal": window_size == (-1, 0), "scale": scale, "enable_gqa": enable_gqa}
    parts = []
    for start, stop in pairwise(starts.tolist()):
        sample: Any = [tensor[start:stop].transpose(0, 1) for tensor in (query, key, value)]
        parts.append(F.scaled_dot_product_attention(*sample, **options).transpose(0, 1))
    return torch.cat(parts)


def test_a_sample_sees_itself_alone() -> None:
    output, _ = packed_attention(DECODER, *states(), None, scaling=0.3, position_ids=POSITIONS)
    torch.testing.assert_close(output, masked(*states()))


@pytest.mark.parametrize("autocast", [False, True])
def test_so_it_does_where_a_gpu_takes_all_of_a_row_at_once(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> None:
    """torch's kernel runs on a GPU alone: what stands in for it checks what it is given."""
    monkeypatch.setattr(module, "takes_variable_lengths", lambda query: query.dtype == torch.bfloat16)
    monkeypatch.setattr(module, "varlen_attn", plain_varlen_attn)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        given = states(torch.float32 if autocast else torch.bfloat16)  # fp32 as rotary embeddings may leave it
        output, _ = packed_attention(DECODER, *given, None, scaling=0.3, position_ids=POSITIONS)
    assert output.shape == (1, sum(LENGTHS), HEADS, WIDTH)
    torch.testing.assert_close(output.float(), masked(*states()), rtol=0, atol=0.03)


def test_a_vision_tower_gets_what_it_asks_for() -> None:
    tower: Any = SimpleNamespace(is_causal=False)
    query = states()[0]
    output, _ = packed_attention(tower, query, query, query, None, is_causal=False)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(query, query, query).transpose(1, 2))


@pytest.mark.parametrize(
    ("mask", "options", "reason"),
    [
        (torch.ones(1, 18), {"position_ids": POSITIONS}, "no padding to mask"),
        (None, {}, "only positions say"),
        (None, {"position_ids": POSITIONS, "sliding_window": 4}, "a window would have to end"),
    ],
)
def test_what_is_no_packed_row_is_refused(mask: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        packed_attention(DECODER, *states(), mask, **options)


def test_where_samples_end_is_looked_up_once_for_all_layers() -> None:
    """Each look waits for the GPU."""
    assert row_of(POSITIONS).lengths == LENGTHS
    assert row_of(POSITIONS) is row_of(POSITIONS)
    other = torch.tensor([[0, 1, 0]])
    assert row_of(other).lengths == [2, 1]
    assert row_of(other).ends.tolist() == [0, 2, 3]


def test_a_cpu_takes_no_variable_lengths() -> None:
    assert not takes_variable_lengths(states(torch.bfloat16)[0])
