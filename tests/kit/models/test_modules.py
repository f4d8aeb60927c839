"""Modules of ours against the ones they take the place of."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from transformers.integrations.moe import grouped_mm_experts_forward

from stages.core.params.schema import DeviceParams
from stages.kit.data.conversation import Conversation
from stages.kit.models.kernels import PatchProjection, ThreadIndependentLayerNorm, autocast_experts, replace_modules
from stages.kit.models.load import load_model
from stages.kit.models.merge import probe_logits, weight_digests
from stages.kit.models.prompts import load_processor

CPU = DeviceParams(kind="cpu")


@pytest.mark.parametrize("bias", [True, False])
def test_a_patch_projection_computes_what_the_convolution_does(bias: bool) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv3d(3, 16, kernel_size=(2, 7, 7), stride=(2, 7, 7), bias=bias)
    projection = PatchProjection(3, 16, kernel_size=(2, 7, 7), stride=(2, 7, 7), bias=bias)
    projection.load_state_dict(convolution.state_dict())
    patches = torch.randn(5, 3, 2, 7, 7)
    outputs = [module(patches) for module in (convolution, projection)]
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().sum().backward()
    for ours, theirs in zip(projection.parameters(), convolution.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-4)


def test_a_patch_projection_takes_whole_patches_only() -> None:
    with pytest.raises(AssertionError, match=r"3, 2, 14, 7\].*3, 2, 7, 7\]"):
        PatchProjection(3, 16, kernel_size=(2, 7, 7), stride=(2, 7, 7))(torch.randn(1, 3, 2, 14, 7))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("bias", [True, False])
def test_a_trained_layer_norm_has_the_same_gradients_by_any_number_of_threads(
    bias: bool, threads: Callable[[int], None]
) -> None:
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
def test_a_loaded_vision_tower_convolves_nothing_and_keeps_names_and_logits(
    hooked: bool, tiny_vlm: Path, probes: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where accelerate's hooks were there first, as on several GPUs."""
    model = load_model(tiny_vlm, device=CPU, precision="fp32").eval()
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


def test_without_autocast_experts_compute_as_transformers_has_them(experts: Any) -> None:
    inputs = routed(experts, torch.float32)
    assert autocast_experts(experts, *inputs).equal(grouped_mm_experts_forward(experts, *inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_experts_in_fp32_are_multiplied_in_16_bits_and_get_gradients_in_fp32(
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
