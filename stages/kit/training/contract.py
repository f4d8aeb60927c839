"""The start contract: before the first step, and after its backward pass, training is what the plan says it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.core.errors import UserError
from stages.kit.models.adapters import count_trainable, part_of
from stages.kit.models.load import check_placement, whole
from stages.kit.planning.plan import Plan


class ContractBreach(UserError):
    """The run does not do what its recipe says."""


def check_start(model: nn.Module, plan: Plan, *, devices_in_use: int) -> None:
    """Trainable counts by part as planned, trained weights in fp32, everything on the planned kind of device; under
    fp16 nothing in bf16, which is slow on a Turing GPU.

    devices_in_use: the devices that this process would split a batch over; more than one means DataParallel.
    """
    if isinstance(model, nn.DataParallel) or devices_in_use > 1:
        raise ContractBreach(
            f"recipe {plan.recipe} would run under DataParallel; use placement single, ddp, sharded or balanced"
        )
    check_placement(model, plan.device)
    found = asdict(count_trainable(model))
    for part, expected in plan.trainable.items():
        if found[part] != expected:
            raise ContractBreach(
                f"recipe {plan.recipe}: {part} has {found[part]:,} parameters to train, but the plan says {expected:,}"
                if part != "all"
                else f"recipe {plan.recipe}: the model has {found[part]:,} parameters, but the plan says {expected:,}"
            )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ContractBreach(
                f"recipe {plan.recipe}: {name} is to be trained, but is {parameter.dtype}, not float32"
            )
    if plan.precision == "fp16":
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dtype == torch.bfloat16:
                raise ContractBreach(f"recipe {plan.recipe}: precision is fp16, but {name} is bfloat16")


def check_gradients(model: nn.Module, plan: Plan) -> None:
    """After a backward pass: finite gradients wherever they are due, none elsewhere, and each trained part moves.

    All processes of a sharded model ask at once, and find the same, whichever of them holds the fault.
    """
    moving: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        part = part_of(name)
        if parameter.requires_grad and parameter.grad is None:
            raise ContractBreach(f"recipe {plan.recipe}: {part} is trained, but {name} got no gradient")
        if not parameter.requires_grad and parameter.grad is not None:
            raise ContractBreach(f"recipe {plan.recipe}: {part} is frozen there, but {name} got a gradient")
        if parameter.grad is not None:
            if not whole(torch.isfinite(parameter.grad).all()):
                raise ContractBreach(f"recipe {plan.recipe}: the gradient of {name} ({part}) is not finite")
            moving[part] = moving.get(part, False) or bool(whole(parameter.grad.any()))
    for part in plan.parts.trained():
        if not moving.get(part):
            raise ContractBreach(f"recipe {plan.recipe}: {part} is trained, but all its gradients are zero")


MAX_OVERFLOWS = 16
"""First steps that may overflow under fp16: GradScaler starts at 2**16 and halves its scale after each."""


class StartContract(TrainerCallback):
    """Checks gradients once, between the first backward pass and the first optimizer step.

    Under fp16 the first steps may overflow, and GradScaler then skips them: the check waits for one that does not.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.checked = False
        self.overflows = 0

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        if not self.checked:
            if self.plan.precision == "fp16" and self.overflows < MAX_OVERFLOWS and _overflowed(model):
                self.overflows += 1
                return
            check_gradients(model, self.plan)
            self.checked = True


def _overflowed(model: nn.Module) -> bool:
    """Whether the backward pass overflowed; clipping by an infinite norm has then made its gradients NaN or zero."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    finite = all(bool(whole(torch.isfinite(gradient).all())) for gradient in gradients)
    return not finite or not any(bool(whole(gradient.any())) for gradient in gradients)
