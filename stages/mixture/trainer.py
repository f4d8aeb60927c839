"""Trainers of mixtures: RecipeTrainer with a loss that balances the experts, or with labels for the routers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from stages.internals.transformers_internals import on_device
from stages.internals.trl_internals import note_metric
from stages.mixture.routing import RouterOutput, hooked, outputs_of, routers_of
from stages.models.load import full_tensor
from stages.planning.plan import Plan
from stages.training.batches import IGNORED
from stages.training.trainer import RecipeTrainer


def make_trainer(plan: Plan, *, model: PreTrainedModel | PeftModel, **rest: Any) -> RecipeTrainer:
    """The plan's trainer: of routers, of a mixture, or of a dense model. rest: arguments of RecipeTrainer."""
    routers = routers_of(model)
    if plan.recipe.loss == "router-labels":
        return RouterTrainer(plan, routers, model=model, **rest)
    coefficient = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)
    # If every token takes all experts, the balance is their number, whatever the routers do.
    if coefficient > 0 and any(router.top_k < router.num_experts for router in routers):
        return BalancedTrainer(plan, routers, coefficient, model=model, **rest)
    return RecipeTrainer(plan, model=model, **rest)


class BalancedTrainer(RecipeTrainer):
    """Adds Switch Transformer's auxiliary loss (arXiv 2101.03961, equations 4 to 6), as transformers computes it
    (`load_balancing_loss_func`), but of all micro-batches of a step together, times the coefficient of the model's
    config:

        experts * sum over experts of (share of tokens that take the expert) * (its mean probability)

    A product of two means is not the mean of such products. Summed over micro-batches it is another loss, which makes
    every micro-batch use all experts: with one sample in each, it works against the goal of a router, one expert for
    each domain (arXiv 2501.11873). Here the shares, which have no gradient, are counted over all micro-batches before
    the first of them is trained on; the rest is a sum over tokens.
    """

    def __init__(self, plan: Plan, routers: list[Qwen2MoeTopKRouter], coefficient: float, **rest: Any) -> None:
        self.routers = routers
        self.coefficient = coefficient
        self.step_counts: tuple[torch.Tensor, torch.Tensor] | None = None
        """`times_taken` for the step's micro-batches of all processes; None for a single micro-batch."""
        super().__init__(plan, **rest)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> torch.Tensor:
        if not self.model.training:  # validation is of the answers alone
            return super().compute_loss(model, inputs, **kwargs)
        with outputs_of(self.routers) as outputs:
            loss = super().compute_loss(model, inputs, **kwargs)
        mask = tokens_of(inputs)
        taken, rows = self.step_counts or times_taken(outputs, mask)
        total = torch.zeros_like(taken)
        for logits, *_ in outputs:
            probabilities = logits.float().softmax(-1) * mask.reshape(-1, 1).to(logits.device)
            total = total + probabilities.sum(0).to(total.device)
        balance = len(taken) * (taken / rows * total / rows).sum()
        note_metric(self, "aux_loss", balance.item())
        # ddp averages over processes, but this is a sum over tokens.
        return loss + self.coefficient * self.accelerator.num_processes * balance.to(loss.device)

    def get_batch_samples(self, iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[Any, Any]:
        """The micro-batches of a step; their use of experts is counted before the first is trained on."""
        batches, num_items = super().get_batch_samples(iterator, num_batches, device)
        self.step_counts = None
        if len(batches) * self.accelerator.num_processes > 1:
            counts = []
            training = self.model.training
            self.model.eval()  # draws no random numbers
            for batch in batches:
                inputs = {name: value for name, value in on_device(self, batch).items() if name != "labels"}
                with torch.no_grad(), self.compute_loss_context_manager(), outputs_of(self.routers) as outputs:
                    self.model(**inputs, use_cache=False, logits_to_keep=1)
                counts.append(times_taken(outputs, tokens_of(inputs)))
            self.model.train(training)
            taken, rows = (
                self.accelerator.reduce(torch.stack(part).sum(0), "sum") for part in zip(*counts, strict=True)
            )
            self.step_counts = taken, rows
        return batches, num_items


def times_taken(outputs: Sequence[RouterOutput], mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of times that each expert is among a token's top k, (experts,), and of tokens times layers.

    outputs: of the routers, layer by layer. mask: (B, T), 1 for tokens and 0 for padding.
    """
    first, *_ = outputs[0]
    taken = torch.zeros(first.shape[-1], device=first.device)
    for logits, _, chosen in outputs:
        counts = torch.zeros(logits.shape, device=logits.device).scatter_(-1, chosen, 1.0)
        taken += (counts * mask.reshape(-1, 1).to(logits.device)).sum(0).to(taken.device)
    return taken, mask.to(taken).sum() * len(outputs)


def tokens_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """(B, T): 1 for tokens and 0 for padding; a packed row has no padding."""
    mask = batch.get("attention_mask")
    return mask if mask is not None else torch.ones_like(batch["input_ids"])


class RouterTrainer(RecipeTrainer):
    """Trains only routers, with the loss of `router_loss` instead of the next token's."""

    def __init__(self, plan: Plan, routers: list[Qwen2MoeTopKRouter], **rest: Any) -> None:
        assert routers[0].num_experts == len(plan.domains), (routers[0], plan.domains)
        self.routers = routers
        super().__init__(plan, **rest)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *, num_items_in_batch: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """This micro-batch's part of the mean over layers and over the step's tokens."""
        loss, correct = router_loss(self.routers, model, inputs)
        share = self.accelerator.reduce(correct, "sum") / num_items_in_batch
        # The mean over micro-batches is logged.
        note_metric(self, "router_accuracy", (share * self.current_gradient_accumulation_steps).item())
        return self.accelerator.num_processes * loss / num_items_in_batch

    def get_batch_samples(self, iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[Any, Any]:
        """The micro-batches of a step, and the number of their tokens, including the first of each sample."""
        batches, _ = super().get_batch_samples(iterator, num_batches, device)
        num_tokens = torch.stack([batch["labels"].ne(IGNORED).sum() for batch in batches]).sum()
        return batches, self.accelerator.reduce(num_tokens.to(device), "sum")


def router_loss(
    routers: Sequence[Qwen2MoeTopKRouter], model: nn.Module, inputs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of every router's logits with the number of the token's expert, and the number of tokens with
    the right expert as the likeliest: sums over tokens, means over layers.

    A router sees the real output of the layers below, but its loss does not train them. So the forward pass needs no
    gradient, and only the routers' inputs are kept; their logits are computed again from these.
    model: wrapped by the trainer. inputs: a micro-batch; its `labels` (B, T) are numbers of experts, and IGNORED for
    padding.
    """
    hidden_states: list[torch.Tensor] = []

    def detach(_router: nn.Module, args: Any, output: RouterOutput) -> tuple[torch.Tensor, ...]:
        hidden_states.append(args[0].detach().flatten(0, -2))
        return tuple(tensor.detach() for tensor in output)

    labels = inputs["labels"].flatten()
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    with hooked(routers, detach):
        model(**inputs, use_cache=False, logits_to_keep=1)  # the next token's logits are not needed
    loss, correct = torch.zeros(2, device=labels.device)
    for router, hidden in zip(routers, hidden_states, strict=True):
        logits = F.linear(hidden, full_tensor(router.weight).to(hidden.dtype)).float()
        here = labels.to(logits.device)
        loss = loss + F.cross_entropy(logits, here, ignore_index=IGNORED, reduction="sum").to(loss.device)
        correct = correct + (logits.argmax(-1) == here).sum().to(correct.device)
    return loss / len(routers), correct / len(routers)
