"""Modules and kernels against the ones that they replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from torch.nn import functional as F
from transformers.integrations.moe import grouped_mm_experts_forward

from stages.core.params.schema import DeviceParams
from stages.kit.data.conversation import Conversation
from stages.kit.internals.torch_internals import PatchProjection
from stages.kit.models import kernels
from stages.kit.models.kernels import (
    ThreadIndependentLayerNorm,
    autocast_experts,
    packed_attention,
    replace_modules,
)
from stages.kit.models.load import load_model
from stages.kit.models.merge import probe_logits, weight_digests
from stages.kit.models.prompts import load_processor


@pytest.mark.parametrize("bias", [True, False])
def test_a_patch_projection_equals_its_convolution(bias: bool) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv3d(3, 16, kernel_size=(2, 7, 7), stride=(2, 7, 7), bias=bias)
    projection = PatchProjection(3, 16, kernel_size=(2, 7, 7), stride=(2, 7, 7), bias=bias)
    projection.load_state_dict(convolution.state_dict())
    patches = torch.randn(5, 3, 2, 7, 7)
    with pytest.raises(AssertionError, match=r"3, 2, 14, 7\].*3, 2, 7, 7\]"):
        projection(torch.randn(1, 3, 2, 14, 7))
    outputs = [module(patches) for module in (convolution, projection)]
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().sum().backward()
    for ours, theirs in zip(projection.parameters(), convolution.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-4)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_gradients_do_not_depend_on_threads(bias: bool, threads: Callable[[int], None]) -> None:
    torch.manual_seed(0)
    rows, upstream = torch.randn(900, 700), torch.randn(900, 700)
    norms = [kind(700, bias=bias) for kind in (nn.LayerNorm, *[ThreadIndependentLayerNorm] * 3)]
    for count, norm in zip((1, 1, 2, 4), norms, strict=True):
        threads(count)
        norm(rows).backward(upstream)
    plain, *ours = norms
    for parameters in zip(*(norm.parameters() for norm in ours), strict=True):
        assert all(torch.equal(parameter.grad, parameters[0].grad) for parameter in parameters)
    for one, other in zip(ours[0].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[0](rows), plain(rows))


@pytest.mark.parametrize("hooked", [False, True])
def test_a_loaded_vision_tower_has_no_convolution_and_the_same_logits(
    hooked: bool, tiny_vlm: Path, probes: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """hooked: accelerate's hooks were there first, as on several GPUs."""
    model = load_model(tiny_vlm, device=DeviceParams(kind="cpu"), precision="fp32").eval()
    if hooked:
        plain_conv = model.model.visual.patch_embed.proj
        plain_conv.__class__ = nn.Conv3d
        dispatch_model(model, {"": "cpu"}, force_hooks=True)
        replace_modules(model)
    processor = load_processor(tiny_vlm, None)
    plain = type(model).from_pretrained(tiny_vlm, dtype=torch.float32).eval()
    expected = probe_logits(plain, processor, probes)
    assert weight_digests(model) == weight_digests(plain)

    def convolve(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("a convolution")

    monkeypatch.setattr(nn.Conv3d, "_conv_forward", convolve)
    for ours, theirs in zip(probe_logits(model, processor, probes), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture
def experts(tiny_mixture: tuple[Any, Any]) -> Any:
    return tiny_mixture[0].model.layers[0].mlp.experts


def routed(experts: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(6, experts.hidden_dim, dtype=dtype, requires_grad=True)
    return hidden, torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]]), torch.full((6, 2), 0.5, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_under_autocast_multiply_in_16_bits_with_gradients_in_fp32(
    experts: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = routed(experts, dtype)
    exact = grouped_mm_experts_forward(experts, *routed(experts, torch.float32))
    used: list[tuple[torch.dtype, ...]] = []
    grouped_mm = torch.nn.functional.grouped_mm

    def noted(*factors: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        used.append(tuple(each.dtype for each in factors))
        return grouped_mm(*factors, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", noted)
    with torch.autocast("cpu", dtype=dtype):
        output = autocast_experts(experts, *inputs)
    assert used == [(dtype, dtype)] * 2
    torch.testing.assert_close(output.float(), exact, rtol=0.05, atol=0.05)
    gradient, *_ = torch.autograd.grad(output.float().square().sum(), [experts.gate_up_proj])
    assert gradient.dtype == torch.float32
    assert gradient.any()


LENGTHS = [5, 1, 9, 3]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
HEADS, KEY_HEADS, WIDTH = 4, 2, 16
DECODER: Any = SimpleNamespace(is_causal=True, num_key_value_groups=HEADS // KEY_HEADS)


def states(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query, *rest = (torch.randn(1, heads, sum(LENGTHS), WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    return query.to(dtype), rest[0].to(dtype), rest[1].to(dtype)


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of the row with a block mask: (1, L, H, D)."""
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
    """torch's varlen_attn by its documentation: (L, H, D)."""
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


def test_packed_samples_see_only_themselves() -> None:
    output, _ = packed_attention(DECODER, *states(), None, scaling=0.3, position_ids=POSITIONS)
    torch.testing.assert_close(output, masked(*states()))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_packed_row_is_one_call_of_flash_attention_on_a_gpu(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> None:
    """torch's kernel runs on a GPU only: its stand-in checks its arguments."""
    assert not kernels.takes_variable_lengths(states(torch.bfloat16)[0]), "on a CPU"
    monkeypatch.setattr(kernels, "takes_variable_lengths", lambda query: query.dtype == torch.bfloat16)
    monkeypatch.setattr(kernels, "varlen_attn", plain_varlen_attn)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        given = states(torch.float32 if autocast else torch.bfloat16)  # fp32 as rotary embeddings may leave it
        output, _ = packed_attention(DECODER, *given, None, scaling=0.3, position_ids=POSITIONS)
    assert output.shape == (1, sum(LENGTHS), HEADS, WIDTH)
    torch.testing.assert_close(output.float(), masked(*states()), rtol=0, atol=0.03)
