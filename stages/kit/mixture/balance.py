"""The loss that keeps a mixture's experts in use, over the whole effective batch, whatever its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter


class LoadBalance:
    """Switch Transformer's auxiliary loss (arXiv 2101.03961, equations 4 to 6), as transformers computes it
    (`load_balancing_loss_func`), but of all micro-batches of a step together:

        experts * sum over experts of (share of tokens that take the expert) * (its mean probability)

    A product of two means is not the mean of such products. Summed up micro-batch by micro-batch it is another loss,
    one that asks every micro-batch to use all experts: with one sample in each, it drives apart what a router has to
    learn, that a domain has an expert of its own (arXiv 2501.11873). Here the shares, which have no gradient, are
    counted over all micro-batches before the first of them is trained on; what is left is a sum over tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        """A model without routers has nothing to balance."""
        self.routers = [module for module in model.modules() if isinstance(module, Qwen2MoeTopKRouter)]
        self._step: tuple[torch.Tensor, torch.Tensor] | None = None
        """Over the step's tokens and layers, how often each expert is taken (experts,), and tokens times layers; None
        where the next micro-batch is all there is."""
        self._logits: list[torch.Tensor] | None = None
        """(tokens, experts) of every layer, of the forward pass that is being watched."""
        self._watched: list[torch.Tensor] = []
        """Of the last one that was."""
        for router in self.routers:
            router.register_forward_hook(self._keep)

    @property
    def matters(self) -> bool:
        """Not where every token takes all experts, such as both of two: the loss is their number then, whatever the
        routers do."""
        return any(router.top_k < router.num_experts for router in self.routers)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keeps the routers' logits of the forward pass within. That gradient checkpointing later does it again is not
        watched."""
        self._logits = []
        try:
            yield
        finally:
            self._watched, self._logits = self._logits, None

    def count(self, model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(how often each expert is taken (experts,), tokens times layers) in these micro-batches.

        Costs a forward pass without gradients.
        """
        router = self.routers[0]
        taken = torch.zeros(router.num_experts, device=router.weight.device)
        rows = taken.new_zeros(())
        training = model.training
        model.eval()  # draws no random numbers
        for batch in batches:
            mask = batch["attention_mask"].to(taken.device)
            rows += mask.sum() * len(self.routers)
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            with torch.no_grad(), self.watching():
                model(**inputs, use_cache=False, logits_to_keep=1)
            taken += self._taken(self._watched, mask)
        model.train(training)
        return taken, rows

    def begin_step(self, counted: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """counted: what `count` found, summed up over all processes; None where one micro-batch is all of the step."""
        self._step = counted

    def loss(self, mask: torch.Tensor) -> torch.Tensor:
        """The part of the last watched micro-batch in the step's loss; they add up to it.

        mask: (B, T), 1 for tokens and 0 for padding.
        """
        watched, self._watched = self._watched, []  # they hold on to the graph
        experts, device = self.routers[0].num_experts, self.routers[0].weight.device
        taken, rows = self._step or (self._taken(watched, mask), mask.to(device).sum() * len(self.routers))
        total = torch.zeros(experts, device=device)
        for logits in watched:
            probabilities = logits.float().softmax(-1) * mask.reshape(-1, 1).to(logits.device)
            total = total + probabilities.sum(0).to(device)
        return experts * (taken / rows * total / rows).sum()

    def _keep(self, _router: nn.Module, _args: Any, output: tuple[torch.Tensor, ...]) -> None:
        if self._logits is not None:
            self._logits.append(output[0])

    def _taken(self, watched: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        """(experts,): how often each is among a token's top k."""
        router = self.routers[0]
        taken = torch.zeros(router.num_experts, device=router.weight.device)
        for logits in watched:
            chosen = logits.detach().float().softmax(-1).topk(router.top_k, dim=-1).indices
            counts = torch.zeros(logits.shape, device=logits.device).scatter_(-1, chosen, 1.0)
            taken += (counts * mask.reshape(-1, 1).to(logits.device)).sum(0).to(taken.device)
        return taken
