"""The fields of params.yaml, with type, range and default, as frozen dataclasses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from stages.core.errors import UserError
from stages.core.records import STRICT, unknown

Part = Literal["vision", "projector", "llm"]
PARTS: tuple[Part, ...] = ("vision", "projector", "llm")
Loss = Literal["assistant-only", "all-tokens", "router-labels"]
PaddingFree = Literal["auto", "on", "off"]
Kernels = Literal["auto", "off"]
Optimizer = Literal[
    "adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "lion_32bit", "muon", "adafactor"
]
LrSchedule = Literal["cosine", "linear", "constant", "cosine_with_min_lr", "polynomial", "warmup_stable_decay"]


class OptimizerTraits(NamedTuple):
    bits: int
    """Bits of each state of a weight, e.g. the two of AdamW."""
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
    "lion_32bit": OptimizerTraits(32, needs_gpu=False, shardable=False, paged=False, smaller=None),
    "muon": OptimizerTraits(32, needs_gpu=False, shardable=False, paged=False, smaller=None),
    "adafactor": OptimizerTraits(32, needs_gpu=False, shardable=False, paged=False, smaller=None),
}
"""Keys are the names in transformers' TrainingArguments.optim, and `muon` (training/muon.py), each above its
`smaller`."""


def form(pattern: str, expected: str) -> AfterValidator:
    """Refuses a text that does not match the whole pattern, in the words of `expected`."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise PydanticCustomError("form", "expected {expected}", {"expected": expected})
        return text

    return AfterValidator(check)


Positive = Annotated[int, Field(ge=1, le=10**9)]
"""A count of a run: samples, steps, pixels, minutes. The limits here and below are above every sensible value, and
below those at which a run would fail late."""
Size = Annotated[int, Field(ge=1, le=2**20)]
"""A size within one step: tokens, samples of a batch, the width of an adapter."""
Epochs = Annotated[
    int,
    Field(ge=1, le=10_000),
    BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value),
]
"""Takes 3.0, as other trainers write it, for 3."""
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1e12)]
"""The product of two is still a finite number."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Name = Annotated[str, form("[A-Za-z0-9][A-Za-z0-9_-]{0,99}", "a letter or digit, then up to 99 of these, - and _")]
"""No dots: DVC splits the path to a parameter at them. Folders get these names, which limits the length."""
Text = Annotated[str, Field(pattern=r"\S", max_length=2000)]
TemplateOptions = dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], bool | Size | Text]


LARGEST_GB = 1000
"""More than any GPU has."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:gi?b?)?", re.IGNORECASE)


def _gpu(value: Any) -> Any:
    """A size as a number, e.g. of "24GB"; another value as it is. 4090 is no size, but a part of a name."""
    size = _SIZE.fullmatch(value) if isinstance(value, str) else None
    value = float(size[1]) if size else value
    if isinstance(value, int | float) and value > LARGEST_GB:
        raise PydanticCustomError("form", "expected a size in GB, or a card by its whole name, e.g. 'RTX 4090'")
    return value


_BEFORE_AMPERE = re.compile(r"\b(T4|V100|TITAN RTX|Quadro RTX|RTX 20\d\d)\b", re.IGNORECASE)


