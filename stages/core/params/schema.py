"""What params.yaml may say: every field, its type and its range, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from stages.core.errors import UserError
from stages.core.records import nearest

Part = Literal["vision", "projector", "llm"]
PARTS: tuple[Part, ...] = ("vision", "projector", "llm")
Loss = Literal["assistant-only", "all-tokens", "router-labels"]
Attention = Literal["auto", "sdpa", "eager", "flash_attention_2"]
PaddingFree = Literal["auto", "on", "off"]
Kernels = Literal["auto", "off"]
Optimizer = Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"]


class OptimizerTraits(NamedTuple):
    bits: int
    """Size of each of AdamW's two states of a weight."""
    needs_gpu: bool
    shardable: bool
    """Whether it takes DTensors, which the shares of sharded weights are; bitsandbytes' optimizers do not."""
    paged: bool
    """Whether its states move to the machine's memory while the GPU's is short."""
    smaller: Optimizer | None
    """The next one that takes less memory, and the only one that the memory ladder steps down to."""


OPTIMIZERS: dict[Optimizer, OptimizerTraits] = {
    # The fused step has no temporaries of the size of the trained weights (torch.optim.AdamW, `foreach`).
    "adamw_torch": OptimizerTraits(32, needs_gpu=False, shardable=True, paged=False, smaller="adamw_torch_fused"),
    "adamw_torch_fused": OptimizerTraits(32, needs_gpu=False, shardable=True, paged=False, smaller="adamw_8bit"),
    "adamw_8bit": OptimizerTraits(8, needs_gpu=True, shardable=False, paged=False, smaller="paged_adamw_8bit"),
    "paged_adamw_8bit": OptimizerTraits(8, needs_gpu=True, shardable=False, paged=True, smaller=None),
}
"""By the names that transformers' TrainingArguments.optim gives them."""

