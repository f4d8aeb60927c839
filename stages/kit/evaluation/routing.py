"""Which experts a mixture sends its tokens to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from stages.kit.data.conversation import Conversation
from stages.kit.models.processors import Processor, encode


@dataclass(frozen=True)
class Routing:
    """Of one conversation, its tokens and the layers with a router all counting the same."""

    load: tuple[float, ...]
    """By expert, the share of the routing weight that it got; they add up to 1. A token's weight in a layer is shared
    out to its top-k experts only."""
    probability: tuple[float, ...]
    """By expert, the mean probability that the routers gave it; they add up to 1."""
    entropy: float
    """Mean entropy of the routers' probabilities over all experts, by the greatest there can be: 0 where a router is
    sure of one expert, 1 where all are equal to it."""


@torch.inference_mode()
def routing(
    model: PreTrainedModel,
    processor: Processor,
    conversations: Sequence[Conversation],
    *,
    batch_size: int,
    max_length: int | None = None,
) -> list[Routing] | None:
    """How the model, in `eval` mode, routes each conversation, in order; None for a model without routers.

    max_length: as `likelihood.answer_log_likelihoods` has it. Padding does not count.
    """
    routers = [module for module in model.modules() if isinstance(module, Qwen2MoeTopKRouter)]
    if not routers:
        return None
    found: list[Routing] = []
    for first in range(0, len(conversations), batch_size):
        asked = conversations[first : first + batch_size]
        inputs = encode(processor, asked, padding_side="right", max_length=max_length)
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        with outputs_of(routers) as outputs:
            model.base_model(**inputs, use_cache=False)
        found += _by_row(outputs, inputs["attention_mask"])
    return found


@contextmanager
def outputs_of(modules: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """What the modules return in the forward passes within, in the order of the calls."""
    outputs: list[Any] = []
    hooks = [module.register_forward_hook(lambda _module, _args, output: outputs.append(output)) for module in modules]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _by_row(outputs: Sequence[tuple[torch.Tensor, ...]], mask: torch.Tensor) -> list[Routing]:
    """outputs: of each router (logits (B * T, experts), weights, chosen experts (B * T, k)); mask: (B, T)."""
    logits = torch.stack([output[0].float() for output in outputs]).unflatten(1, mask.shape)  # (layers, B, T, experts)
    weights = torch.stack([output[1].float() for output in outputs]).unflatten(1, mask.shape)  # (layers, B, T, k)
    chosen = torch.stack([output[2] for output in outputs]).unflatten(1, mask.shape)  # (layers, B, T, k)
    loads = torch.zeros_like(logits).scatter(-1, chosen, weights / weights.sum(dim=-1, keepdim=True))
    num_experts = logits.shape[-1]
    probabilities = logits.softmax(dim=-1)
    entropies = torch.special.entr(probabilities).sum(dim=-1) / torch.tensor(num_experts).log()
    found = []
    for row, is_text in enumerate(mask.bool()):
        found.append(
            Routing(
                load=tuple(loads[:, row, is_text].double().mean(dim=(0, 1)).tolist()),
                probability=tuple(probabilities[:, row, is_text].double().mean(dim=(0, 1)).tolist()),
                entropy=entropies[:, row, is_text].double().mean().item(),
            )
        )
    return found