def has_bf16(card: str | None) -> bool:
    """Whether the GPU of that name computes in bf16, as NVIDIA's do from Ampere on; one without a name is taken to."""
    return card is None or not _BEFORE_AMPERE.search(card)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeviceParams:
    kind: Literal["cpu", "cuda"]
    count: Annotated[int, Field(ge=1, le=256)] = 1
    """Devices of one machine that a training run uses."""
    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Machines, each with `count` devices (docs/servers.md)."""
    memory_gb: Rate | None = None
    """Memory of one device in GB, of a GPU as it is sold. Null on a CPU: this machine's memory, which its processes
    share. The top-level `gpu` overrides it."""
    card: Text | None = None
    """The GPU by name, as in stages/planning/cards.py: its usable memory and multiprocessors then count, rather
    than the least and the most that cards of memory_gb have. The top-level `gpu` overrides it."""

    @property
    def total(self) -> int:
        """Devices of all machines."""
        return self.count * self.nodes

    def one(self) -> DeviceParams:
        """One device, which merging and evaluation use."""
        return replace(self, count=1, nodes=1)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LimitParams:
    """Largest number of samples of each split, always the same ones, chosen by their content; null for all."""

    train: Positive | None = None
    val: Positive | None = None
    test: Positive | None = None
    selection: Positive | None = None


Patterns = Text | tuple[Text, ...]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SplitParams:
    """Files of splits, as patterns of paths below the source's folder: `public_test*.txt`, `test/**/*`. Files that no
    pattern matches belong to the other splits, by their names."""

    train: Patterns = ()
    val: Patterns = ()
    test: Patterns = ()
    """Scored with `scored: test`, and nothing else."""

    def patterns(self) -> dict[str, tuple[str, ...]]:
        """The patterns of each split that has some."""
        given = {"train": self.train, "val": self.val, "test": self.test}
        return {split: (each,) if isinstance(each, str) else each for split, each in given.items() if each}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DatasetParams:
    task: Name
    """The task that reads it, by its `sources`."""
    source: Annotated[str, form("folder:.+|hub:.+@.+|mix", "folder:PATH, hub:OWNER/NAME@REVISION or mix")]
    """`folder:PATH`, `hub:OWNER/NAME@REVISION`, or `mix`, made of other datasets."""
    splits: SplitParams = Field(default_factory=SplitParams)
    """Files of the splits that their names do not tell. Without it there is no test split."""
    limit: LimitParams | None = None
    """Samples to take of each split of the source."""
    mix: dict[Name, Annotated[int, Field(ge=0, le=10**9)] | None] | None = None
    """Parts of a `mix`, each with the largest number of its training samples; null for all. The validation split has
    those of every part, also of one with 0 training samples."""
    repeat: dict[Text, Annotated[int, Field(ge=2, le=10_000)]] = Field(default_factory=dict)
    """Copies of a training sample in each epoch, by a pattern of its file as messages name it, e.g. `synthetic*` or,
    in a mix, `PART/*`; the first that matches counts. Other samples are there once."""
    reader: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task that reads it: see the class Reader in stages/tasks/TASK/sources."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImageParams:
    min_pixels: Positive
    max_pixels: Positive
    """Images are resized to between min_pixels and max_pixels, keeping the aspect ratio."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StepParams:
    """The fields of MemoryParams that every step of a training uses as they are."""

    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """Precision of the arithmetic and of frozen weights. Trained weights are always fp32. auto: bf16 on a GPU, fp16 on
    one that is known to have no bf16, fp32 on a CPU."""
    micro_batch: Size
    """Samples on one device in one forward pass; gradient accumulation makes up the effective batch."""
    attn: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """auto: torch's own, which has flash-attn's kernels; flash_attention_2 needs an image with flash-attn."""
    gradient_checkpointing: bool = True
    optimizer: Optimizer = "adamw_torch_fused"
    expandable_segments: bool = False
    """torch's allocator on a GPU maps memory page by page, which leaves hardly any gaps."""
    placement: Literal["auto", "single", "ddp", "sharded", "balanced"] = "auto"
    """single: one process on one device. ddp: one process a device, each with the whole model. sharded: one process a
    device, each with its share of every weight, gradient and optimizer state (no nf4; a shardable optimizer). balanced:
    one process with the layers spread over the devices. auto: single on one device, ddp on several."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MemoryParams(StepParams):
    quantization: Literal["none"] | None = None
    """none: train every recipe on unquantized weights; null: as the recipe says."""
    instructions: Literal["avx2", "native"] = "avx2"
    """avx2: a CPU gives the same bits as every CPU of its maker. native: it uses all it has, such as AVX-512 and AMX.
    That is faster, in bf16 by far, and gives the same bits on this model of CPU only."""
    padding_free: PaddingFree = "auto"
    """Samples of a micro-batch concatenated in one row, without padding. auto: where that is faster; on: wherever it
    computes the same."""
    kernels: Kernels = "auto"
    """auto: norms, gated products and rotations use Liger's kernels on a GPU, and adapters no copies; both round
    differently."""
    features_gb: Annotated[float, Field(ge=0, le=1e12)] = 50.0
    """Disk for image features, in GB: if vision tower and projector are frozen, features are computed once and kept in
    .bakeoff/features. With 0, or too little for a recipe, each step computes them."""
    fit: Literal["refuse", "auto", "fill", "off"] = "fill"
    """If a recipe is predicted not to fit: refuse it with its budget; auto: use the cheapest settings that fit; off:
    train anyway. fill: like auto, and if there is room, use the fastest settings that fit."""

    @property
    def native(self) -> bool:
        return self.instructions == "native"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationParams:
    batch_size: Size | Literal["auto"] = "auto"
    """Generation batch size; auto: the largest that the plan predicts to fit, for a baseline the largest that does."""
    max_new_tokens: Size
    max_length: Size | None = None
    """Largest number of tokens of a sample with its answer, if the task allows to cut its texts. Null: no cut."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Generates the completions; vLLM only if its first completions equal our code's (docs/serving.md)."""

    @property
    def room(self) -> int | None:
        """Limit of a question in tokens."""
        return None if self.max_length is None else self.max_length - self.max_new_tokens


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValidationLimit:
    """At most so many samples of a validation while training, whatever the recipe says."""

    samples: Positive
    score_samples: Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProfileParams:
    device: DeviceParams
    bases: dict[Name, Annotated[str, form("folder:.+|hub:.+@.+", "folder:PATH or hub:OWNER/NAME@REVISION")]]
    """Base models by name: `folder:PATH` or `hub:OWNER/NAME@REVISION`."""
    datasets: dict[Name, DatasetParams]
    images: ImageParams | None = None
    memory: MemoryParams
    evaluation: EvaluationParams
    validation_limit: ValidationLimit | None = None
    learning_rate_scale: Rate = 1.0
    """Factor on every learning rate of a recipe: a tiny model needs a larger one."""
    max_epochs: Epochs | None = None
    """Most epochs of any recipe: a tiny model needs fewer. Null: as many as the recipe says."""
    dataloader_workers: Annotated[int, Field(ge=0, le=256)] = 4
    place: Literal["here", "slurm"] = "here"
    """Stages run on this machine, or each in a step of Slurm. BAKEOFF_PLACE overrides it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraParams:
    rank: Size
    """Adapter width."""
    alpha: Rate
    """The adapter's output is scaled by alpha / rank, with `rslora` by alpha / sqrt(rank)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: dict[Part, Annotated[tuple[str, ...], Field(min_length=1)]]
    """Suffixes of module names by part, in whole dotted components: `attn.proj` does not match `o_proj`."""
    rslora: bool = False
    dora: bool = False
    """The length of each row of a weight is learned apart from its direction, which the adapter turns."""
    init: Literal["default", "gaussian", "pissa", "olora"] = "default"
    """Start of the adapter: zero, with A uniform or gaussian; with pissa and olora the largest part of the weight, and
    only the rest stays in the base. Such an adapter is saved as a plain one of twice the rank."""
    loraplus_lr_ratio: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """LoRA+: the learning rate of each B, as a multiple of its A's."""

    @property
    def takes_from_base(self) -> bool:
        """Whether the adapter starts as a part of the weight that it adapts, and the base's weight as the rest."""
        return self.init in ("pissa", "olora")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PartsParams:
    vision: Literal["frozen", "full", "lora"] = "frozen"
    projector: Literal["frozen", "full", "lora"] = "frozen"
    llm: Literal["frozen", "full", "lora"] = "frozen"

    def trained(self, how: str | None = None) -> tuple[Part, ...]:
        """The parts that are trained, or those trained `how` ("full" or "lora")."""
        wanted = {how} if how else {"full", "lora"}
        return tuple(part for part in PARTS if getattr(self, part) in wanted)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValidationParams:
    """Measures a model while it trains, on samples that it is not trained on: those that `data.selection` sets aside,
    else the validation split. It changes no weight."""

    every_steps: Positive | Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Optimizer steps between two validations; below 1, their share of the training. The last step has one too."""
    samples: Positive = 64
    """Number of samples to compute the loss of."""
    score_samples: Annotated[int, Field(ge=0, lt=2**31)] = 24
    """Number of them that the model also completes, for the score of a sample by its task."""
    by: Literal["loss", "score"] = "loss"
    """The figure that `keep: best` and `early_stopping` compare validations by."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EarlyStoppingParams:
    patience: Positive
    """Validations without a new best after which a training stops; the untrained model's is one of them."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScheduleOptions:
    """Settings of some schedules of the learning rate; SCHEDULE_OPTIONS says which."""

    min_lr_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The least rate, at the end, as a share of the learning rate."""
    power: Rate | None = None
    """Exponent of a polynomial; 1 is a line."""
    decay_ratio: Share | None = None
    """Share of the optimizer steps, the last ones, in which the rate falls; before, it is constant."""

    def decay_steps(self, num_steps: int) -> int:
        return ceil(num_steps * (self.decay_ratio or 0.0))


