"""Which experts a mixture sends its tokens to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.batches import longest_first, prepared_ahead
from stages.kit.mixture.routing import RouterOutput, outputs_of, router_entropies, router_loads, routers_of
from stages.kit.models.prompts import Processor, encode


@dataclass(frozen=True)
class Routing:
    """Of one conversation, its tokens and the layers with a router all counting the same."""

    load: tuple[float, ...]
    """By expert, the share of the routing weight that it got; they add up to 1. A token's weight in a layer is shared
    out to its top-k experts only."""
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
    routers = routers_of(model)
    if not routers:
        return None

    def prepare(indices: list[int]) -> dict[str, torch.Tensor]:
        asked = [conversations[index] for index in indices]
        return encode(processor, asked, padding_side="right", max_length=max_length)

    found: dict[int, Routing] = {}
    for indices, inputs in prepared_ahead(longest_first(conversations, batch_size), prepare):
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        with outputs_of(routers) as outputs:
            model.base_model(**inputs, use_cache=False)
        found |= zip(indices, _by_row(outputs, inputs["attention_mask"]), strict=True)
    return [found[index] for index in range(len(conversations))]


def _by_row(outputs: Sequence[RouterOutput], mask: torch.Tensor) -> list[Routing]:
    """mask: (B, T)."""
    loads = router_loads(outputs).unflatten(1, mask.shape)
    entropies = router_entropies(outputs).unflatten(1, mask.shape)
    found = []
    for row, is_text in enumerate(mask.bool()):
        found.append(
            Routing(
                load=tuple(loads[:, row, is_text].double().mean(dim=(0, 1)).tolist()),
                entropy=entropies[:, row, is_text].double().mean().item(),
            )
        )
    return found