Positive = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1e12)]
"""Two of them are multiplied and still a number."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")]
"""No dots: DVC takes the path to a parameter apart at them. Folders are called so, which may not be much longer."""
Text = Annotated[str, Field(pattern=r"\S", max_length=2000)]
SlurmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,-]{0,199}$")]
"""Name of a partition or an account; several partitions, apart by commas."""

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeviceParams:
    kind: Literal["cpu", "cuda"]
    count: Annotated[int, Field(ge=1, le=256)] = 1
    """How many devices of a machine one training run uses, each by a process of its own where training is spread."""
    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """On how many machines, each with `count` of them (docs/cluster.md)."""
    memory_gb: Rate | None = None
    """Memory of one device in GB. None on a CPU: this machine's own counts then. The processes of a CPU share it."""

    @property
    def total(self) -> int:
        """Devices of all machines."""
        return self.count * self.nodes

    def one(self) -> DeviceParams:
        """A single one of them: what merging and evaluation use."""
        return replace(self, count=1, nodes=1)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LimitParams:
    """Of a split, at most so many samples: always the same ones, chosen by their content; null for all."""

    train: Positive | None = None
    val: Positive | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DatasetParams:
    task: Name
    """The task whose `sources` package reads it."""
    source: Annotated[str, Field(pattern=r"^(folder:.+|hub:.+@.+|mix)$")]
    """`folder:PATH`, `hub:OWNER/NAME@REVISION`, or `mix`, made of other datasets."""
    limit: LimitParams | None = None
    """How much to take of what the source has: always the same samples, chosen by their content."""
    mix: dict[Name, Annotated[int, Field(ge=0)] | None] | None = None
    """Where the source is `mix`, the datasets it is made of, each with the number of its training samples to take at
    most; null for all. It validates on all of theirs, those of which it takes no training sample too."""
    reader: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task that reads it: see the class Reader in stages/tasks/TASK/sources."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImageParams:
    min_pixels: Positive
    max_pixels: Positive
    """A picture is resized to between these many pixels, its shape kept."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MemoryParams:
    precision: Literal["fp32", "fp16", "bf16"]
    """Of the arithmetic and of frozen weights. Trained weights are always kept in fp32."""
    quantization: Literal["none"] | None = None
    """none: train every recipe on unquantized weights; null: as the recipe says."""
    micro_batch: Positive
    """Samples on one device in one forward pass; accumulation makes up the effective batch."""
    attn: Attention = "auto"
    padding_free: PaddingFree = "auto"
    """Whether the samples of a micro-batch lie behind one another in one row, without padding: where that is faster, or
    wherever it computes the same."""
    kernels: Kernels = "auto"
    """Whether norms, gated products and rotations run by Liger's kernels on a GPU, which round differently."""
    gradient_checkpointing: bool = True
    optimizer: Optimizer = "adamw_torch_fused"
    expandable_segments: bool = False
    """Whether torch's allocator on a GPU maps memory page by page, which leaves hardly any gaps."""
    placement: Literal["single", "ddp", "sharded", "balanced"] = "single"
    """One process on one device; one a device, each with the whole model; one a device, each with its share of every
    weight, gradient and optimizer state (full precision weights and optimizers only: no nf4, no 8 bits); or one process
    with the layers spread over the devices."""
    features_gb: Annotated[float, Field(ge=0)] = 50.0
    """Disk for features of pictures, in GB: where vision tower and projector are frozen they are computed once, and
    kept in .bakeoff/features. 0, or too little for a recipe: each step computes them."""
    fit: Literal["refuse", "auto", "fill", "off"] = "auto"
    """Where a recipe is predicted not to fit: stop with its budget; take the cheapest settings that do; or go on.
    `fill` is `auto`, and where there is room takes the fastest settings that fit."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationParams:
    batch_size: Positive | Literal["auto"] = "auto"
    """Answers at once; auto: as many as the longest question's prediction says the device has room for."""
    max_new_tokens: Positive
    max_samples: Positive | None = None
    """Only the first this many validation samples; null for all."""
    max_length: Positive | None = None
    """Tokens of a sample, its answer counted, to which texts that may be cut are cut; null to cut none."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """It answers the validation samples; vLLM only if its first answers are those of our own code (docs/serving.md)."""
    quantization_samples: Positive = 32
    """Validation samples that a model trained in 4 bits answers before and after its merge, to show what that costs."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProfileParams:
    device: DeviceParams
    bases: dict[Name, Annotated[str, Field(pattern=r"^(folder:.+|hub:.+@.+)$")]]
    """Base models by name: `folder:PATH` or `hub:OWNER/NAME@REVISION`."""
    datasets: dict[Name, DatasetParams]
    images: ImageParams | None = None
    memory: MemoryParams
    evaluation: EvaluationParams
    learning_rate_scale: Rate = 1.0
    """Every learning rate of a recipe is multiplied by this: a tiny model wants a larger one."""
    dataloader_workers: Annotated[int, Field(ge=0, le=256)] = 4
    place: Literal["here", "slurm"] = "here"
    """Where its stages run: on this machine, or each as a job of Slurm. BAKEOFF_PLACE comes first."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraParams:
    rank: Positive
    """Adapter width."""
    alpha: Rate
    """The adapter's output is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: dict[Part, Annotated[tuple[str, ...], Field(min_length=1)]]
    """By part, ends of module names, whole dotted components: `attn.proj` does not match `o_proj`."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PartsParams:
    vision: Literal["frozen", "full", "lora"] = "frozen"
    projector: Literal["frozen", "full", "lora"] = "frozen"
    llm: Literal["frozen", "full", "lora"] = "frozen"

    def trained(self, how: str | None = None) -> tuple[Part, ...]:
        """The parts that are trained at all, or those trained `how` ("full" or "lora")."""
        wanted = {how} if how else {"full", "lora"}
        return tuple(part for part in PARTS if getattr(self, part) in wanted)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RecipeParams:
    task: Name
    base: Annotated[str, Field(pattern=r"^((bases|builds)/[^/]{1,100}|runs/[^/]{1,100}/merged)$")]
    """The folder below data/ to start from: `bases/NAME`, `builds/NAME`, or `runs/RECIPE/merged` to continue another
    recipe."""
    data: Name
    answer_format: Name | None = None
    """How the answer is written, if the task has several formats."""
    parts: PartsParams
    quantization: Literal["none", "nf4"] = "none"
    """nf4: frozen weights in 4 bits with double quantization."""
    lora: LoraParams | None = None
    full_targets: dict[Part, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Of parts trained in full, ends of module names (whole dotted components, like lora.targets) that are trained; the
    whole part where none are named."""
    loss: Loss = "assistant-only"
    """Of the next token, over the answers or over all text. Or `router-labels`: of the expert that a mixture's routers
    choose for each token, layer by layer, which is to be that of the sample's domain (`builds.NAME.experts`)."""
    learning_rate: Rate
    part_learning_rates: dict[Part, Rate] = Field(default_factory=dict)
    """Parts that take another learning rate than `learning_rate`."""
    epochs: Positive = 3
    max_steps: Positive | None = None
    """Stop after this many optimizer steps, before the epochs are over."""
    effective_batch: Positive = 16
    """Samples in one optimizer step: micro_batch x accumulation x devices."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: Share = 0.05
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Rate = 1.0
    max_length: Positive = 2048
    """Tokens of a sample, picture tokens counted; a longer one is an error. Only a text that the task lets be cut, such
    as the transcript that a question is about, is cut to fit; an answer never."""
    seed: Seed | None = None
    """Null: that of the whole pipeline."""

    def base_recipe(self) -> str | None:
        """The recipe that this one continues, or None where it starts from a base."""
        return recipe_of(self.base)

    def base_build(self) -> str | None:
        """The build that this one starts from, or None."""
        kind, _, name = self.base.partition("/")
        return name if kind == "builds" else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExpertParams:
    recipe: Name
    """Its merged model is the expert."""
    domain: Name | None = None
    """The samples that are to be this expert's, as the task names them; null where the task knows no domains."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BuildParams:
    """A mixture of experts made from dense models that recipes trained from one base."""

    task: Name
    """The experts'; its probes of each domain show where the domain's tokens go."""
    base: Annotated[str, Field(pattern=r"^bases/[^/]{1,100}$")]
    """`bases/NAME`, a dense model: the experts were trained from it, and the mixture has all of it but the MLPs."""
    experts: Annotated[tuple[ExpertParams, ...], Field(min_length=2)]
    """Numbered in this order. All of them have a domain, or none."""
    top_k: Annotated[int, Field(ge=2)] = 2
    """Experts that a token takes, at most all. One alone would have a weight of 1, and its router no gradient."""

    @property
    def recipes(self) -> tuple[str, ...]:
        """Those of the experts, in their order."""
        return tuple(expert.recipe for expert in self.experts)

    @property
    def domains(self) -> tuple[str, ...]:
        """Those of the experts, in their order; empty where they have none."""
        return tuple(expert.domain for expert in self.experts if expert.domain is not None)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BaselineParams:
    """A base, or what was built from several models, evaluated as it is: a row to compare with."""

    task: Name
    base: Annotated[str, Field(pattern=r"^(bases|builds)/[^/]{1,100}$")]
    data: Name
    answer_format: Name | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PredictionsParams:
    """What a trained model is to say of inputs whose truth nobody knows."""

    task: Name
    """The recipe's; its `predictions` read the inputs."""
    recipe: Name
    inputs: Annotated[str, Field(pattern=r"^data(/[^/.][^/]*)+$")]
    """A file below data/."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataParams:
    skip_invalid: bool = False
    """Leave invalid records out, counted and listed, where they would otherwise stop the run."""
    selection: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the training samples to set aside, to choose settings by: trained on by none, and no validation samples.
    Which ones, their content alone decides."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrackingParams:
    wandb: bool = False
    wandb_mode: Literal["offline", "online"] = "offline"
    wandb_project: str = "bakeoff"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelParams:
    """Model folders that stages leave."""

    keep_merged: bool = True
    """Whether every recipe leaves a merged model. Without, `merge` writes, reloads and certifies it just so, and then
    leaves its weights out; `evaluate` merges them anew in memory, and refuses them unless they are those of the
    certificate, bit for bit. A model that something else starts from (a recipe, a build, an entry of predictions) is
    always left.

    True by default: a merged model is what people serve, it loads with plain transformers whatever becomes of PEFT, of
    this kit or of the base's repository, and disk is cheaper than finding out. False saves a whole model a recipe and
    experiment: for many experiments on a large base, of which few are kept."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointParams:
    """When a training is saved, to go on from there if it is interrupted. No result depends on it."""

    every_minutes: Rate | None = 15.0
    """Null: not by the clock."""
    every_steps: Positive | None = None
    """Also after every so many optimizer steps; null: not by their count. A training that is asked to end is saved
    whatever these say."""
    keep: Positive = 2
    """How many are kept of a recipe. While one is written there is one more."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class JobParams:
    """Resources that a job asks Slurm for, beside the GPUs and processor cores, which follow from the profile."""

    partition: SlurmName | None = None
    """Null: Slurm's default; likewise `account` and `minutes`."""
    account: SlurmName | None = None
    minutes: Positive | None = None
    """Limit of one job. A training that takes longer takes several."""
    memory_gb: Rate | None = None
    """Memory of the host. Null: what the recipe's plan says."""
    options: tuple[Annotated[str, Field(pattern=r"^--[a-z][^\s]*$")], ...] = ()
    """More of sbatch's long options, e.g. `--constraint=a100`; they win over those of the fields above."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SlurmParams:
    """Jobs of Slurm. No result depends on them."""

    cpu: JobParams = Field(default_factory=JobParams)
    """Jobs of stages without a GPU."""
    gpu: JobParams = Field(default_factory=JobParams)
    """Jobs of stages with one."""
    save_seconds: Annotated[int, Field(ge=1, le=65535)] = 180
    """How long before its time is over a training is asked to save; Slurm may ask a minute earlier. At most Slurm's
    own limit."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Params:
    profile: Name
    seed: Seed = 42
    """Of every training: its order of samples, new weights, dropout. Recipes may have one of their own."""
    scored: Literal["val", "selection"] = "val"
    """The split that models are evaluated on: that of reports, or the one to choose settings by (`data.selection`)."""
    data: DataParams
    tracking: TrackingParams
    checkpoints: CheckpointParams = Field(default_factory=CheckpointParams)
    models: ModelParams = Field(default_factory=ModelParams)
    slurm: SlurmParams = Field(default_factory=SlurmParams)
    baselines: dict[Name, BaselineParams]
    recipes: dict[Name, RecipeParams]
    builds: dict[Name, BuildParams] = Field(default_factory=dict)
    predictions: dict[Name, PredictionsParams] = Field(default_factory=dict)
    profiles: dict[Name, ProfileParams]
    licenses: dict[str, Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]] = Field(default_factory=dict)
    """Licences of bases and data, by source without revision, in the hub's words, e.g. `apache-2.0`."""

    def license_of(self, place: str) -> str | None:
        """The licence of a base or of data, by its source without revision; a folder's is that of all below it."""
        while place not in self.licenses and place.startswith("folder:") and "/" in place:
            place = place.rpartition("/")[0]
        return self.licenses.get(place)

    @property
    def active(self) -> ProfileParams:
        return self.profiles[self.profile]

    def on(self, profile: str) -> Params:
        """The same with another profile active."""
        return replace(self, profile=self._known(profile, self.profiles, "profile"))

    def recipe(self, name: str) -> RecipeParams:
        return self.recipes[self._known(name, self.recipes, "recipe")]

    def subject(self, name: str) -> RecipeParams | BaselineParams:
        """A recipe or a baseline: what an evaluation is of."""
        subjects: dict[str, RecipeParams | BaselineParams] = {**self.baselines, **self.recipes}
        return subjects[self._known(name, subjects, "recipe or baseline")]

    def build(self, name: str) -> BuildParams:
        return self.builds[self._known(name, self.builds, "build")]

    def root(self, recipe: str) -> str:
        """`bases/NAME` or `builds/NAME`, from which the first of the recipes that it continues starts.

        Of a chain that goes round, or continues what is no recipe, one of its `runs/RECIPE/merged`.
        """
        base, seen = self.recipe(recipe).base, {recipe}
        while (parent := recipe_of(base)) in self.recipes and parent not in seen:
            seen.add(parent)
            base = self.recipes[parent].base
        return base

    def leaves_weights(self, recipe: str) -> bool:
        """Whether the recipe's merged model is left as a whole, and not only its certificate."""
        bases = {other.base for other in self.recipes.values()}
        experts = {expert for build in self.builds.values() for expert in build.recipes}
        predicting = {prediction.recipe for prediction in self.predictions.values()}
        return self.models.keep_merged or f"runs/{recipe}/merged" in bases or recipe in experts | predicting

    def domains(self, recipe: str) -> tuple[str, ...]:
        """Of the experts, in their order, of the build that a recipe goes back to; empty where it goes to none."""
        kind, _, name = self.root(recipe).partition("/")
        return self.build(name).domains if kind == "builds" else ()

    def prediction(self, name: str) -> PredictionsParams:
        return self.predictions[self._known(name, self.predictions, "entry of predictions")]

    def dataset(self, name: str) -> DatasetParams:
        return self.active.datasets[self._known(name, self.active.datasets, f"dataset of profile {self.profile}")]

    def base_source(self, name: str) -> str:
        having = [profile for profile, found in self.profiles.items() if name in found.bases]
        if having and self.profile not in having:
            raise UserError(f"profile {self.profile} has no base {name}; these have one: {', '.join(having)}")
        return self.active.bases[self._known(name, self.active.bases, f"base of profile {self.profile}")]

    @staticmethod
    def _known(name: str, names: Mapping[str, Any], kind: str) -> str:
        if name not in names:
            raise UserError(f"no {kind} is called {name!r}{nearest(name, names)}; there are: {', '.join(names)}")
        return name


def made_by(base: str) -> str:
    """The stage of dvc.yaml that makes a recipe's base, e.g. `merge@r4-joint` for `runs/r4-joint/merged`."""
    kind, name, *_ = base.split("/")
    stage = {"bases": "base", "builds": "build", "runs": "merge"}[kind]
    return f"{stage}@{name}"


def recipe_of(folder: str) -> str | None:
    """The recipe whose merged model `runs/RECIPE/merged` is; None for another folder."""
    kind, name, *_ = folder.split("/")
    return name if kind == "runs" else None
