"""Modules and kernels that compute what a model's own do, faster or more repeatably: same weights, same names.

Attention over a row of several samples, modules that replace transformers' own, adapters without copies, and Liger's
kernels for RMS norms, gated products and rotations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from stages.core.families import family_of
from stages.internals.accelerate_internals import hooks_kept
from stages.internals.torch_internals import PatchProjection, varlen_attn
from stages.internals.transformers_internals import set_attention


class ThreadIndependentLayerNorm(nn.LayerNorm):
    """A layer norm that gives its trained weights the same gradients with any number of CPU threads.

    torch's own backward gives each thread some of the rows and adds up the threads' sums
    (aten/src/ATen/native/cpu/layer_norm_kernel.cpp); the backward of a product adds up rows in their order.
    """

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: (..., *normalized_shape). Returns the same shape."""
        if rows.is_cuda or not self.elementwise_affine:
            return super().forward(rows)
        normalized = F.layer_norm(rows, self.normalized_shape, eps=self.eps) * self.weight
        bias: torch.Tensor | None = self.bias  # its annotation says Tensor, but it may be None
        return normalized if bias is None else normalized + bias


def turn_off_cudnn_attention() -> None:
    """Leave SDPA to torch's own kernels in this process, which training takes anyway: cuDNN's is not deterministic.

    On a B200 torch 2.13 with cuDNN 9.20 gives wrong greedy completions for fewer than 8 key heads
    (pytorch/pytorch#193893), and on Hopper it makes a plan for every new length, one a token.
    """
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)


def replace_modules(model: PreTrainedModel, attn: str) -> PreTrainedModel:
    """Make a model's patch projection a PatchProjection, and its layer norms thread-independent ones, in place.

    Every model passes here, loaded or new, so that none attends by cuDNN.

    attn: transformers' name of the attention that the model was loaded with.
    """
    turn_off_cudnn_attention()
    if attn == PACKED and hasattr(model.config, "vision_config"):
        set_attention(model, model.config.vision_config, PACKED_IMAGES)
    for name, module in model.named_modules():
        if type(module) is nn.Conv3d and name.endswith("patch_embed.proj"):
            module.__class__ = PatchProjection
        elif type(module) is nn.LayerNorm:
            module.__class__ = ThreadIndependentLayerNorm
    return model


EXPERTS = "autocast_grouped_mm"
"""transformers' name of `autocast_experts`, among its implementations of experts."""


def autocast_experts(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' grouped matrix products of experts, in autocast's precision under autocast.

    torch's grouped_mm is not among the operations that autocast casts, and transformers casts its input to the weights:
    experts that are trained, and so kept in fp32, would be multiplied in fp32.
    hidden_states: (tokens, hidden). top_k_index, top_k_weights: (tokens, k). Returns (tokens, hidden).
    """
    kind = hidden_states.device.type
    if torch.is_autocast_enabled(kind):
        experts = _InPrecision(experts, torch.get_autocast_dtype(kind))  # type: ignore[assignment]
    return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)


class _InPrecision:
    """A module with weights that are read in another precision."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, torch.Tensor) else value


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, autocast_experts)