SCHEDULE_OPTIONS: dict[LrSchedule, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr_ratio",),
    "polynomial": ("min_lr_ratio", "power"),
    "warmup_stable_decay": ("min_lr_ratio", "decay_ratio"),
}
"""The options that a schedule needs, all of them; a schedule that is not here has none."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LearningParams:
    """The fields of RecipeParams that a training uses as they are."""

    task: Name
    answer_format: Name | None = None
    """Format of the answer, if the task has several."""
    template_options: TemplateOptions = Field(default_factory=dict)
    """Options of the base's chat template, in training and wherever the trained model generates, e.g. `enable_thinking:
    true` for answers with thinking. Without it, none."""
    parts: PartsParams
    lora: LoraParams | None = None
    full_targets: dict[Part, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """For parts trained in full, suffixes of the module names to train, like lora.targets; without them the whole part
    is trained."""
    loss: Loss = "assistant-only"
    """Training objective. assistant-only, all-tokens: next-token cross-entropy on the answers, or on all text.
    router-labels: cross-entropy of each router of a mixture against the expert of the sample's domain
    (`builds.NAME.experts`)."""
    effective_batch: Size = 16
    """Samples in one optimizer step: micro_batch x accumulation x devices."""
    lr_schedule: LrSchedule = "cosine"
    """The learning rate after the warm-up, by transformers' names: to 0 along half a cosine or a line; constant; to a
    least rate along half a cosine or a polynomial; or constant, and then to it along half a cosine."""
    lr_schedule_options: ScheduleOptions | None = None
    weight_decay: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    max_grad_norm: Rate = 1.0
    neftune_alpha: Rate | None = None
    """Noise on the embeddings of tokens while training (NEFTune), e.g. 5. Null: none."""
    max_length: Size = 2048
    """Largest number of tokens of a sample, image tokens included; a longer one is an error, or `skip_too_long`. Only a
    text that the task allows to cut, such as the transcript of a question, is cut to fit; an answer never is."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RecipeParams(LearningParams):
    base: Annotated[
        str, form("(bases|builds)/[^/]{1,100}|runs/[^/]{1,100}/merged", "bases/NAME, builds/NAME, runs/RECIPE/merged")
    ]
    """The folder below data/ to start from: `bases/NAME`, `builds/NAME`, or `runs/RECIPE/merged` to continue another
    recipe."""
    data: Name
    quantization: Literal["none", "nf4"] = "none"
    """nf4: frozen weights in 4 bits with double quantization."""
    learning_rate: Rate
    part_learning_rates: dict[Part, Rate] = Field(default_factory=dict)
    """Learning rates of parts that differ from `learning_rate`."""
    skip_too_long: bool = False
    """Leave out training samples that are longer than max_length, counted, instead of refusing the plan."""
    epochs: Epochs = 3
    max_steps: Positive | None = None
    """Stop after this number of optimizer steps, before the epochs are over."""
    optimizer: Optimizer | None = None
    """Null: the profile's `memory.optimizer`."""
    warmup_ratio: Share | None = None
    """Share of optimizer steps in which the learning rate rises from 0 along a line. Null: as warmup_steps, or 0.05."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] | None = None
    """Optimizer steps in which the learning rate rises, in place of their share."""
    validation: ValidationParams | None = Field(default_factory=ValidationParams)
    """Null: no validation while training."""
    keep: Literal["last", "best"] = "last"
    """The weights that a training leaves: of its last step, or of its best validation."""
    early_stopping: EarlyStoppingParams | None = None
    seed: Seed | None = None
    """Null: the seed of the whole pipeline."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExpertParams:
    recipe: Name
    """Its merged model is the expert."""
    domain: Name | None = None
    """Domain of the samples that this expert is for, as the task names it; null if the task has no domains."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BuildParams:
    """A mixture of experts made from dense models that recipes trained from one base."""

    task: Name
    """The experts' task. Its probes of each domain show which experts its tokens are routed to."""
    base: Annotated[str, form("bases/[^/]{1,100}", "bases/NAME")]
    """`bases/NAME`, a dense model: the experts were trained from it, and the mixture has all of it but the MLPs."""
    experts: Annotated[tuple[ExpertParams, ...], Field(min_length=2)]
    """The experts, numbered in this order. All of them have a domain, or none has."""
    top_k: Annotated[int, Field(ge=2, le=2**20)] = 2
    """Experts for each token, at most all. A single one would have weight 1, and its router no gradient."""

    @property
    def recipes(self) -> tuple[str, ...]:
        """The experts' recipes, in order."""
        return tuple(expert.recipe for expert in self.experts)

    @property
    def domains(self) -> tuple[str, ...]:
        """The experts' domains, in order; empty if they have none."""
        return tuple(expert.domain for expert in self.experts if expert.domain is not None)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BaselineParams:
    """A row to compare with: a base or a build, evaluated without training, or another system's completions."""

    task: Name
    base: Annotated[
        str, form("(bases|builds)/[^/]{1,100}|answers/[^/.][^/]{0,100}", "bases/NAME, builds/NAME or answers/FILE")
    ]
    """`bases/NAME`, `builds/NAME`, or `answers/FILE`, an answers file below data/ (docs/experiments.md)."""
    data: Name
    answer_format: Name | None = None
    template_options: TemplateOptions = Field(default_factory=dict)

    @property
    def answers(self) -> str | None:
        """Path of the answers file, which has another system's completions; None for a model."""
        return f"data/{self.base}" if self.base.startswith("answers/") else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExportParams:
    """A recipe's merged model in the form in which it is deployed: a row of the table, scored by what will serve it
    (docs/deployment.md)."""

    recipe: Name
    task: Name
    """The recipe's, as is `data`: dvc.yaml cannot look them up."""
    data: Name
    format: Literal["gguf", "bitsandbytes"]
    """gguf: a file for llama.cpp and all that is made of it. bitsandbytes: a folder for transformers."""
    quantization: Literal["f16", "q8_0", "q4_0", "nf4", "int8"]
    """gguf has the first three: f16 is not quantized; q8_0 and q4_0 are blocks of 32 weights in 8 and in 4 bits.
    bitsandbytes has nf4 and int8: linear layers in 4 and in 8 bits."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GuardParams:
    """Conversations that nobody trains on: each model's perplexity on them is a column of the table, and each recipe's
    is compared with its base's (docs/statistics.md)."""

    source: Annotated[str, form("folder:.+", "folder:PATH")]
    """`folder:PATH`, of files with conversations alone (docs/data.md)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PredictionsParams:
    """Inputs without a known answer, for a trained model."""

    task: Name
    """The recipe's task; its module `predictions` reads the inputs."""
    recipe: Name
    inputs: Annotated[str, form("data(/[^/.][^/]*)+", "a file below data/")]
    """A file below data/."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataParams:
    skip_invalid: bool = False
    """Leave out invalid records, and those with a subject of a split that is scored later, counted and listed. Without
    it, they stop the run."""
    near_duplicates: Literal["count", "refuse"] = "count"
    """Samples that resemble one of another split, such as a copy in another size or a text with a few words changed.
    count: warn, and list them in stats.json."""
    selection: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the training samples to set aside for choosing settings: no recipe trains on them. Chosen by their
    content alone."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CompareParams:
    """Questions of reports, and what counts as a difference over seeds and of an export from its model."""

    matters: dict[Name, Rate] = Field(default_factory=dict)
    """The smallest difference that matters, in the unit of the metric that ranks a task's recipes, by its name in
    metrics.json: smaller differences are a tie ("as good"). Without an entry, none is."""
    against: dict[Name, Name] = Field(default_factory=dict)
    """Questions of reports beside the task's own: each recipe against the one named here, a pair once."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrackingParams:
    to: tuple[Literal["wandb", "tensorboard", "mlflow", "trackio"], ...] = ()
    """Trackers of trainings, as transformers names them (`report_to`). wandb gets evaluations and comparisons too."""
    project: Annotated[str, form(r"[^\x00-\x1f\x7f-\x9f]{1,128}", "a line of at most 128 characters")] = "bakeoff"
    wandb_mode: Literal["offline", "online"] = "offline"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PriceParams:
    """Prices for the cost of a training, in any currency; null: none. No result depends on them."""

    gpu_hour: Rate | None = None
    """One GPU for an hour."""
    kwh: Rate | None = None
    """Energy, beside or in place of that."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelParams:
    """Model folders that stages leave."""

    keep_merged: bool = True
    """Whether every recipe leaves a merged model, which loads with plain transformers and can be served. If false,
    `merge` writes, reloads and certifies it all the same and then removes the weights; `evaluate` merges them again in
    memory and refuses them unless they equal the certificate's, bit for bit. A model that something else starts from (a
    recipe, a build, an export, an entry of predictions) is always kept."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointParams:
    """Checkpoint schedule. No result depends on it."""

    every_minutes: Rate | None = 15.0
    """Null: no checkpoints by time."""
    every_steps: Positive | None = None
    """Null: no checkpoints by steps. A training that is asked to end is always saved."""
    keep: Size = 2
    """Checkpoints to keep of a recipe; one more exists while it is written."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SlurmParams:
    """srun's options, e.g. `--partition=a100`; they override the launcher's own. No result depends on them."""

    cpu: tuple[Text, ...] = ()
    """For stages without a GPU."""
    gpu: tuple[Text, ...] = ()
    """For stages with one."""
    save_seconds: Annotated[int, Field(ge=1, le=65535)] = 180
    """Seconds before the time limit at which a training is asked to save; Slurm may ask a minute earlier."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ContainerParams:
    """Limits of a container of docker or podman. No result depends on them."""

    processes: Annotated[int, Field(ge=64, le=2**22)] | None = None
    """Processes and threads of a stage. Null: 1,024, or 16 for each core if that is more; and as many again for each
    device."""
    memory_gb: Annotated[float, Field(ge=0.1, le=1e12)] | None = None
    """Memory of a stage, with /tmp and /dev/shm. Null: fifteen sixteenths of the machine's."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Params:
    profile: Name
    gpu: Annotated[Rate | Text | None, BeforeValidator(_gpu)] = None
    """The GPU of a profile with `device.kind: cuda`: its size in GB, as cards are sold, or its name, e.g. 24, "24GB",
    "RTX 4090". Null: as the profile's device says, e.g. a CPU."""
    gpus: Annotated[int, Field(ge=1, le=256)] | None = None
    """GPUs of one machine that a training uses. Null: the profile's device.count."""
    seed: Seed = 42
    """Seed of every training: order of samples, new weights, dropout. A recipe may have its own."""
    scored: Literal["val", "selection", "test"] = "val"
    """The split that models are evaluated on: the validation split, the samples that `data.selection` sets aside, or,
    once all is chosen, the test split that `splits` of a dataset names."""
    compare: CompareParams = Field(default_factory=CompareParams)
    data: DataParams
    tracking: TrackingParams
    checkpoints: CheckpointParams = Field(default_factory=CheckpointParams)
    models: ModelParams = Field(default_factory=ModelParams)
    prices: PriceParams = Field(default_factory=PriceParams)
    slurm: SlurmParams = Field(default_factory=SlurmParams)
    containers: ContainerParams = Field(default_factory=ContainerParams)
    baselines: dict[Name, BaselineParams]
    recipes: dict[Name, RecipeParams]
    builds: dict[Name, BuildParams] = Field(default_factory=dict)
    exports: dict[Name, ExportParams] = Field(default_factory=dict)
    guards: dict[Name, GuardParams] = Field(default_factory=dict)
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
        """The active profile with the device that `gpu` and `gpus` name, and what is `auto` for any device resolved."""
        profile = self.profiles[self.profile]
        device = replace(profile.device, count=self.gpus or profile.device.count)
        if isinstance(self.gpu, str):
            device = replace(device, memory_gb=None, card=self.gpu)
        elif self.gpu is not None:
            device = replace(device, memory_gb=self.gpu, card=None)
        memory = profile.memory
        if memory.precision == "auto":
            on_gpu: Literal["bf16", "fp16"] = "bf16" if has_bf16(device.card) else "fp16"
            memory = replace(memory, precision="fp32" if device.kind == "cpu" else on_gpu)
        if memory.placement == "auto":
            memory = replace(memory, placement="single" if device.total == 1 else "ddp")
        return replace(profile, device=device, memory=memory)

    def on(self, profile: str) -> Params:
        """These params with another profile active."""
        return replace(self, profile=self._known(profile, self.profiles, "profile"))

    def recipe(self, name: str) -> RecipeParams:
        return self.recipes[self._known(name, self.recipes, "recipe")]

    def quantization(self, recipe: str) -> Literal["none", "nf4"]:
        """A recipe's quantization, as the active profile leaves it."""
        profile = self.profiles.get(self.profile)
        return (profile and profile.memory.quantization) or self.recipe(recipe).quantization

    def subject(self, name: str) -> RecipeParams | BaselineParams:
        """The recipe or baseline of that name, or the recipe of an export, as evaluations have them."""
        subjects: dict[str, RecipeParams | BaselineParams] = {**self.baselines, **self.recipes}
        subjects |= {name: self.recipes[export.recipe] for name, export in self.exports.items()}
        return subjects[self._known(name, subjects, "recipe, baseline or export")]

    def evaluation_stage(self, name: str) -> str:
        """The stage of dvc.yaml that evaluates a recipe, an export or a baseline."""
        stage = "evaluate" if name in self.recipes else "exported" if name in self.exports else "baseline"
        return f"{stage}@{name}"

    def recipe_name(self, run: str) -> str:
        """The recipe that trained the model of a run: of an export, or the run itself."""
        return self.exports[run].recipe if run in self.exports else run

    def export(self, name: str) -> ExportParams:
        return self.exports[self._known(name, self.exports, "export")]

    def build(self, name: str) -> BuildParams:
        return self.builds[self._known(name, self.builds, "build")]

    def root(self, recipe: str) -> str:
        """`bases/NAME` or `builds/NAME` at the start of the chain of recipes that ends with this one.

        In a cyclic or broken chain, which cross_checks refuses, one of its `runs/RECIPE/merged`.
        """
        base, seen = self.recipe(recipe).base, {recipe}
        while (parent := recipe_of(base)) in self.recipes and parent not in seen:
            seen.add(parent)
            base = self.recipes[parent].base
        return base

    def leaves_weights(self, recipe: str) -> bool:
        """Whether the recipe's merged model keeps its weights."""
        bases = {other.base for other in self.recipes.values()}
        experts = {expert for build in self.builds.values() for expert in build.recipes}
        predicting = {prediction.recipe for prediction in self.predictions.values()}
        exported = {export.recipe for export in self.exports.values()}
        return self.models.keep_merged or f"runs/{recipe}/merged" in bases or recipe in experts | predicting | exported

    def domains(self, recipe: str) -> tuple[str, ...]:
        """The experts' domains, in order, of the build at the recipe's root; empty if it is a base."""
        kind, _, name = self.root(recipe).partition("/")
        return self.build(name).domains if kind == "builds" else ()

    def prediction(self, name: str) -> PredictionsParams:
        return self.predictions[self._known(name, self.predictions, "entry of predictions")]

    def dataset(self, name: str) -> DatasetParams:
        return self.active.datasets[self._known(name, self.active.datasets, f"dataset of profile {self.profile}")]

    def dataset_path(self, name: str) -> str:
        """The dotted path of a dataset of the active profile."""
        return f"profiles.{self.profile}.datasets.{name}"

    def base_source(self, name: str) -> str:
        having = [profile for profile, found in self.profiles.items() if name in found.bases]
        if having and self.profile not in having:
            raise UserError(f"profile {self.profile} has no base {name}; these have one: {', '.join(having)}")
        return self.active.bases[self._known(name, self.active.bases, f"base of profile {self.profile}")]

    @staticmethod
    def _known(name: str, names: Mapping[str, Any], kind: str) -> str:
        if name not in names:
            raise UserError(unknown(f"{kind} is called", name, names))
        return name


def made_by(model: str) -> str:
    """The stage of dvc.yaml that makes a model, e.g. `merge@r4-joint` for `runs/r4-joint/merged`."""
    kind, name, *_ = model.split("/")
    stage = {"bases": "base", "builds": "build", "runs": "merge", "exports": "export"}[kind]
    return f"{stage}@{name}"


def recipe_of(folder: str) -> str | None:
    """The recipe of `runs/RECIPE/merged`; None for another folder."""
    kind, name, *_ = folder.split("/")
    return name if kind == "runs" else None
