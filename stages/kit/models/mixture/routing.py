"""Where a mixture sends its tokens: measured, forced, and a first router that needs no training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from stages.kit.data.conversation import Conversation
from stages.kit.errors import UserError
from stages.kit.models.mixture.certificate import Routing
from stages.kit.models.processors import Processor, encode

SAME_DIRECTION = 1e-6
"""Distance of two rows of length 1 that differ by no more than the rounding of fp32."""


@torch.inference_mode()
def measure_routing(model: PreTrainedModel, processor: Processor, probes: Sequence[Conversation]) -> Routing:
    """Of the tokens of these conversations, answers and chat format included, sent through a Qwen2Moe one by one."""
    logits = torch.cat(
        [
            torch.stack([layer.float().cpu() for layer in model(**inputs, output_router_logits=True).router_logits])
            for inputs in _inputs(model, processor, probes)
        ],
        dim=1,
    )  # (layers, tokens, experts)
    probabilities = logits.softmax(-1)
    top, chosen = probabilities.topk(model.config.num_experts_per_tok, dim=-1)
    if model.config.norm_topk_prob:
        top = top / top.sum(-1, keepdim=True)
    weights = torch.zeros_like(probabilities).scatter(-1, chosen, top).mean(1)
    first = nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float().mean(1)
    entropy = torch.special.entr(probabilities).sum(-1).mean(1)
    return Routing(
        tokens=logits.shape[1],
        first_by_layer=first.tolist(),
        weight_by_layer=weights.tolist(),
        entropy_by_layer=entropy.tolist(),
        first=first.mean(0).tolist(),
        weight=weights.mean(0).tolist(),
        entropy=entropy.mean().item(),
    )


@contextmanager
def routed_to(model: nn.Module, expert: int) -> Iterator[None]:
    """Within the block every token goes to one expert, with all of its weight, in every layer."""

    def send(router: Qwen2MoeTopKRouter, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, chosen = output  # (tokens, experts), (tokens, top k), (tokens, top k)
        others = [other for other in range(router.num_experts) if other != expert]
        order = torch.tensor([expert, *others][: router.top_k], device=chosen.device)
        alone = torch.zeros_like(weights)
        alone[:, 0] = 1
        return logits, alone, order.expand_as(chosen)

    hooks = [module.register_forward_hook(send) for module in model.modules() if isinstance(module, Qwen2MoeTopKRouter)]
    assert hooks, f"{type(model).__name__} has no routers"
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def mean_hidden_states(
    model: PreTrainedModel, processor: Processor, domains: Mapping[str, Sequence[Conversation]]
) -> torch.Tensor:
    """A router that knows each expert by what its domain looks like in the base: (layers, domains, hidden), fp32.

    model: the dense base. domains: conversations by expert, in the order of the experts.
    A row is the mean over the domain's tokens of what the layer's MLP is given, and so the router will be, at length 1.
    After mergekit's `gate_mode: hidden` (mergekit/moe/router.py), which takes the layer's input.
    Raises UserError where two rows of a layer are equal: between those experts it would choose nothing.
    """
    layers = model.get_decoder().layers
    sums = torch.zeros(len(layers), len(domains), model.config.hidden_size)
    for column, probes in enumerate(domains.values()):

        def add(number: int, output: torch.Tensor, column: int = column) -> None:
            sums[number, column] += output.float().sum((0, 1)).cpu()

        hooks = [
            layer.post_attention_layernorm.register_forward_hook(
                lambda _module, _args, output, number=number: add(number, output)
            )
            for number, layer in enumerate(layers)
        ]
        try:
            for inputs in _inputs(model, processor, probes):
                model(**inputs)
        finally:
            for hook in hooks:
                hook.remove()
    router = nn.functional.normalize(sums, dim=-1)
    for number, rows in enumerate(router):
        for (one, first), (other, second) in combinations(zip(domains, rows, strict=True), 2):
            if torch.dist(first, second) < SAME_DIRECTION:
                raise UserError(
                    f"experts {one} and {other} would get the same router in layer {number}, as the hidden states of "
                    "their probes are the same; give each a `domain` of its own, or take router_init: uniform"
                )
    return router


def _inputs(
    model: PreTrainedModel, processor: Processor, probes: Sequence[Conversation]
) -> Iterator[dict[str, torch.Tensor | bool]]:
    """What the model is called with, one conversation at a time, so that padding plays no part."""
    assert probes, "no conversation to measure on"
    for probe in probes:
        inputs = encode(processor, [probe], padding_side="right")
        yield {name: tensor.to(model.device) for name, tensor in inputs.items()} | {"use_cache": False}