PACKED = "packed"
"""transformers' name of `packed_attention`, among its implementations of attention."""
PACKED_IMAGES = "packed flash"
"""Another name of it: with it Qwen's vision towers hand over all images in one call, as to flash attention, and
without which they read the images' lengths from the GPU in every layer."""
PACKED_ATTENTION = (PACKED, PACKED_IMAGES)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    dropout: float = 0.0,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in one row of several samples, each of which sees only itself; nothing is computed for what is masked.

    transformers calls it by its name, as it does SDPA, and makes no mask for a name that has none. On a GPU a whole row
    is one call of torch's flash attention for variable lengths, which waits for nothing; elsewhere each sample is a
    call of SDPA. The samples of a vision tower, which is not causal, are its images.

    query: (1, H, L, D). key, value: the same, with a divisor of H heads. cu_seq_lens_q: (samples + 1,) int32, 0 and the
    end of each sample. max_length_q: of the longest. The collator gives both (training/batches.py); a vision tower
    computes its own. Returns (1, L, H, D).
    """
    assert attention_mask is None, "a row has no padding to mask"
    assert query.shape[0] == 1, query.shape
    assert rest.get("sliding_window") is None, "a window would have to end where a sample begins"
    if torch.is_autocast_enabled(query.device.type):  # SDPA is in autocast's list, varlen_attn is not
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if dropout == 0.0 and takes_variable_lengths(query):
        query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        limits = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        window = (-1, 0 if module.is_causal else -1)
        output = varlen_attn(query, key, value, *limits, scale=scaling, window_size=window, enable_gqa=True)
        assert isinstance(output, torch.Tensor)
        return output[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    options: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": module.is_causal}
    samples = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, *sample, None, **options)[0] for sample in samples]
    return torch.cat(outputs, dim=1), None


def takes_variable_lengths(query: torch.Tensor) -> bool:
    """Whether torch's flash attention takes such a tensor on its device.

    It does from Ampere on, in half precision (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
    """
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


for _name in PACKED_ATTENTION:
    AttentionInterface.register(_name, packed_attention)


ROTATE = "apply_rotary_pos_emb"
"""Name of the rotation of queries and keys in transformers' modules of models."""


@contextmanager
def fused_kernels(model: PreTrainedModel | PeftModel, *, used: bool) -> Iterator[None]:
    """Liger's kernels for RMS norms, gated MLPs and rotations of a model, and adapters without copies, in the block.

    Each goes over a GPU's memory once, where torch's operations do so several times, and less is kept for backward
    (github.com/linkedin/Liger-Kernel). They compute the same and round differently, so a plan says whether they are
    used. The model's weights stay; do not use it after the block.
    """
    with ExitStack() as stack:
        if used:
            for name, module in list(sys.modules.items()):  # Liger replaces classes and functions in them
                if ".modeling_" in name:
                    stack.enter_context(patch.dict(vars(module)))
            with hooks_kept(model):
                fuse_layers(model)
                fuse_adapters(model)
            for module in {sys.modules[type(each).__module__] for each in model.modules()}:
                if hasattr(module, ROTATE):
                    setattr(module, ROTATE, rotated)
        yield


def fuse_adapters(model: nn.Module) -> None:
    """Replace the `forward` of LoRA layers by `adapted`, but for DoRA's, which compute something else."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and not layer.lora_variant:  # `lora_config` makes one adapter for a layer
            layer.forward = partial(adapted, layer)


def adapted(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """The output of a linear layer with one LoRA adapter, which is added to the layer's own in place.

    PEFT (tuners/lora/layer.py, bnb.py) casts, clones, scales and adds in operations of their own, each of which goes
    over a GPU's memory; neither it nor Liger has a fused form. rows: (..., inputs). Returns (..., outputs).
    """
    (name,) = layer.active_adapters
    flat = rows.flatten(0, -2)
    if torch.is_autocast_enabled(rows.device.type):  # once, and for 4-bit layers too, which would return fp32 for fp32
        flat = flat.to(torch.get_autocast_dtype(rows.device.type))
    output = layer.base_layer(flat)
    low = layer.lora_A[name](layer.lora_dropout[name](flat)).to(output.dtype)  # (N, rank)
    up = layer.lora_B[name].weight.to(output.dtype).t()
    return output.addmm_(low, up, alpha=layer.scaling[name]).unflatten(0, rows.shape[:-1])


def fuse_layers(model: PreTrainedModel) -> None:
    """Replace the `forward` of RMS norms and gated MLPs in the language model by Liger's."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # installed on GPU machines only

    fused_like, decoder = family_of(model.config.model_type).fused_like, model.get_decoder()
    assert fused_like is not None, model.config.model_type
    options = {} if has_mlps(decoder) else {"swiglu": False}
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[fused_like]
    apply(model=decoder, rope=False, fused_linear_cross_entropy=False, **options)


def has_mlps(decoder: Any) -> bool:
    """Whether the layers of a language model have MLPs, not mixtures of experts."""
    return hasattr(decoder.layers[0].mlp, "down_proj")


def rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """query, key: (B, heads, L, D), overwritten in place as a projection left them. cos, sin: (B, L, D)."""
    from liger_kernel.ops.rope import LigerRopeFunction

    # Triton launches on the current device, wherever the tensors lie; Liger guards its other kernels, but not this one.
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        return LigerRopeFunction.apply(query, key, cos, sin, None, unsqueeze_dim)
