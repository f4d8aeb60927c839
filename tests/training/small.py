"""Small trainings of recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.core.params import load_params
from stages.core.params.schema import DeviceParams
from stages.data.conversation import Conversation
from stages.mixture.trainer import make_trainer
from stages.models.adapters import apply_recipe, count_trainable
from stages.models.load import full_tensor, load_config, load_model
from stages.models.prompts import load_processor
from stages.planning.plan import Plan, Validation
from stages.planning.resolve import resolve_plan
from stages.training.batches import ConversationCollator
from stages.training.randomness import seed_everything
from stages.training.trainer import RecipeTrainer
from tests import ROOT

PARAMS = load_params(ROOT / "params.yaml")


def plan_for(recipe: str, *, micro_batch: int = 4, samples: int = 8, **changes: Any) -> Plan:
    profile = PARAMS.active
    memory = replace(profile.memory, micro_batch=micro_batch)
    changed = replace(PARAMS.recipe(recipe), **{"effective_batch": 4, "epochs": 2, **changes})
    params = replace(
        PARAMS, profiles={"tiny": replace(profile, memory=memory)}, recipes={**PARAMS.recipes, recipe: changed}
    )
    return replace(resolve_plan(params, recipe, train_samples=samples), validation=None)


def validation(**changes: Any) -> Validation:
    settings: dict[str, Any] = {"split": "selection", "max_new_tokens": 8, "max_length": None, "by": "loss"}
    return Validation(**{**settings, "keep_best": False, "patience": None, **changes})


def trainer_on(
    folder: Path,
    samples: Sequence[Conversation],
    plan: Plan,
    *,
    experts: Sequence[int] | None = None,
    aux_loss: float = 0.0,
    **trainable: int,
) -> RecipeTrainer:
    """A plan's trainer of the model of a folder. aux_loss: coefficient of a mixture. trainable: the plan's counts, if
    they are not the model's."""
    seed_everything(plan.seed)
    base = load_model(
        folder,
        device=DeviceParams(kind="cpu"),
        precision=plan.memory.precision,
        quantization=plan.quantization,
        attn=plan.memory.attn,
        padding_free=plan.padding_free,
    )
    base.config.router_aux_loss_coef = aux_loss
    model = apply_recipe(base, plan.recipe)
    processor = load_processor(folder, None)
    collator = ConversationCollator(
        *(processor, samples, lambda it: it),
        loss=plan.recipe.loss,
        max_length=plan.recipe.max_length,
        experts=experts,
        packed_for=load_config(folder) if plan.padding_free else None,
    )
    plan = replace(plan, trainable=count_trainable(model) | trainable)
    return make_trainer(plan, model=model, processor=processor, collator=collator, report_to="none")


def weights(trainer: RecipeTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def log_of(trainer: RecipeTrainer) -> list[dict[str, float]]:
    """The lines of its log, without times."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(("_runtime", "_per_second"))}
        for entry in trainer.state.log_history
    ]


class TakeGradients(TrainerCallback):
    """Keeps the gradients that the optimizer gets, by name, gathered from all processes."""

    gradients: dict[str, torch.Tensor]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        self.gradients = {name: full_tensor(gradient).clone() for name, gradient in named.items()}


class Killed(BaseException):
    """Nothing catches it."""


def kill() -> None:
    raise Killed


class At(TrainerCallback):
    """Calls a function after a step, before it is saved."""

    def __init__(self, step: int, call: Callable[[], Any]) -> None:
        self.step, self.call = step, call

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step == self.step:
            self.call()
