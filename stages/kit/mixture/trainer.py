"""Trainers of mixtures: RecipeTrainer with a loss that balances the experts, or with labels for the routers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from stages.kit.internals.transformers_internals import on_device
from stages.kit.internals.trl_internals import note_metric
from stages.kit.mixture.routing import RouterOutput, hooked, outputs_of, routers_of
from stages.kit.models.load import whole
from stages.kit.planning.plan import Plan
from stages.kit.training.batches import IGNORED
from stages.kit.training.trainer import RecipeTrainer


def make_trainer(plan: Plan, *, model: PreTrainedModel | PeftModel, **rest: Any) -> RecipeTrainer:
    """The plan's trainer: of routers, of a mixture, or of a dense model. rest: arguments of RecipeTrainer."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if plan.loss == "router-labels":
        return RouterTrainer(plan, RouterLabels(base, plan.domains), model=model, **rest)
    coefficient = getattr(base.config.get_text_config(), "router_aux_loss_coef", 0.0)
    balance = LoadBalance(base)
    if balance.matters and coefficient > 0:
        return BalancedTrainer(plan, balance, coefficient, model=model, **rest)
    return RecipeTrainer(plan, model=model, **rest)


class LoadBalance:
    """Switch Transformer's auxiliary loss (arXiv 2101.03961, equations 4 to 6), as transformers computes it
    (`load_balancing_loss_func`), but of all micro-batches of a step together:

        experts * sum over experts of (share of tokens that take the expert) * (its mean probability)

    A product of two means is not the mean of such products. Summed over micro-batches it is another loss, which makes
    every micro-batch use all experts: with one sample in each, it works against the goal of a router, one expert for
    each domain (arXiv 2501.11873). Here the shares, which have no gradient, are counted over all micro-batches before
    the first of them is trained on; the rest is a sum over tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = routers_of(model)
        self.step_counts: tuple[torch.Tensor, torch.Tensor] | None = None
        """Result of `count` for the step's micro-batches of all processes; None for a single micro-batch."""

    @property
    def matters(self) -> bool:
        """False if every token takes all experts: the loss is then their number, whatever the routers do."""
        return any(router.top_k < router.num_experts for router in self.routers)

    def count(self, model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Times that each expert is taken, (experts,), and tokens times layers; a forward pass without gradients."""
        router = self.routers[0]
        taken = torch.zeros(router.num_experts, device=router.weight.device)
        rows = taken.new_zeros(())
        training = model.training
        model.eval()  # draws no random numbers
        for batch in batches:
            mask = tokens_of(batch).to(taken.device)
            rows += mask.sum() * len(self.routers)
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            with torch.no_grad(), outputs_of(self.routers) as outputs:
                model(**inputs, use_cache=False, logits_to_keep=1)
            taken += self._taken(outputs, mask)
        model.train(training)
        return taken, rows

    def loss(self, outputs: Sequence[RouterOutput], mask: torch.Tensor) -> torch.Tensor:
        """A micro-batch's part of the step's loss. mask: (B, T), 1 for tokens and 0 for padding."""
        experts, device = self.routers[0].num_experts, self.routers[0].weight.device
        taken, rows = self.step_counts or (self._taken(outputs, mask), mask.to(device).sum() * len(self.routers))
        total = torch.zeros(experts, device=device)
        for logits, *_ in outputs:
            probabilities = logits.float().softmax(-1) * mask.reshape(-1, 1).to(logits.device)
            total = total + probabilities.sum(0).to(device)
        return experts * (taken / rows * total / rows).sum()

    def _taken(self, outputs: Sequence[RouterOutput], mask: torch.Tensor) -> torch.Tensor:
        """(experts,): number of tokens that have the expert among their top k."""
        router = self.routers[0]
        taken = torch.zeros(router.num_experts, device=router.weight.device)
        for logits, *_ in outputs:
            chosen = logits.detach().float().softmax(-1).topk(router.top_k, dim=-1).indices
            counts = torch.zeros(logits.shape, device=logits.device).scatter_(-1, chosen, 1.0)
            taken += (counts * mask.reshape(-1, 1).to(logits.device)).sum(0).to(taken.device)
        return taken


def tokens_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """(B, T): 1 for tokens and 0 for padding; a packed row has no padding."""
    mask = batch.get("attention_mask")
    return mask if mask is not None else torch.ones_like(batch["input_ids"])


class BalancedTrainer(RecipeTrainer):
    """Adds `LoadBalance.loss`, times the coefficient of the model's config, to the loss of every step."""

    def __init__(self, plan: Plan, balance: LoadBalance, coefficient: float, **rest: Any) -> None:
        self.balance = balance
        self.balance_coefficient = coefficient
        super().__init__(plan, **rest)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> torch.Tensor:
        if not self.model.training:  # validation is of the answers alone
            return super().compute_loss(model, inputs, **kwargs)
        with outputs_of(self.balance.routers) as outputs:
            loss = super().compute_loss(model, inputs, **kwargs)
        balance = self.balance.loss(outputs, tokens_of(inputs))
        note_metric(self, "aux_loss", balance.item())
        # ddp averages over processes, but this is a sum over tokens.
        return loss + self.balance_coefficient * self.accelerator.num_processes * balance.to(loss.device)

    def get_batch_samples(self, iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[Any, Any]:
        """The micro-batches of a step; their use of experts is counted before the first is trained on."""
        batches, num_items = super().get_batch_samples(iterator, num_batches, device)
        self.balance.step_counts = None
        if len(batches) * self.accelerator.num_processes > 1:
            with self.compute_loss_context_manager():
                taken, rows = self.balance.count(self.model, [on_device(self, batch) for batch in batches])
            self.balance.step_counts = self.accelerator.reduce(taken, "sum"), self.accelerator.reduce(rows, "sum")
        return batches, num_items


class RouterLabels:
    """Cross-entropy of every router's logits with the number of the token's expert.

    Layer by layer: a router sees the real output of the layers below, but its loss does not train them. So the forward
    pass needs no gradient, and only the routers' inputs are kept; their logits are computed again from these.
    """

    def __init__(self, model: nn.Module, domains: Sequence[str]) -> None:
        """domains: one for each expert, in order."""
        self.routers = routers_of(model)
        assert self.routers[0].num_experts == len(domains), (self.routers[0], domains)

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy, and the number of tokens whose likeliest expert is right: sums over tokens, means over layers.

        model: wrapped by the trainer. inputs: a micro-batch; its `labels` (B, T) are numbers of experts, and IGNORED
        for padding.
        """
        hidden_states: list[torch.Tensor] = []

        def detach(_router: nn.Module, args: Any, output: RouterOutput) -> tuple[torch.Tensor, ...]:
            hidden_states.append(args[0].detach().flatten(0, -2))
            return tuple(tensor.detach() for tensor in output)

        labels = inputs["labels"].flatten()
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        with hooked(self.routers, detach):
            model(**inputs, use_cache=False, logits_to_keep=1)  # the next token's logits are not needed
        loss = torch.zeros((), device=labels.device)
        correct = torch.zeros((), device=labels.device)
        for router, hidden in zip(self.routers, hidden_states, strict=True):
            logits = F.linear(hidden, whole(router.weight).to(hidden.dtype)).float()
            here = labels.to(logits.device)
            loss = loss + F.cross_entropy(logits, here, ignore_index=IGNORED, reduction="sum").to(loss.device)
            correct += (logits.argmax(-1) == here).sum().to(correct.device)
        return loss / len(self.routers), correct / len(self.routers)


class RouterTrainer(RecipeTrainer):
    """Trains only routers, with the loss of `RouterLabels` instead of the next token's."""

    def __init__(self, plan: Plan, labels: RouterLabels, **rest: Any) -> None:
        self.router_labels = labels
        super().__init__(plan, **rest)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *, num_items_in_batch: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """This micro-batch's part of the mean over layers and over the step's tokens."""
        loss, correct = self.router_labels.loss(model, inputs)
        share = self.accelerator.reduce(correct, "sum") / num_items_in_batch
        # The mean over micro-batches is logged.
        note_metric(self, "router_accuracy", (share * self.current_gradient_accumulation_steps).item())
        return self.accelerator.num_processes * loss / num_items_in_batch

    def get_batch_samples(self, iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[Any, Any]:
        """The micro-batches of a step, and the number of their tokens, including the first of each sample."""
        batches, _ = super().get_batch_samples(iterator, num_batches, device)
        num_tokens = torch.stack([batch["labels"].ne(IGNORED).sum() for batch in batches]).sum()
        return batches, self.accelerator.reduce(num_tokens.to(device), "sum")
