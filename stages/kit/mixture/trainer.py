"""Trainers of mixtures: RecipeTrainer with a loss that balances the experts, or with the labels of their routers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from stages.kit.mixture.balance import LoadBalance
from stages.kit.mixture.router_labels import RouterLabels
from stages.kit.planning.plan import Plan
from stages.kit.training.collators import IGNORED
from stages.kit.training.trainer import RecipeTrainer


def make_trainer(plan: Plan, *, model: PreTrainedModel | PeftModel, **rest: Any) -> RecipeTrainer:
    """The trainer that the plan asks for: of routers, of a mixture, or of a dense model. rest: as RecipeTrainer."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if plan.loss == "router-labels":
        return RouterTrainer(plan, RouterLabels(base, plan.domains), model=model, **rest)
    coefficient = getattr(base.config.get_text_config(), "router_aux_loss_coef", 0.0)
    balance = LoadBalance(base)
    if balance.matters and coefficient > 0:
        return BalancedTrainer(plan, balance, coefficient, model=model, **rest)
    return RecipeTrainer(plan, model=model, **rest)


class BalancedTrainer(RecipeTrainer):
    """Adds `LoadBalance.loss`, times the coefficient of the model's config, to the loss of every step."""

    def __init__(self, plan: Plan, balance: LoadBalance, coefficient: float, **rest: Any) -> None:
        self.balance = balance
        self.balance_coefficient = coefficient
        super().__init__(plan, **rest)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        with self.balance.watching():
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if return_outputs:
            return loss
        balance = self.balance.loss(inputs["attention_mask"])
        self._metrics["train"]["aux_loss"].append(balance.item())
        # Of this process's tokens; ddp takes the mean of what the processes have, and wants the sum.
        return loss + self.balance_coefficient * self.accelerator.num_processes * balance.to(loss.device)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """The micro-batches of a step; how they use the experts is counted before the first is trained on."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        counted = None
        if len(batches) * self.accelerator.num_processes > 1:
            with self.compute_loss_context_manager():
                taken, rows = self.balance.count(self.model, [self._prepare_inputs(batch) for batch in batches])
            counted = self.accelerator.reduce(taken, "sum"), self.accelerator.reduce(rows, "sum")
        self.balance.begin_step(counted)
        return batches, num_items


class RouterTrainer(RecipeTrainer):
    """Trains routers alone, by the labels of `RouterLabels` in place of the loss of the next token."""

    def __init__(self, plan: Plan, labels: RouterLabels, **rest: Any) -> None:
        self.router_labels = labels
        # DDP would look for unused parameters in what the model returns, where the loss of routers does not show.
        super().__init__(plan, ddp_find_unused_parameters=False, **rest)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The mean over layers and over the step's tokens, of which this micro-batch has its part."""
        assert num_items_in_batch is not None
        assert not return_outputs
        loss, correct = self.router_labels.loss(model, inputs)
        share = self.accelerator.reduce(correct, "sum") / num_items_in_batch
        # What is logged is the mean over micro-batches.
        self._metrics["train"]["router_accuracy"].append((share * self.current_gradient_accumulation_steps).item())
        return self.accelerator.num_processes * loss / num_items_in_batch

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """The micro-batches of a step, and their tokens: a sample's first one counts too, which is no next token."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        num_tokens = torch.stack([batch["labels"].ne(IGNORED).sum() for batch in batches]).sum()
        return batches, self.accelerator.reduce(num_tokens.to(device), "sum")
