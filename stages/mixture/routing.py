"""Routing of a mixture's tokens: measured and forced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from stages.data.conversation import Conversation
from stages.mixture.certificate import Domain, Routing
from stages.models.merge import probe_logits, root_mean_square
from stages.models.prompts import Processor

RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits (tokens, experts), and weights (tokens, k) and numbers (tokens, k) of the top k experts."""


def routers_of(model: nn.Module) -> list[Qwen2MoeTopKRouter]:
    """The routers layer by layer; a dense model has none."""
    return [module for module in model.modules() if isinstance(module, Qwen2MoeTopKRouter)]


@contextmanager
def hooked(modules: Sequence[nn.Module], hook: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Calls `hook(module, args, output)` after each forward pass in the block; its result replaces the output."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(hook))
        yield


@contextmanager
def outputs_of(modules: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """The outputs of the modules in the forward passes of the block, in the order of the calls."""
    outputs: list[Any] = []
    with hooked(modules, lambda _module, _args, output: outputs.append(output)):
        yield outputs


def routing_by_row(outputs: Sequence[RouterOutput], mask: torch.Tensor) -> list[Routing]:
    """Routing of each row of a batch. outputs: of the routers, layer by layer. mask: (B, T), 0 for padding."""
    logits, weights, chosen = (torch.stack(part) for part in zip(*outputs, strict=True))
    weights, logits = weights.float(), logits.float()
    shares = weights / weights.sum(dim=-1, keepdim=True)
    loads = torch.zeros(logits.shape, device=logits.device).scatter(-1, chosen, shares).unflatten(1, mask.shape)
    entropies = torch.special.entr(logits.softmax(dim=-1)).sum(dim=-1) / math.log(logits.shape[-1])
    entropies = entropies.unflatten(1, mask.shape)  # (layers, B, T)
    return [
        Routing(
            load=tuple(loads[:, row, is_text].double().mean(dim=(0, 1)).tolist()),
            entropy=entropies[:, row, is_text].double().mean().item(),
        )
        for row, is_text in enumerate(mask.bool())
    ]


@contextmanager
def routed_to(model: nn.Module, expert: int) -> Iterator[None]:
    """Sends every token to one expert in the block, with all of its weight, in every layer."""

    def send(router: Qwen2MoeTopKRouter, _: Any, output: RouterOutput) -> RouterOutput:
        logits, weights, chosen = output
        others = [other for other in range(router.num_experts) if other != expert]
        order = torch.tensor([expert, *others][: router.top_k], device=chosen.device)
        alone = torch.zeros_like(weights)
        alone[:, 0] = 1
        return logits, alone, order.expand_as(chosen)

    with hooked(routers_of(model), send):
        yield


def measure_domains(
    built_dir: Path,
    expert_dirs: Mapping[str, Path],
    probes: Mapping[str, Sequence[Conversation]],
    *,
    load: Callable[[Path], PreTrainedModel],
    processor: Processor,
) -> dict[str, Domain]:
    """Compare a mixture with the experts that it was built from, each on its own probes, one model at a time.

    expert_dirs: by name, in the mixture's order. probes: conversations by the same names.
    """
    mixture = load(built_dir).eval()
    routers, forced, routings = routers_of(mixture), {}, {}
    for index, name in enumerate(expert_dirs):
        with outputs_of(routers) as outputs:
            probe_logits(mixture, processor, probes[name])
        by_layer = (outputs[layer :: len(routers)] for layer in range(len(routers)))  # of all probes
        tokens: list[Any] = [[torch.cat(part) for part in zip(*layer, strict=True)] for layer in by_layer]
        (routings[name],) = routing_by_row(tokens, torch.ones(1, len(tokens[0][0])))
        with routed_to(mixture, index):
            forced[name] = probe_logits(mixture, processor, probes[name])
    del mixture
    domains = {}
    for name, folder in expert_dirs.items():
        theirs = probe_logits(load(folder).eval(), processor, probes[name])
        off = root_mean_square(forced[name] - theirs) / root_mean_square(theirs)
        domains[name] = Domain(probes=len(probes[name]), forced_deviation=off.item(), routing=routings[name])
    return domains
