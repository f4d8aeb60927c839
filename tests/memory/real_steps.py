"""Real trainings of small models, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers.trainer_utils import IntervalStrategy

from stages.core.params.schema import DeviceParams
from stages.evaluation.validation import Validator
from stages.internals.torch_internals import cpu_peak
from stages.memory.step import from_features
from stages.mixture.trainer import make_trainer
from stages.models.adapters import apply_recipe
from stages.models.kernels import fused_kernels
from stages.models.load import shard, to_local
from stages.planning.plan import Plan
from stages.training.batches import FEATURES
from stages.training.trainer import RecipeTrainer, StartContract
from tests.memory.small import batch_of, config_of, processor_of, quantization_tensors
from tools.timing import random_model, with_contents

PROCESSES = 2


def sharded(settings: dict[str, Any]) -> dict[str, Any]:
    return {"placement": "sharded", "device": DeviceParams(kind="cpu", count=PROCESSES), **settings}


def trainer_of(
    plan: Plan,
    model_name: str,
    *,
    collator: Callable[[Any], dict[str, Any]],
    mesh: DeviceMesh | None,
    validator: Validator | None = None,
) -> RecipeTrainer:
    """A trainer of a model with the same weights in every process; mesh: of these, if there are more."""
    torch.manual_seed(0)
    model = apply_recipe(random_model(plan, config_of(model_name)), plan.recipe)
    if mesh is not None and plan.memory.placement == "sharded":
        shard(model, plan, mesh)
    trainer = make_trainer(
        plan,
        model=model,
        processor=processor_of(model_name),
        collator=collator,
        validator=validator,
        report_to="none",
    )
    trainer.remove_callback(trainer.rehearsal)
    if plan.memory.precision == "fp16":  # a step that overflows leaves no optimizer state
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    return trainer


def measured_bytes(model_name: str, plan: Plan, mesh: DeviceMesh | None) -> int:
    """The peak of this process in two optimizer steps: only the second begins with the optimizer's state there."""
    batch = with_contents(batch_of(plan, config_of(model_name)))
    if plan.features_bytes:
        batch = from_features(batch, config_of(model_name), plan.memory.precision)
        batch[FEATURES].uniform_()
    # All processes together; those that are pretended do not count for Trainer.
    num_samples = plan.memory.micro_batch * plan.schedule.grad_accumulation * plan.device.count
    plan = replace(plan, schedule=replace(plan.schedule, num_steps=2, train_samples=num_samples))
    trainer = trainer_of(plan, model_name, collator=lambda _: dict(batch), mesh=mesh)
    trainer.args.logging_strategy = IntervalStrategy.NO
    trainer.remove_callback(StartContract)  # an adapter's gradient is zero where the model itself is random
    held = [*map(to_local, trainer.model.parameters()), *trainer.model.buffers(), *quantization_tensors(trainer.model)]
    with fused_kernels(trainer.model, used=plan.fused_kernels), cpu_peak([*batch.values(), *held]) as peak:
        trainer.train()
    return peak.size_bytes
