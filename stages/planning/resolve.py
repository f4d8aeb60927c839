"""Resolves every setting of a training run from recipe, profile, data and the base's geometry."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from stages.core.errors import UserError
from stages.core.families import family_of
from stages.core.params.schema import Kernels, MemoryParams, PaddingFree, Params
from stages.planning.plan import DATA_PARALLEL, Plan, Schedule, Validation

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def resolve_plan(
    params: Params,
    name: str,
    *,
    train_samples: int,
    has_selection: bool = False,
    instructions: str | None = None,
) -> Plan:
    """The settings of recipe `name` on the active profile; trainable counts are still to be added.

    train_samples: number of training samples in the prepared data. has_selection: whether that has a selection split.
    instructions: this environment's.
    Raises UserError if the effective batch is not divisible by what the devices take at once.
    """
    recipe, profile = params.recipe(name), params.active
    memory = profile.memory
    quantization = memory.quantization or recipe.quantization
    of_recipe = ("task", "answer_format", "template_options", "parts", "lora", "full_targets", "loss", "max_length")
    of_memory = ("placement", "precision", "attn", "gradient_checkpointing", "optimizer", "expandable_segments")
    of_profile = ("device", "dataloader_workers", "images")
    schedule = _schedule(params, name, train_samples)
    return Plan(
        **{name: getattr(recipe, name) for name in of_recipe},
        **{name: getattr(memory, name) for name in of_memory},
        **{name: getattr(profile, name) for name in of_profile},
        recipe=name,
        profile=params.profile,
        base_dir=f"data/{recipe.base}",
        data_dir=f"data/prepared/{recipe.data}",
        instructions=instructions,
        quantization=quantization,
        may_quantize=recipe.quantization != quantization,
        domains=params.domains(name) if recipe.loss == "router-labels" else (),
        schedule=schedule,
        validation=_validation(params, name, schedule.num_steps, "selection" if has_selection else "val"),
        seed=params.seed if recipe.seed is None else recipe.seed,
    )


def _schedule(params: Params, name: str, train_samples: int) -> Schedule:
    recipe, profile = params.recipe(name), params.active
    memory = profile.memory
    replicas = profile.device.total if memory.placement in DATA_PARALLEL else 1
    at_once = memory.micro_batch * replicas
    if recipe.effective_batch % at_once:
        raise UserError(
            f"recipes.{name}.effective_batch is {recipe.effective_batch}, which is not a multiple of micro_batch "
            f"{memory.micro_batch} x {replicas} device(s) (profiles.{params.profile}.memory.micro_batch)"
        )
    # The last, smaller batch of an epoch is a step too, as in transformers' Trainer.
    steps_per_epoch = ceil(train_samples / recipe.effective_batch)
    epochs = min(recipe.epochs, profile.max_epochs or recipe.epochs)
    num_steps = min(steps_per_epoch * epochs, recipe.max_steps or steps_per_epoch * epochs)
    rates = {
        part: recipe.part_learning_rates.get(part, recipe.learning_rate) * profile.learning_rate_scale
        for part in recipe.parts.trained()
    }
    of_recipe = ("effective_batch", "lr_schedule", "weight_decay", "max_grad_norm")
    return Schedule(
        **{name: getattr(recipe, name) for name in of_recipe},
        epochs=epochs,
        train_samples=train_samples,
        micro_batch=memory.micro_batch,
        grad_accumulation=recipe.effective_batch // at_once,
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        warmup_steps=ceil(num_steps * recipe.warmup_ratio),
        learning_rates=rates,
    )


def _validation(params: Params, name: str, num_steps: int, split: str) -> Validation | None:
    recipe, limits = params.recipe(name), params.active.evaluation
    found = recipe.validation
    if found is None:
        return None
    caps = params.active.validation_limit or found
    every = found.every_steps if found.every_steps >= 1 else max(1, round(found.every_steps * num_steps))
    return Validation(
        split=split,
        every_steps=int(every),
        samples=min(found.samples, caps.samples),
        score_samples=min(found.score_samples, caps.score_samples, found.samples, caps.samples),
        by=found.by,
        max_new_tokens=limits.max_new_tokens,
        max_length=limits.max_length,
        keep_best=recipe.keep == "best",
        patience=recipe.early_stopping.patience if recipe.early_stopping else None,
    )


def with_speedups(plan: Plan, memory: MemoryParams, config: PreTrainedConfig) -> tuple[Plan, tuple[str, ...]]:
    """The plan without padding and with fused kernels where they apply, and why, a line each. config: the base's."""
    padding_free, why_row = without_padding(plan, memory.padding_free, config)
    fused_kernels, why_fused = with_fused_kernels(plan, memory.kernels, config)
    return replace(plan, padding_free=padding_free, fused_kernels=fused_kernels), (
        f"micro-batches are {'padding-free' if padding_free else 'padded'}: {why_row}",
        f"norms, gated products and rotations run by {'Liger' if fused_kernels else 'torch'}'s kernels: {why_fused}",
    )


def with_fused_kernels(plan: Plan, wanted: Kernels, config: PreTrainedConfig) -> tuple[bool, str]:
    """(whether Liger's kernels are used, why). wanted: memory.kernels."""
    if wanted == "off":
        return False, "memory.kernels is off"
    if not plan.on_gpu:
        return False, "Liger's kernels need a GPU"
    if family_of(config.model_type).fused_like is None:
        return False, f"no test shows that {config.model_type} computes the same with Liger's"
    return True, "the device is a GPU"


def without_padding(plan: Plan, wanted: PaddingFree, config: PreTrainedConfig) -> tuple[bool, str]:
    """(whether micro-batches are without padding, why). wanted: memory.padding_free."""
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    if wanted == "off":
        return False, "memory.padding_free is off"
    if not family_of(config.model_type).same_without_padding:
        return False, f"no test shows that {config.model_type} computes the same without"
    if other := {*layer_types} - {"full_attention"}:
        return False, f"no test shows that {', '.join(sorted(other))} computes the same without"
    if wanted == "on":
        return True, "memory.padding_free is on"
    if not plan.on_gpu:
        return False, "published results of a CPU are of padded batches"
    if plan.attn == "eager":
        return False, "eager attention computes masked positions too"
    if plan.precision != "bf16":  # a GPU with bf16 is an Ampere or newer
        return False, f"not every GPU that computes in {plan.precision} has variable-length attention"
    return True, "the GPU has variable-length attention"
