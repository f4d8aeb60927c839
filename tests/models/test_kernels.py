"""Modules and kernels against the ones that they replace."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional as F
from transformers.integrations.moe import grouped_mm_experts_forward

from stages.core.params.schema import DeviceParams, LoraParams
from stages.data.conversation import Conversation
from stages.internals.torch_internals import PatchProjection
from stages.internals.transformers_internals import attending_by
from stages.models import kernels
from stages.models.adapters import apply_recipe
from stages.models.kernels import (
    PACKED_ATTENTION,
    PACKED_IMAGES,
    ThreadIndependentLayerNorm,
    autocast_experts,
    packed_attention,
    replace_modules,
)
from stages.models.load import load_model
from stages.models.merge import probe_logits, weight_digests
from stages.models.prompts import encode, load_processor
from tests.plans import recipe_of


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_gradients_do_not_depend_on_threads(bias: bool, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.manual_seed(0)
    rows, upstream = torch.randn(900, 700), torch.randn(900, 700)
    plain, *ours = norms = [kind(700, bias=bias) for kind in (nn.LayerNorm, *[ThreadIndependentLayerNorm] * 3)]
    for count, norm in zip((1, 1, 2, 4), norms, strict=True):
        torch.set_num_threads(count)
        norm(rows).backward(upstream)
    for parameters in zip(*(norm.parameters() for norm in ours), strict=True):
        assert all(torch.equal(parameter.grad, parameters[0].grad) for parameter in parameters)
    for one, other in zip(ours[0].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[0](rows), plain(rows))


def test_a_patch_projection_equals_its_convolution_with_a_bias() -> None:
    shape: dict[str, Any] = {"kernel_size": (2, 7, 7), "stride": (2, 7, 7)}
    convolution, projection = nn.Conv3d(3, 16, **shape), PatchProjection(3, 16, **shape)
    projection.load_state_dict(convolution.state_dict())
    patches = torch.randn(5, 3, 2, 7, 7)
    torch.testing.assert_close(projection(patches), convolution(patches))
    with pytest.raises(AssertionError):
        projection(torch.randn(1, 3, 2, 14, 7))


@pytest.mark.parametrize("hooked", [False, True])
def test_a_loaded_vision_tower_has_no_convolution_and_the_same_logits_and_gradients(
    hooked: bool, tiny_vlm: Path, probes: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """hooked: accelerate's hooks were there first, as on several GPUs."""
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    model = load_model(tiny_vlm, device=DeviceParams(kind="cpu"), precision="fp32").eval()
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "it gives wrong completions on a B200"
    if hooked:
        model.model.visual.patch_embed.proj.__class__ = nn.Conv3d
        dispatch_model(model, {"": "cpu"}, force_hooks=True)
        replace_modules(model, "sdpa")
    inputs = encode(load_processor(tiny_vlm, None), probes, padding_side="right")
    plain = type(model).from_pretrained(tiny_vlm, dtype=torch.float32).eval()
    expected = plain(**inputs).logits
    expected.square().mean().backward()
    assert weight_digests(model) == weight_digests(plain)

    def convolve(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("a convolution")

    monkeypatch.setattr(nn.Conv3d, "_conv_forward", convolve)
    found = model(**inputs).logits
    found.square().mean().backward()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    ours, theirs = (each.model.visual.patch_embed.proj.weight.grad for each in (model, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_under_autocast_multiply_in_16_bits_with_gradients_in_fp32(
    tiny_mixture: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = tiny_mixture[0].model.layers[0].mlp.experts
    torch.manual_seed(0)
    hidden, top = torch.randn(6, experts.hidden_dim), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]])
    exact = grouped_mm_experts_forward(experts, hidden, top, torch.full((6, 2), 0.5))
    used: list[tuple[torch.dtype, ...]] = []
    grouped_mm = torch.nn.functional.grouped_mm

    def noted(*factors: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        used.append(tuple(each.dtype for each in factors))
        return grouped_mm(*factors, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", noted)
    with torch.autocast("cpu", dtype=dtype):
        output = autocast_experts(experts, hidden.to(dtype), top, torch.full((6, 2), 0.5, dtype=dtype))
    assert used == [(dtype, dtype)] * 2
    torch.testing.assert_close(output.float(), exact, rtol=0.05, atol=0.05)
    gradient, *_ = torch.autograd.grad(output.float().square().sum(), [experts.gate_up_proj])
    assert gradient.dtype == torch.float32
    assert gradient.any()


LENGTHS = [5, 1, 9, 3]
ROW: Any = {"cu_seq_lens_q": torch.tensor([0, 5, 6, 15, 18], dtype=torch.int32), "max_length_q": 9, "scaling": 0.3}
HEADS, KEY_HEADS, WIDTH = 4, 2, 16
DECODER: Any = SimpleNamespace(is_causal=True, num_key_value_groups=HEADS // KEY_HEADS)
TOWER: Any = SimpleNamespace(is_causal=False, num_key_value_groups=HEADS // KEY_HEADS)


def states(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query, *rest = (torch.randn(1, heads, sum(LENGTHS), WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    return query.to(dtype), rest[0].to(dtype), rest[1].to(dtype)


def masked(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of the row with a block mask: (1, L, H, D)."""
    mask = torch.block_diag(*(torch.ones(length, length) for length in LENGTHS)).bool()
    mask = mask.tril() if module.is_causal else mask
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


@pytest.mark.parametrize("module", [DECODER, TOWER])
@pytest.mark.parametrize("autocast", [False, True])
def test_samples_of_a_packed_row_see_themselves_alone_and_on_a_gpu_by_one_call_of_flash_attention(
    monkeypatch: pytest.MonkeyPatch, autocast: bool, module: Any
) -> None:
    """torch's kernel runs on a GPU only: its stand-in checks its arguments."""
    torch.testing.assert_close(packed_attention(module, *states(), None, **ROW)[0], masked(module, *states()))
    assert not kernels.takes_variable_lengths(states(torch.bfloat16)[0]), "on a CPU"
    monkeypatch.setattr(kernels, "takes_variable_lengths", lambda query: query.dtype == torch.bfloat16)
    monkeypatch.setattr(kernels, "varlen_attn", plain_varlen_attn)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        given = states(torch.float32 if autocast else torch.bfloat16)  # fp32 as rotary embeddings may leave it
        output, _ = packed_attention(module, *given, None, **ROW)
    assert output.shape == (1, sum(LENGTHS), HEADS, WIDTH)
    torch.testing.assert_close(output.float(), masked(module, *states()), rtol=0, atol=0.03)


def test_a_model_for_packed_rows_attends_to_padded_ones_for_a_while(tiny_vlm: Path, probes: list[Conversation]) -> None:
    def implementations() -> set[str]:
        return {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}

    device, processor = DeviceParams(kind="cpu"), load_processor(tiny_vlm, None)
    plain = probe_logits(load_model(tiny_vlm, device=device, precision="fp32").eval(), processor, probes)
    model = load_model(tiny_vlm, device=device, precision="fp32", padding_free=True).eval()
    before = implementations()
    assert PACKED_IMAGES in before
    with attending_by(model, "sdpa", instead_of=PACKED_ATTENTION):
        assert implementations() == {"sdpa"}
        assert torch.equal(probe_logits(model, processor, probes), plain)
    assert implementations() == before


def adapted_model(folder: Path, quantization: str, dropout: float = 0.0, **variant: Any) -> Any:
    """r4's parts with adapters that are not zero."""
    base = load_model(folder, device=DeviceParams(kind="cpu"), precision="fp32", quantization=quantization)
    torch.manual_seed(1)
    targets: Any = {"llm": ("all-linear",), "vision": ("all-linear",)}
    lora = LoraParams(rank=4, alpha=12, dropout=dropout, targets=targets, **variant)
    model = apply_recipe(base, recipe_of(llm="lora", vision="lora", lora=lora)).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def gradients_of(model: Any, inputs: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: each.grad for name, each in model.named_parameters() if each.requires_grad}}


@pytest.mark.parametrize(
    ("quantization", "dtype", "tolerance"),
    [("none", None, 1e-5), ("nf4", None, 1e-5), ("none", torch.bfloat16, 0.05), ("nf4", torch.bfloat16, 0.05)],
)
def test_adapters_without_copies_have_pefts_loss_and_gradients(
    quantization: str, dtype: torch.dtype | None, tolerance: float, tiny_vlm: Path, probes: list[Conversation]
) -> None:
    inputs = encode(load_processor(tiny_vlm, None), probes, padding_side="right")
    expected = gradients_of(adapted_model(tiny_vlm, quantization), inputs, dtype)
    model = adapted_model(tiny_vlm, quantization)
    kernels.fuse_adapters(model)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert all("forward" in vars(layer) for layer in layers)
    found = gradients_of(model, inputs, dtype)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        off = float((found[name] - gradient).norm() / gradient.norm().clamp(min=1e-12))
        assert off < tolerance, name
        assert (quantization == "none" and dtype is None) or gradient.any(), name


def test_adapters_without_copies_drop_what_pefts_drop(tiny_vlm: Path, probes: list[Conversation]) -> None:
    inputs = encode(load_processor(tiny_vlm, None), probes, padding_side="right")
    one, other = (adapted_model(tiny_vlm, "none", dropout=0.3) for _ in range(2))
    kernels.fuse_adapters(other)
    expected, found = gradients_of(one, inputs, None), gradients_of(other, inputs, None)
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert float(found["loss"]) != pytest.approx(float(gradients_of(other.eval(), inputs, None)["loss"]), rel=1e-3)


@pytest.mark.parametrize("variant", [{"dora": True}, {"rslora": True}], ids=str)
def test_dora_keeps_its_forward_and_rslora_its_scale(
    variant: dict[str, Any], tiny_vlm: Path, probes: list[Conversation]
) -> None:
    inputs = encode(load_processor(tiny_vlm, None), probes, padding_side="right")
    model = adapted_model(tiny_vlm, "none", **variant)
    expected = gradients_of(model, inputs, None)["loss"]
    assert float(expected) != pytest.approx(float(gradients_of(adapted_model(tiny_vlm, "none"), inputs, None)["loss"]))
    kernels.fuse_adapters(model)
    assert float(gradients_of(model, inputs, None)["loss"]) == pytest.approx(float(expected), rel=1e-5)
