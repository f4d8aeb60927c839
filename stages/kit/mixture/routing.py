"""Where a mixture sends its tokens: measured, forced, and a first router that needs no training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.kit.mixture.certificate import RoutingByLayer
from stages.kit.models.processors import Processor, encode

SAME_DIRECTION = 1e-6
"""Distance of two rows of length 1 that differ by no more than the rounding of fp32."""


RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits (tokens, experts), and of the top k experts the weights (tokens, k) and the numbers (tokens, k)."""


def routers_of(model: nn.Module) -> list[Qwen2MoeTopKRouter]:
    """Layer by layer; none of a dense model."""
    return [module for module in model.modules() if isinstance(module, Qwen2MoeTopKRouter)]


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


def router_loads(outputs: Sequence[RouterOutput]) -> torch.Tensor:
    """(layers, tokens, experts): the share of a token's routing weight that each expert gets, 0 outside its top k."""
    logits, weights, chosen = (torch.stack(part) for part in zip(*outputs, strict=True))
    weights = weights.float()
    loads = torch.zeros(logits.shape, device=logits.device)
    return loads.scatter(-1, chosen, weights / weights.sum(dim=-1, keepdim=True))


def router_entropies(outputs: Sequence[RouterOutput]) -> torch.Tensor:
    """(layers, tokens): entropy of a router's probabilities over all experts, by the greatest there can be, 0 to 1."""
    logits = torch.stack([output[0].float() for output in outputs])
    return torch.special.entr(logits.softmax(dim=-1)).sum(dim=-1) / math.log(logits.shape[-1])


@torch.inference_mode()
def measure_routing(model: PreTrainedModel, processor: Processor, probes: Sequence[Conversation]) -> RoutingByLayer:
    """Of the tokens of these conversations, answers and chat format included, sent through a Qwen2Moe one by one."""
    each: list[list[RouterOutput]] = []
    routers = routers_of(model)
    for inputs in _inputs(model, processor, probes):
        with outputs_of(routers) as outputs:
            model(**inputs)
        each.append(outputs)
    # Of each layer, the tokens of all probes.
    layers = [_joined(of_layer) for of_layer in zip(*each, strict=True)]
    firsts = torch.stack([nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float() for logits, *_ in layers])
    first, weight = firsts.mean(1), router_loads(layers).mean(1)
    entropy = router_entropies(layers).mean(1)
    return RoutingByLayer(
        tokens=firsts.shape[1],
        first_by_layer=first.tolist(),
        weight_by_layer=weight.tolist(),
        entropy_by_layer=entropy.tolist(),
        first=first.mean(0).tolist(),
        weight=weight.mean(0).tolist(),
        entropy=entropy.mean().item(),
    )


def _joined(outputs: Sequence[RouterOutput]) -> RouterOutput:
    """Of one router, all its tokens."""
    logits, weights, chosen = (torch.cat(part).cpu() for part in zip(*outputs, strict=True))
    return logits, weights, chosen


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

    hooks = [router.register_forward_hook(send) for router in routers_of(model)]
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
