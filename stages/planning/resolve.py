"""Resolves every setting of a training run from recipe, profile, data and the base's geometry."""

from __future__ import annotations

from dataclasses import fields, replace
from math import ceil
from typing import TYPE_CHECKING, TypeVar

from stages.core.errors import UserError
from stages.core.families import family_of
from stages.core.params import nf4_problems
from stages.core.params.schema import (
    Kernels,
    LearningParams,
    MemoryParams,
    PaddingFree,
    Params,
    ProfileParams,
    RecipeParams,
    StepParams,
)
from stages.planning.plan import DATA_PARALLEL, Plan, Schedule, Validation

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

T = TypeVar("T", LearningParams, StepParams)


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
    Raises UserError if the effective batch is no multiple of what the devices take at once, or the steps are too few.
    """
    recipe, profile = params.recipe(name), params.active
    quantization = params.quantization(name)
    schedule = _schedule(recipe, profile, train_samples, _grad_accumulation(params, name))
    _require_steps(name, recipe, schedule)
    return Plan(
        name=name,
        profile=params.profile,
        base_dir=f"data/{recipe.base}",
        data_dir=f"data/prepared/{recipe.data}",
        recipe=_base_fields(LearningParams, recipe),
        memory=_base_fields(
            StepParams, replace(profile.memory, optimizer=recipe.optimizer or profile.memory.optimizer)
        ),
        device=profile.device,
        images=profile.images,
        dataloader_workers=profile.dataloader_workers,
        instructions=instructions,
        quantization=quantization,
        may_quantize=recipe.quantization != quantization and not any(nf4_problems(recipe)),
        domains=params.domains(name) if recipe.loss == "router-labels" else (),
        skip_too_long=recipe.skip_too_long,
        schedule=schedule,
        validation=_validation(recipe, profile, schedule.num_steps, "selection" if has_selection else "val"),
        seed=params.seed if recipe.seed is None else recipe.seed,
    )


def _base_fields(kind: type[T], settings: T) -> T:
    """The fields of params that their base class has: a change of any other one leaves the plan as it is."""
    return kind(**{field.name: getattr(settings, field.name) for field in fields(kind)})


def _grad_accumulation(params: Params, name: str) -> int:
    """Micro-batches of a step on each device."""
    effective_batch, memory = params.recipe(name).effective_batch, params.active.memory
    replicas = params.active.device.total if memory.placement in DATA_PARALLEL else 1
    if effective_batch % (at_once := memory.micro_batch * replicas):
        raise UserError(
            f"recipes.{name}.effective_batch is {effective_batch}, which is not a multiple of micro_batch "
            f"{memory.micro_batch} x {replicas} device(s) (profiles.{params.profile}.memory.micro_batch)"
        )
    return effective_batch // at_once


def _schedule(recipe: RecipeParams, profile: ProfileParams, train_samples: int, grad_accumulation: int) -> Schedule:
    # The last, smaller batch of an epoch is a step too, as in transformers' Trainer.
    steps_per_epoch = ceil(train_samples / recipe.effective_batch)
    epochs = min(recipe.epochs, profile.max_epochs or recipe.epochs)
    num_steps = min(steps_per_epoch * epochs, recipe.max_steps or steps_per_epoch * epochs)
    ratio = 0.05 if recipe.warmup_ratio is None else recipe.warmup_ratio
    warmup_steps = ceil(num_steps * ratio) if num_steps > 1 else 0  # a warm-up's first step has rate 0
    rates = {part: recipe.part_learning_rates.get(part, recipe.learning_rate) for part in recipe.parts.trained()}
    return Schedule(
        train_samples=train_samples,
        grad_accumulation=grad_accumulation,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        warmup_steps=warmup_steps if recipe.warmup_steps is None else recipe.warmup_steps,
        learning_rates={part: rate * profile.learning_rate_scale for part, rate in rates.items()},
    )


def _require_steps(name: str, recipe: RecipeParams, schedule: Schedule) -> None:
    """Raises UserError if a warm-up takes all steps, or together with a decay more than there are."""
    warmup, num_steps, options = schedule.warmup_steps, schedule.num_steps, recipe.lr_schedule_options
    decay = max(1, options.decay_steps(num_steps) if options else 0)
    if (options or recipe.warmup_steps is not None) and warmup + decay > num_steps:
        raise UserError(
            f"recipes.{name} has {num_steps} steps, fewer than a warm-up of {warmup} and a decay of {decay}; lower "
            "warmup_steps or warmup_ratio, or lr_schedule_options.decay_ratio"
        )


def _validation(recipe: RecipeParams, profile: ProfileParams, num_steps: int, split: str) -> Validation | None:
    if (wanted := recipe.validation) is None:
        return None
    most = profile.validation_limit or wanted
    every = wanted.every_steps if wanted.every_steps >= 1 else max(1, round(wanted.every_steps * num_steps))
    samples = min(wanted.samples, most.samples)
    return Validation(
        split=split,
        every_steps=int(every),
        samples=samples,
        score_samples=min(wanted.score_samples, most.score_samples, samples),
        by=wanted.by,
        max_new_tokens=profile.evaluation.max_new_tokens,
        max_length=profile.evaluation.max_length,
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
        return False, "published results of a CPU have padded batches"
    if plan.memory.attn == "eager":
        return False, "eager attention computes masked positions too"
    if plan.memory.precision != "bf16":  # a GPU with bf16 is an Ampere or newer
        return False, f"not every GPU that computes in {plan.memory.precision} has variable-length attention"
    return True, "the GPU has variable-length attention"
