"""plan.yaml: every setting of one training run. planning/resolve.py makes it before anything is launched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.params.schema import (
    DeviceParams,
    ImageParams,
    LearningParams,
    Part,
    Positive,
    Seed,
    Size,
    StepParams,
    ValidationParams,
)
from stages.core.records import STRICT, StageFile, damaged, rebuild, shown

DATA_PARALLEL = ("ddp", "sharded")
"""Placements with one process per device, each with samples of its own."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Schedule:
    train_samples: Positive
    grad_accumulation: Size
    epochs: Positive
    steps_per_epoch: Positive
    num_steps: Annotated[int, Field(ge=1)]
    """Optimizer steps in all."""
    warmup_steps: Annotated[int, Field(ge=0)]
    learning_rates: dict[Part, Annotated[float, Field(ge=0)]]
    """Learning rate of each trained part, after the profile's scale."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Validation(ValidationParams):
    """Validation while training, and what follows from it."""

    split: str
    every_steps: Positive
    max_new_tokens: Positive
    max_length: Positive | None
    """Limits of an answer, and of a question with its answer, in tokens, as in evaluation."""
    keep_best: bool
    """Whether the training leaves the weights of its best validation, not the last ones."""
    patience: Positive | None
    """Validations without a new best after which the training stops; None for any number."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Plan(StageFile):
    name: str
    """The recipe's."""
    profile: str
    base_dir: str
    """Relative to the workspace, as are all paths here."""
    model_type: str | None = None
    """The base's, as in its config.json."""
    data_dir: str
    recipe: LearningParams
    memory: StepParams
    device: DeviceParams
    images: ImageParams | None
    dataloader_workers: Annotated[int, Field(ge=0)]
    instructions: str | None = None
    """Instruction set of the CPU, e.g. "avx2" (core/environment.py); None in a preview."""
    quantization: Literal["none", "nf4"]
    may_quantize: bool
    """Whether the recipe specifies nf4, can have it, and the profile overrides it: nf4 is then a rung of the ladder."""
    padding_free: bool = False
    """Whether the samples of a micro-batch are concatenated into one row, without padding."""
    fused_kernels: bool = False
    """Whether norms, gated products and rotations run by Liger's kernels (models/kernels.py)."""
    domains: tuple[str, ...] = ()
    """With loss router-labels, the domain of each expert."""
    skip_too_long: bool = False
    """Whether training samples that are longer than max_length are left out."""
    features_bytes: Annotated[int, Field(ge=0)] = 0
    """Upper bound on the disk for features of frozen vision towers, computed once; 0 if every step computes them."""
    schedule: Schedule
    validation: Validation | None = None
    seed: Seed
    trainable: dict[str, int] = Field(default_factory=dict)
    """Trainable parameters by part, in total, and all parameters; from the model's real geometry."""

    @property
    def on_gpu(self) -> bool:
        return self.device.kind == "cuda"

    @property
    def is_data_parallel(self) -> bool:
        """Whether every device has a process of its own (ddp, sharded), with samples of its own."""
        return self.memory.placement in DATA_PARALLEL

    @property
    def is_sharded(self) -> bool:
        return self.memory.placement == "sharded"

    @property
    def is_quantized(self) -> bool:
        return self.quantization == "nf4"

    @property
    def may_be_quantized(self) -> bool:
        """Whether the weights are in nf4, or may be on a lower rung of the ladder."""
        return self.is_quantized or self.may_quantize

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step on one process."""
        return self.memory.micro_batch * self.schedule.grad_accumulation

    @property
    def rehearsed_micro_batches(self) -> int:
        """Micro-batches that show the peak of a step: all but its first find gradients already there."""
        return min(2, self.schedule.grad_accumulation)

    def with_memory(self, **settings: Any) -> Plan:
        """The plan with these settings of its `memory`."""
        return replace(self, memory=replace(self.memory, **settings))

    def with_micro_batch(self, size: int) -> Plan:
        """The plan with another micro-batch, a divisor of samples_per_step, and as many samples in a step."""
        schedule = replace(self.schedule, grad_accumulation=self.samples_per_step // size)
        return replace(self.with_memory(micro_batch=size), schedule=schedule)


def sorted_steps(drawn: Iterable[int], lengths: Sequence[int], effective_batch: int) -> Iterator[list[int]]:
    """The samples of each optimizer step, the longest first, so that its micro-batches have less padding.

    drawn: all samples in the order in which they are drawn. lengths: in tokens, by sample. effective_batch: samples of
    a step, over all processes.
    """
    drawn = iter(drawn)
    while step := list(islice(drawn, effective_batch)):
        yield sorted(step, key=lambda sample: (-lengths[sample], sample))


def read_plan(recipe: str, *, runs_dir: Path = Path("data/runs"), fix: str | None = None) -> Plan:
    """The plan of a recipe. Raises UserError if it is missing, damaged or another recipe's.

    fix: the command that makes the file again, for a copy; by default the plan stage.
    """
    path, fix = runs_dir / recipe / "plan.yaml", fix or rebuild(f"plan@{recipe}")
    plan = Plan.read(path, fix=fix)
    if plan.name != recipe:
        raise damaged(path, {"name": f"this is the plan of {shown(plan.name)}"}, fix=fix)
    return plan
