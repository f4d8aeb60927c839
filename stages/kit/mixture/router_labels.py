"""The loss that labels a mixture's routers: each is taught which expert the tokens of a sample belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from stages.core.errors import UserError
from stages.kit.models.sharding import whole
from stages.kit.training.collators import IGNORED


class RouterLabels:
    """Cross-entropy of every router's logits for a token with the number of the expert that is to have it.

    Layer by layer: a router sees what those below it really send on, and has no part in what they learn. So nothing of
    the forward pass needs a gradient, and nothing of it is kept but what the routers are given; their logits are
    computed again from that.
    """

    def __init__(self, model: nn.Module, domains: Sequence[str]) -> None:
        """domains: of the experts, in their order.

        Raises UserError for a model without routers, or with another number of experts.
        """
        self.routers = [module for module in model.modules() if isinstance(module, Qwen2MoeTopKRouter)]
        if not self.routers:
            raise UserError(
                f"loss router-labels teaches the routers of a mixture, and {type(model).__name__} has none; "
                "start from a build"
            )
        if (found := self.routers[0].num_experts) != len(domains):
            raise UserError(
                f"domains are {len(domains)} ({', '.join(domains)}), but the model has {found} experts; "
                "the build has changed since it was planned"
            )

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(cross-entropy, number of tokens whose likeliest expert is theirs): sums over tokens, means over layers.

        model: as the trainer has wrapped it. inputs: a micro-batch; its `labels` (B, T) are numbers of experts, and
        IGNORED for padding.
        """
        labels = inputs["labels"].flatten()
        with self._apart() as given:
            # Of the head as little as can be: the next token is not asked for.
            asked = {name: value for name, value in inputs.items() if name != "labels"}
            model(**asked, use_cache=False, logits_to_keep=1)
        loss = torch.zeros((), device=labels.device)
        correct = torch.zeros((), device=labels.device)
        for router, hidden in zip(self.routers, given, strict=True):
            logits = F.linear(hidden, whole(router.weight).to(hidden.dtype)).float()
            here = labels.to(logits.device)
            loss = loss + F.cross_entropy(logits, here, ignore_index=IGNORED, reduction="sum").to(loss.device)
            correct += (logits.argmax(-1) == here).sum().to(correct.device)
        return loss / len(self.routers), correct / len(self.routers)

    @contextmanager
    def _apart(self) -> Iterator[list[torch.Tensor]]:
        """What the routers are given in the forward pass within, (tokens, hidden) a layer. No gradient passes them."""
        given: list[torch.Tensor] = []

        def keep(_router: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            given.append(args[0].detach().flatten(0, -2))
            return tuple(tensor.detach() for tensor in output)

        hooks = [router.register_forward_hook(keep) for router in self.routers]
        try:
            yield given
        finally:
            for hook in hooks:
                hook.remove()
