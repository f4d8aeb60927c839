"""plan.yaml: every setting of one training run. planning/resolve.py makes it before anything is launched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.params.schema import (
    Attention,
    DeviceParams,
    ImageParams,
    LoraParams,
    Loss,
    Optimizer,
    Part,
    PartsParams,
    Positive,
    Rate,
    Seed,
    Size,
    TemplateOptions,
)
from stages.core.records import STRICT, StageFile, damaged, rebuild, shown

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
    """Number of samples of the split to compute the loss of, at most."""
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
class Plan(StageFile):
    recipe: str
    profile: str
    task: str
    base_dir: str
    """Relative to the workspace, as are all paths here."""
    data_dir: str
    answer_format: str | None
    """The form of the answer, if the task has several."""
    template_options: Annotated[TemplateOptions, Field(default_factory=dict)]
    """Options of the base's chat template."""
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


def read_plan(recipe: str, *, runs_dir: Path = Path("data/runs"), fix: str | None = None) -> Plan:
    """The plan of a recipe. Raises UserError if it is missing, damaged or another recipe's.

    fix: the command that makes the file again, for a copy; by default the plan stage.
    """
    path, fix = runs_dir / recipe / "plan.yaml", fix or rebuild(f"plan@{recipe}")
    plan = Plan.read(path, fix=fix)
    if plan.recipe != recipe:
        raise damaged(path, {"recipe": f"this is the plan of {shown(plan.recipe)}"}, fix=fix)
    return plan
