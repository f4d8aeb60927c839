"""plan.yaml: every setting of one training run, resolved from recipe, profile and data before anything is launched."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.errors import UserError
from stages.core.families import family_of
from stages.core.params.schema import (
    Attention,
    DeviceParams,
    ImageParams,
    Kernels,
    LoraParams,
    Loss,
    MemoryParams,
    Optimizer,
    PaddingFree,
    Params,
    Part,
    PartsParams,
    Positive,
    Rate,
    Seed,
    Size,
)
from stages.core.records import STRICT, Record, damaged, rebuild, shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DATA_PARALLEL = ("ddp", "sharded")
"""Placements with one process per device, each with samples of its own."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Schedule:
    train_samples: Positive
    effective_batch: Size
    micro_batch: Size
    grad_accumulation: Size
    epochs: Positive
    steps_per_epoch: Positive
    num_steps: Annotated[int, Field(ge=1)]
    """Optimizer steps in all."""
    warmup_steps: Annotated[int, Field(ge=0)]
    lr_schedule: Literal["cosine", "linear", "constant"]
    learning_rates: dict[Part, Annotated[float, Field(ge=0)]]
    """Learning rate of each trained part, after the profile's scale."""
    weight_decay: Annotated[float, Field(ge=0)]
    max_grad_norm: Rate


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Validation:
    """Validation while training, and what follows from it."""

    split: str
    every_steps: Positive
    """Optimizer steps between two validations; the last step has one too."""
    samples: Positive
    """At most so many samples of the split, whose loss is computed."""
    score_samples: Annotated[int, Field(ge=0)]
    """Number of them that the model also answers."""
    max_new_tokens: Positive
    max_length: Positive | None
    """Limits of an answer, and of a question with its answer, in tokens, as in evaluation."""
    by: Literal["loss", "score"]
    """The figure that decides which validation is the best."""
    keep_best: bool
    """Whether the training leaves the weights of its best validation, not the last ones."""
    patience: Positive | None
    """Validations without a new best after which the training stops; None for any number."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Plan(Record):
    recipe: str
    profile: str
    task: str
    base_dir: str
    """Relative to the workspace, as are all paths here."""
    data_dir: str
    answer_format: str | None
    """The form of the answer, if the task has several."""
    device: DeviceParams
    instructions: str | None = None
    """Instruction set of the CPU, e.g. "avx2" (core/environment.py); None in a preview."""
    placement: Literal["single", "ddp", "sharded", "balanced"]
    precision: Literal["fp32", "fp16", "bf16"]
    quantization: Literal["none", "nf4"]
    may_quantize: bool
    """Whether the recipe specifies nf4 and the profile overrides it: nf4 is then a rung of the ladder."""
    attn: Attention
    padding_free: bool = False
    """Whether the samples of a micro-batch are concatenated into one row, without padding."""
    fused_kernels: bool = False
    """Whether norms, gated products and rotations run by Liger's kernels (models/kernels.py)."""
    gradient_checkpointing: bool
    optimizer: Optimizer
    expandable_segments: bool = False
    dataloader_workers: Annotated[int, Field(ge=0)]
    parts: PartsParams
    lora: LoraParams | None
    full_targets: Annotated[dict[Part, tuple[str, ...]], Field(default_factory=dict)]
    """Suffixes of the modules to train in a part that is trained in full; the whole part if it has none."""
    loss: Loss
    domains: tuple[str, ...] = ()
    """With loss router-labels, the domain of each expert."""
    max_length: Positive
    images: ImageParams | None
    features_bytes: Annotated[int, Field(ge=0)] = 0
    """Upper bound on the disk for features of frozen vision towers, computed once; 0 if every step computes them."""
    schedule: Schedule
    validation: Validation | None = None
    seed: Seed
    trainable: Annotated[dict[str, int], Field(default_factory=dict)]
    """Trainable parameters by part, in total, and all parameters; from the model's real geometry."""

    def faults(self) -> dict[str, str]:
        """Problems by field: values that resolve_plan never writes."""
        forms = {"base_dir": r"data/((bases|builds)/[\w-]+|runs/[\w-]+/merged)", "data_dir": r"data/prepared/[\w-]+"}
        wrong = [name for name, form in forms.items() if not re.fullmatch(form, getattr(self, name))]
        return {name: f"{shown(getattr(self, name))} is no such folder of the pipeline" for name in wrong}

    @property
    def on_gpu(self) -> bool:
        return self.device.kind == "cuda"

    @property
    def is_data_parallel(self) -> bool:
        """Whether every device has a process of its own (ddp, sharded), with samples of its own."""
        return self.placement in DATA_PARALLEL

    @property
    def is_sharded(self) -> bool:
        return self.placement == "sharded"

    @property
    def is_quantized(self) -> bool:
        return self.quantization == "nf4"

    @property
    def may_be_quantized(self) -> bool:
        """Whether the weights are in nf4, or may be on a lower rung of the ladder."""
        return self.is_quantized or self.may_quantize

    @property
    def processes_per_node(self) -> int:
        return self.device.count if self.is_data_parallel else 1

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step on one process."""
        return self.schedule.micro_batch * self.schedule.grad_accumulation


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
    of_recipe = ("task", "answer_format", "parts", "lora", "full_targets", "loss", "max_length")
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


def read_plan(recipe: str, *, runs_dir: Path = Path("data/runs"), fix: str | None = None) -> Plan:
    """The plan of a recipe. Raises UserError if it is missing, damaged or another recipe's.

    fix: the command that makes the file again, for a copy; by default the plan stage.
    """
    path, fix = runs_dir / recipe / "plan.yaml", fix or rebuild(f"plan@{recipe}")
    plan = Plan.read(path, fix=fix)
    if plan.recipe != recipe:
        raise damaged(path, {"recipe": f"this is the plan of {shown(plan.recipe)}"}, fix=fix)
    return plan
