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
        self._shares: torch.Tensor | None = None
        """(experts,): over the step's tokens and layers, how many of them take the expert; None where the next
        micro-batch is all there is."""
        self._rows: torch.Tensor | None = None
        """The step's tokens times layers."""
        self._logits: list[torch.Tensor] | None = None
        """(tokens, experts) of every layer, of the forward pass that is being watched."""
        self._watched: list[torch.Tensor] = []
        """Of the last one that was."""
        for router in self.routers:
            router.register_forward_hook(self._keep)

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
        """(how often each expert is taken (experts,), tokens times layers) in all micro-batches of a step.

        Costs a forward pass without gradients, but not where one micro-batch is all, or every token takes all experts.
        """
        router = self.routers[0]
        device = router.weight.device
        taken = torch.zeros(router.num_experts, device=device)
        rows = torch.zeros((), device=device)
        known = len(batches) == 1 or router.top_k == router.num_experts
        training = model.training
        model.eval()  # draws no random numbers
        for batch in batches:
            mask = batch["attention_mask"].to(device)
            rows += mask.sum() * len(self.routers)
            if not known:
                inputs = {name: value for name, value in batch.items() if name != "labels"}
                with torch.no_grad(), self.watching():
                    model(**inputs, use_cache=False, logits_to_keep=1)
                taken += sum(self._taken(logits, mask) for logits in self._watched)
        model.train(training)
        return taken, rows

    def set_step(self, taken: torch.Tensor, rows: torch.Tensor) -> None:
        """What was counted, over all processes."""
        self._rows = rows
        self._shares = taken / rows if taken.any() else None

    def loss(self, mask: torch.Tensor) -> torch.Tensor:
        """The part of the last watched micro-batch in the step's loss; they add up to it.

        mask: (B, T), 1 for tokens and 0 for padding.
        """
        watched, self._watched = self._watched, []  # they hold on to the graph
        experts, device = self.routers[0].num_experts, self.routers[0].weight.device
        rows = mask.to(device).sum() * len(self.routers) if self._rows is None else self._rows
        shares = self._shares
        if shares is None:
            shares = sum(self._taken(logits, mask) for logits in watched) / rows
        total = torch.zeros(experts, device=device)
        for logits in watched:
            probabilities = logits.float().softmax(-1) * mask.reshape(-1, 1).to(logits.device)
            total = total + probabilities.sum(0).to(device)
        return experts * (shares * total / rows).sum()

    def _keep(self, _router: nn.Module, _args: Any, output: tuple[torch.Tensor, ...]) -> None:
        if self._logits is not None:
            self._logits.append(output[0])

    def _taken(self, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(experts,): tokens that have the expert among their top k."""
        chosen = logits.detach().float().softmax(-1).topk(self.routers[0].top_k, dim=-1).indices
        taken = torch.zeros(logits.shape, device=logits.device).scatter_(-1, chosen, 1.0)
        return (taken * mask.reshape(-1, 1).to(logits.device)).sum(0).to(self.routers[0].weight.device)
