"""params.yaml as validated, frozen dataclasses: the only way a stage learns what a person asked for.

Every problem of the file is reported in one go, each with its dotted path. Read with YAML 1.2 rules, because
`dvc exp run -S recipes.x.learning_rate=1e-5` writes `1e-05`, which YAML 1.1 readers take for a string.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from stages.kit.documents import Unreadable, dotted, nearest, problems, read_yaml, refusal
from stages.kit.errors import UserError

Part = Literal["vision", "projector", "llm"]
PARTS: tuple[Part, ...] = ("vision", "projector", "llm")
Loss = Literal["assistant-only", "all-tokens", "router-labels"]
Attention = Literal["auto", "sdpa", "eager", "flash_attention_2"]
Optimizer = Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"]

Positive = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1e12)]
"""Two of them are multiplied and still a number."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")]
"""No dots: DVC takes the path to a parameter apart at them. Folders are called so, which may not be much longer."""

_strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, config=_strict)
class DeviceParams:
    kind: Literal["cpu", "cuda"]
    count: Positive = 1
    """How many devices one training run uses."""
    memory_gb: Rate | None = None
    """Memory of one device in GB; none on a CPU."""

    def one(self) -> DeviceParams:
        """A single one of them: what merging and evaluation use."""
        return replace(self, count=1)


@dataclass(frozen=True, kw_only=True, config=_strict)
class GenerateParams:
    train: Positive
    val: Positive
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True, config=_strict)
class LimitParams:
    """Of a split, at most so many samples: always the same ones, chosen by their content; null for all."""

    train: Positive | None = None
    val: Positive | None = None


@dataclass(frozen=True, kw_only=True, config=_strict)
class DatasetParams:
    task: Name
    """The task whose `sources` package reads it."""
    source: Annotated[str, Field(pattern=r"^(generated(:.+)?|folder:.+|hub:.+@.+|mix)$")]
    """`generated`, or `generated:KIND` where the task knows several kinds; `folder:PATH`; `hub:OWNER/NAME@REVISION`;
    or `mix`, made of other datasets."""
    generate: GenerateParams | None = None
    """How much to generate; read only where the source is `generated`."""
    limit: LimitParams | None = None
    """How much to take of what the source has."""
    mix: dict[Name, Annotated[int, Field(ge=0)] | None] | None = None
    """Where the source is `mix`, the datasets it is made of, each with the number of its training samples to take at
    most; null for all. It validates on all of theirs, those of which it takes no training sample too."""

    def selection(self) -> dict[str, Any]:
        """What is set of `limit` and `mix`, which not every task knows."""
        chosen = {"limit": self.limit, "mix": self.mix}
        return {name: value for name, value in chosen.items() if value is not None}


@dataclass(frozen=True, kw_only=True, config=_strict)
class ImageParams:
    min_pixels: Positive
    max_pixels: Positive
    """A picture is resized to between these many pixels, its shape kept."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class MemoryParams:
    precision: Literal["fp32", "fp16", "bf16"]
    """Of the arithmetic and of frozen weights. Trained weights are always kept in fp32."""
    quantization: Literal["as-recipe", "none"] = "as-recipe"
    """`none` trains every recipe on unquantized weights, whatever it asks for (a CPU has no nf4)."""
    micro_batch: Positive
    """Samples on one device in one forward pass; accumulation makes up the effective batch."""
    attn: Attention = "auto"
    gradient_checkpointing: bool = False
    optimizer: Optimizer = "adamw_torch"
    expandable_segments: bool = False
    """Whether torch's allocator on a GPU maps memory page by page, which leaves hardly any gaps."""
    placement: Literal["single", "ddp", "sharded", "balanced"] = "single"
    """One process on one device; one a device, each with the whole model; one a device, each with its share of every
    weight, gradient and optimizer state (full precision weights and optimizers only: no nf4, no 8 bits); or one process
    with the layers spread over the devices."""
    fit: Literal["refuse", "auto", "off"] = "refuse"
    """Where a recipe is predicted not to fit: stop with its budget; take the cheapest settings that do; or go on."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class EvaluationParams:
    batch_size: Positive
    max_new_tokens: Positive
    max_samples: Positive | None = None
    """Only the first this many validation samples; null for all."""
    max_length: Positive | None = None
    """Tokens of a sample, its answer counted, to which texts that may be cut are cut; null to cut none."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class ProfileParams:
    description: str
    device: DeviceParams
    bases: dict[Name, Annotated[str, Field(pattern=r"^(folder:.+|hub:.+@.+|random:.+)$")]]
    """Base models by name: `folder:PATH`, `hub:OWNER/NAME@REVISION`, or `random:GEOMETRY`, a folder's name in
    stages/kit/models/geometries, for random weights."""
    datasets: dict[Name, DatasetParams]
    images: ImageParams | None = None
    memory: MemoryParams
    evaluation: EvaluationParams
    learning_rate_scale: Rate = 1.0
    """Every learning rate of a recipe is multiplied by this: a tiny model wants a larger one."""
    dataloader_workers: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, kw_only=True, config=_strict)
class LoraParams:
    rank: Positive
    """Adapter width."""
    alpha: Rate
    """The adapter's output is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: dict[Part, Annotated[tuple[str, ...], Field(min_length=1)]]
    """By part, ends of module names, whole dotted components: `attn.proj` does not match `o_proj`."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class PartsParams:
    vision: Literal["frozen", "full", "lora"] = "frozen"
    projector: Literal["frozen", "full", "lora"] = "frozen"
    llm: Literal["frozen", "full", "lora"] = "frozen"

    def trained(self, how: str | None = None) -> tuple[Part, ...]:
        """The parts that are trained at all, or those trained `how` ("full" or "lora")."""
        wanted = {how} if how else {"full", "lora"}
        return tuple(part for part in PARTS if getattr(self, part) in wanted)


@dataclass(frozen=True, kw_only=True, config=_strict)
class RecipeParams:
    task: Name
    base: Annotated[str, Field(pattern=r"^((bases|builds)/[^/]{1,100}|runs/[^/]{1,100}/merged)$")]
    """The folder below data/ to start from: `bases/NAME`, `builds/NAME`, or `runs/RECIPE/merged` to continue another
    recipe."""
    data: Name
    target: Name | None = None
    """The form of the answer, where the task knows several."""
    parts: PartsParams
    quantization: Literal["none", "nf4"] = "none"
    """nf4: frozen weights in 4 bits with double quantization, CUDA only."""
    lora: LoraParams | None = None
    full_targets: dict[Part, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Of parts trained in full, ends of module names (whole dotted components, like lora.targets) that are trained; the
    whole part where none are named."""
    loss: Loss
    """Of the next token, over the answers or over all text. Or `router-labels`: of the expert that a mixture's routers
    choose for each token, layer by layer, which is to be that of the sample's domain (`builds.NAME.experts`)."""
    learning_rate: Rate
    part_learning_rates: dict[Part, Rate] = Field(default_factory=dict)
    """Parts that take another learning rate than `learning_rate`."""
    epochs: Positive
    max_steps: Positive | None = None
    """Stop after this many optimizer steps, before the epochs are over."""
    effective_batch: Positive
    """Samples in one optimizer step: micro_batch x accumulation x devices."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: Share = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Rate = 1.0
    max_length: Positive
    """Tokens of a sample, picture tokens counted; a longer one is an error. Only a text that the task lets be cut, such
    as the transcript that a question is about, is cut to fit; an answer never."""
    seed: Seed = 42

    def base_recipe(self) -> str | None:
        """The recipe that this one continues, or None where it starts from a base."""
        kind, _, rest = self.base.partition("/")
        return rest.removesuffix("/merged") if kind == "runs" else None

    def base_build(self) -> str | None:
        """The build that this one starts from, or None."""
        kind, _, name = self.base.partition("/")
        return name if kind == "builds" else None


@dataclass(frozen=True, kw_only=True, config=_strict)
class ExpertParams:
    recipe: Name
    """Its merged model is the expert."""
    domain: Name | None = None
    """The samples that are to be this expert's, as the task names them; null where the task knows no domains."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class BuildParams:
    """A mixture of experts made from dense models that recipes trained from one base."""

    task: Name
    """The experts'; its probes of each domain show where the domain's tokens go."""
    base: Annotated[str, Field(pattern=r"^bases/[^/]{1,100}$")]
    """`bases/NAME`, a dense model: what the experts come from, and all but their MLPs with `non_mlp: base`."""
    experts: Annotated[tuple[ExpertParams, ...], Field(min_length=2)]
    """Numbered in this order. All of them have a domain, or none."""
    top_k: Annotated[int, Field(ge=2)] = 2
    """Experts that a token takes, at most all. One alone would have a weight of 1, and its router no gradient."""
    router_init: Literal["uniform", "hidden-states"] = "uniform"
    """Routers of zeros, for a training of the gate to start from; or the base's mean hidden state on the
    probes of each expert's domain."""
    non_mlp: Literal["base", "average"] = "base"
    """Attention, norms, embeddings and head: the base's, or the average of the experts'."""
    max_shard_gb: Rate = 5.0
    """Of one safetensors file."""

    @property
    def recipes(self) -> tuple[str, ...]:
        """Those of the experts, in their order."""
        return tuple(expert.recipe for expert in self.experts)

    @property
    def domains(self) -> tuple[str, ...]:
        """Those of the experts, in their order; empty where they have none."""
        return tuple(expert.domain for expert in self.experts if expert.domain is not None)


@dataclass(frozen=True, kw_only=True, config=_strict)
class BaselineParams:
    """A base, or what was built from several models, evaluated as it is: a row to compare with."""

    task: Name
    base: Annotated[str, Field(pattern=r"^(bases|builds)/[^/]{1,100}$")]
    data: Name
    target: Name | None = None
    """As a recipe's: what it is asked for."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class PredictionsParams:
    """What a trained model is to say of inputs whose truth nobody knows."""

    task: Name
    """The recipe's; its `predictions` read the inputs."""
    recipe: Name
    inputs: Annotated[str, Field(pattern=r"^data/.+")]
    """A file below data/."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class DataParams:
    skip_invalid: bool = False
    """Leave invalid records out, counted and listed, where they would otherwise stop the run."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class TrackingParams:
    wandb: bool = False
    wandb_mode: Literal["offline", "online"] = "offline"
    wandb_project: str = "bakeoff"


@dataclass(frozen=True, kw_only=True, config=_strict)
class CheckpointParams:
    """When a training is saved, to go on from there if it is interrupted. No result depends on it."""

    every_minutes: Rate | None = 15.0
    """Null: not by the clock."""
    every_steps: Positive | None = None
    """Also after every so many optimizer steps; null: not by their count. A training that is asked to end is saved
    whatever these say."""
    keep: Positive = 2
    """How many are kept of a recipe. While one is written there is one more."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class Params:
    profile: Name
    data: DataParams
    tracking: TrackingParams
    checkpoints: CheckpointParams = Field(default_factory=CheckpointParams)
    baselines: dict[Name, BaselineParams]
    recipes: dict[Name, RecipeParams]
    builds: dict[Name, BuildParams] = Field(default_factory=dict)
    predictions: dict[Name, PredictionsParams] = Field(default_factory=dict)
    profiles: dict[Name, ProfileParams]

    @property
    def active(self) -> ProfileParams:
        return self.profiles[self.profile]

    def on(self, profile: str) -> Params:
        """The same with another profile active."""
        return replace(self, profile=self._known(profile, self.profiles, "profile"))

    def recipe(self, name: str) -> RecipeParams:
        return self.recipes[self._known(name, self.recipes, "recipe")]

    def build(self, name: str) -> BuildParams:
        return self.builds[self._known(name, self.builds, "build")]

    def domains(self, recipe: str) -> tuple[str, ...]:
        """Of the experts, in their order, of the build that a recipe goes back to; empty where it goes to none."""
        *_, root = _bases(f"runs/{recipe}/merged", self)
        return self.build(root.removeprefix("builds/")).domains if root.startswith("builds/") else ()

    def prediction(self, name: str) -> PredictionsParams:
        return self.predictions[self._known(name, self.predictions, "entry of predictions")]

    def dataset(self, name: str) -> DatasetParams:
        return self.active.datasets[self._known(name, self.active.datasets, f"dataset of profile {self.profile}")]

    def prepared_by(self, dataset: str) -> str:
        """The stage of dvc.yaml that prepares it, e.g. `mix@both-domains`. A mix on one profile is one on all."""
        profiles = self.profiles.values()
        is_mix = any(profile.datasets[dataset].mix for profile in profiles if dataset in profile.datasets)
        return f"{'mix' if is_mix else 'prepare'}@{dataset}"

    def base_source(self, name: str) -> str:
        return self.active.bases[self._known(name, self.active.bases, f"base of profile {self.profile}")]

    @staticmethod
    def _known(name: str, names: dict[str, Any], kind: str) -> str:
        if name not in names:
            raise UserError(f"no {kind} is called {name!r}{nearest(name, names)}; there are: {', '.join(names)}")
        return name


def made_by(base: str) -> str:
    """The stage of dvc.yaml that makes a recipe's base, e.g. `merge@r3-stage1` for `runs/r3-stage1/merged`."""
    kind, name, *_ = base.split("/")
    stage = {"bases": "base", "builds": "build", "runs": "merge"}[kind]
    return f"{stage}@{name}"


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check the whole file.

    Raises UserError with every problem found, each under its dotted path.
    """
    try:
        raw, found = read_yaml(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; run from the top of the repository") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except Unreadable as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    try:
        params = _validated(Params, raw)
    except ValidationError as error:
        found = {**problems(error, Params), **found}
        params = _salvaged(Params, raw)
    contradictions = _contradictions(params)
    if found or contradictions:
        raise refusal(path, found, *contradictions)
    return params


def _validated(kind: Any, raw: Any) -> Any:
    # JSON mode is strict about types, yet takes a list for a tuple and 1 for 1.0, as a person writing YAML does.
    return TypeAdapter(kind).validate_json(json.dumps(raw), strict=True)


class _LookedAt(Exception):
    """What a value is was asked for, and it is wrong."""


class _Wrong:
    """In the place of a value that is wrong by itself, which is reported: what follows from it nobody can say."""

    def _look(self, *_: Any) -> Any:
        raise _LookedAt

    __getattr__ = __iter__ = __contains__ = __len__ = __bool__ = __str__ = __format__ = _look
    __eq__ = __hash__ = __lt__ = __le__ = __gt__ = __ge__ = __fspath__ = _look


def _salvaged(kind: Any, raw: Any) -> Any:
    """`raw` as `kind`, with a _Wrong in the place of every value that is not as it should be, or missing."""
    try:
        return _validated(kind, raw)
    except ValidationError:
        if get_origin(kind) in (Union, UnionType):  # `... | None`
            kind = get_args(kind)[0]
    if get_origin(kind) is dict and isinstance(raw, dict):
        return {name: _salvaged(get_args(kind)[1], value) for name, value in raw.items()}
    if not (hasattr(kind, "__pydantic_fields__") and isinstance(raw, dict)):
        return _Wrong()
    salvaged = object.__new__(kind)
    hints = get_type_hints(kind, include_extras=True)
    for name, field in kind.__pydantic_fields__.items():
        if name in raw:
            value = _salvaged(hints[name], raw[name])
        else:
            value = _Wrong() if field.is_required() else field.get_default(call_default_factory=True)
        object.__setattr__(salvaged, name, value)
    return salvaged


def _contradictions(params: Params) -> list[str]:
    """Settings that are each right alone and wrong together.

    params: as it is, or salvaged; then nothing is said that depends on what is wrong in it.
    """
    found: list[str] = []
    for rule in _rules(params):
        with suppress(_LookedAt):
            found.extend(rule)  # what it says before it looks at a wrong value counts
    return found


def _rules(params: Params) -> Iterator[Iterator[str]]:
    yield _unknown_profile(params)
    for name, baseline in _sound(params, "baselines").items():
        here = dotted(("baselines", name))
        yield _baseline_contradictions(here, name, params)
        yield _unknown_base(here, baseline, params)
        yield _unknown_data(here, baseline, params)
    for name, recipe in _sound(params, "recipes").items():
        here = dotted(("recipes", name))
        yield _unknown_base(here, recipe, params)
        yield _unknown_data(here, recipe, params)
        yield _recipe_contradictions(here, recipe)
        yield from (_part_contradictions(here, recipe, part) for part in PARTS)
        yield _label_contradictions(here, name, recipe, params)
        yield _cycle_contradictions(here, name, params)
    for name, build in _sound(params, "builds").items():
        here = dotted(("builds", name))
        yield _unknown_base(here, build, params)
        yield _build_contradictions(here, build)
        yield from (
            _expert_contradictions(here, build, expert, params)
            for expert in dict.fromkeys(build.recipes if _sound(build, "experts") else ())
        )
    for name, predictions in _sound(params, "predictions").items():
        yield _predictions_contradictions(dotted(("predictions", name)), predictions, params)
    for name, profile in _sound(params, "profiles").items():
        yield from _profile_rules(dotted(("profiles", name)), profile)


def _profile_rules(here: str, profile: ProfileParams) -> Iterator[Iterator[str]]:
    yield _image_contradictions(here, profile)
    yield _device_contradictions(here, profile)
    yield _placement_contradictions(here, profile)
    yield _evaluation_contradictions(here, profile)
    for name, dataset in _sound(profile, "datasets").items():
        yield _dataset_contradictions(f"{here}.datasets.{dotted((name,))}", dataset)
        yield _mix_contradictions(f"{here}.datasets.{dotted((name,))}", dataset, profile)


def _sound(owner: Any, name: str) -> Any:
    """The owner's mapping or list of that name; an empty one where either is wrong."""
    found = owner if isinstance(owner, _Wrong) else getattr(owner, name)
    return {} if isinstance(found, _Wrong) else found


def _unknown_profile(params: Params) -> Iterator[str]:
    if params.profile not in params.profiles:
        yield f"profile: no profile is called {params.profile!r}{nearest(params.profile, params.profiles)}"


def _baseline_contradictions(here: str, name: str, params: Params) -> Iterator[str]:
    if not name.startswith("base-") or name in params.recipes:
        yield f"{here}: a baseline's name starts with 'base-' and is no recipe's"


def _cycle_contradictions(here: str, name: str, params: Params) -> Iterator[str]:
    if cycle := _base_cycle(f"runs/{name}/merged", params):
        yield f"{here}.base: forms a cycle: {cycle}"


def _unknown_data(here: str, subject: RecipeParams | BaselineParams, params: Params) -> Iterator[str]:
    known = {name for profile in params.profiles.values() for name in profile.datasets}
    if subject.data not in known:
        yield f"{here}.data: no profile has a dataset {subject.data!r}{nearest(subject.data, known)}"


def _unknown_base(here: str, subject: RecipeParams | BaselineParams | BuildParams, params: Params) -> Iterator[str]:
    kind, name, *_ = subject.base.split("/")
    if kind == "bases":
        lacking, known = "profile has a base", {base for profile in params.profiles.values() for base in profile.bases}
    elif kind == "builds":
        lacking, known = "build is called", set(params.builds)
    else:
        lacking, known = "recipe is called", set(params.recipes)
    if name not in known:
        yield f"{here}.base: no {lacking} {name!r}{nearest(name, known)}"


def _part_contradictions(here: str, recipe: RecipeParams, part: Part) -> Iterator[str]:
    how = getattr(recipe.parts, part)
    if how == "lora" and recipe.lora is not None and part not in recipe.lora.targets:
        yield f"{here}.lora.targets.{part}: missing, though parts.{part} is lora"
    if how != "lora" and recipe.lora is not None and part in recipe.lora.targets:
        yield f"{here}.lora.targets.{part}: set, though parts.{part} is {how}"
    if how != "full" and part in recipe.full_targets:
        yield f"{here}.full_targets.{part}: set, though parts.{part} is {how}"
    if how == "frozen" and part in recipe.part_learning_rates:
        yield f"{here}.part_learning_rates.{part}: set, though parts.{part} is frozen"


def _recipe_contradictions(here: str, recipe: RecipeParams) -> Iterator[str]:
    if not recipe.parts.trained():
        yield f"{here}.parts: every part is frozen, so nothing would be trained"
    if recipe.parts.trained("lora") and recipe.lora is None:
        yield f"{here}.lora: missing, though parts ask for it"
    if recipe.quantization == "nf4" and recipe.parts.trained("full"):
        yield f"{here}.quantization: nf4 weights cannot be trained in full; use lora, or quantization: none"


def _label_contradictions(here: str, name: str, recipe: RecipeParams, params: Params) -> Iterator[str]:
    """Of a loss that labels routers, which is one of its own kind."""
    if recipe.loss != "router-labels":
        return
    if recipe.parts != PartsParams(llm="full") or recipe.full_targets != {"llm": ("mlp.gate",)}:
        yield (
            f"{here}.full_targets: loss router-labels trains routers and nothing else, which is said by "
            "parts: {llm: full} and full_targets: {llm: [mlp.gate]}"
        )
    *_, root = _bases(f"runs/{name}/merged", params)
    if root.startswith("bases/"):
        yield f"{here}.base: goes back to {root}, a dense model; loss router-labels teaches the routers of a build"
    build = params.builds.get(root.removeprefix("builds/")) if root.startswith("builds/") else None
    if build is not None and not build.domains:
        yield f"{here}.base: goes back to {root}, whose experts have no `domain`, by which router-labels would teach"


def _image_contradictions(here: str, profile: ProfileParams) -> Iterator[str]:
    if profile.images and profile.images.min_pixels > profile.images.max_pixels:
        yield f"{here}.images.min_pixels: larger than max_pixels"


def _device_contradictions(here: str, profile: ProfileParams) -> Iterator[str]:
    memory = profile.memory
    if profile.device.kind == "cpu":
        if memory.quantization != "none":
            yield f"{here}.memory.quantization: a CPU has no nf4; set it to none"
        if memory.precision == "fp16" or memory.attn == "flash_attention_2" or "8bit" in memory.optimizer:
            yield f"{here}.memory: fp16, flash attention and 8-bit optimizers need device.kind: cuda"
        if memory.placement == "balanced":
            yield f"{here}.memory.placement: balanced needs several CUDA devices"


def _placement_contradictions(here: str, profile: ProfileParams) -> Iterator[str]:
    """bitsandbytes knows no DTensor, which a sharded weight's share is."""
    memory, device = profile.memory, profile.device
    if memory.placement == "sharded":
        if "8bit" in memory.optimizer:
            yield f"{here}.memory.optimizer: an 8-bit optimizer cannot be sharded; take adamw_torch_fused"
        if memory.quantization != "none":
            yield (f"{here}.memory.quantization: nf4 weights cannot be sharded; set it to none, or take placement ddp")
    if (device.count > 1) != (memory.placement != "single"):
        yield f"{here}.memory.placement: {memory.placement} with device.count {device.count}"


def _evaluation_contradictions(here: str, profile: ProfileParams) -> Iterator[str]:
    max_length, max_new_tokens = profile.evaluation.max_length, profile.evaluation.max_new_tokens
    if max_length is not None and max_length <= max_new_tokens:
        yield f"{here}.evaluation.max_length: not more than max_new_tokens, which leaves no room to ask"


def _dataset_contradictions(here: str, dataset: DatasetParams) -> Iterator[str]:
    if dataset.source.startswith("generated") and dataset.generate is None:
        yield f"{here}.generate: missing, though the source is generated"
    if (dataset.source == "mix") != bool(dataset.mix):
        found = "set" if dataset.mix else "missing"
        yield f"{here}.mix: {found}, though the source is {dataset.source}"
    if dataset.source == "mix" and dataset.limit is not None:
        yield f"{here}.limit: set, though mix says how much of each dataset to take"
    if dataset.mix and not any(count is None or count > 0 for count in dataset.mix.values()):
        yield f"{here}.mix: takes no training sample of any dataset"


def _mix_contradictions(here: str, dataset: DatasetParams, profile: ProfileParams) -> Iterator[str]:
    datasets = profile.datasets
    for part in dataset.mix or ():
        if part not in datasets:
            yield f"{here}.mix.{part}: the profile has no such dataset{nearest(part, datasets)}"
        elif datasets[part].source == "mix":
            yield f"{here}.mix.{part}: is a mix itself"
        elif datasets[part].task != dataset.task:
            yield f"{here}.mix.{part}: has the task {datasets[part].task}, this one {dataset.task}"


def _predictions_contradictions(here: str, predictions: PredictionsParams, params: Params) -> Iterator[str]:
    if ".." in predictions.inputs.split("/"):
        yield f"{here}.inputs: leads out of data/"
    recipe = params.recipes.get(predictions.recipe)
    if recipe is None:
        near = nearest(predictions.recipe, params.recipes)
        yield f"{here}.recipe: no recipe is called {predictions.recipe!r}{near}"
    elif recipe.task != predictions.task:
        yield f"{here}.task: {predictions.task}, though recipe {predictions.recipe} has the task {recipe.task}"


def _build_contradictions(here: str, build: BuildParams) -> Iterator[str]:
    if build.top_k > len(build.experts):
        yield f"{here}.top_k: {build.top_k}, though there are {len(build.experts)} experts"
    for name in dict.fromkeys((*build.recipes, *build.domains)):
        if max(build.recipes.count(name), build.domains.count(name)) > 1:
            yield f"{here}.experts: {name} is named more than once"
    if build.domains and len(build.domains) < len(build.experts):
        yield f"{here}.experts: some have a `domain` and others have none"
    if build.router_init == "hidden-states" and not build.domains:
        yield f"{here}.router_init: hidden-states, though no expert has a `domain`, whose hidden states would choose it"


def _expert_contradictions(here: str, build: BuildParams, expert: str, params: Params) -> Iterator[str]:
    recipe = params.recipes.get(expert)
    if recipe is None:
        yield f"{here}.experts: no recipe is called {expert!r}{nearest(expert, params.recipes)}"
        return
    if recipe.task != build.task:
        yield f"{here}.experts: {expert} has the task {recipe.task}, not {build.task}"
    *_, root = _bases(f"runs/{expert}/merged", params)
    if root != build.base:
        yield f"{here}.experts: {expert} comes from {root}, not from {build.base}"


def _bases(folder: str, params: Params) -> Iterator[str]:
    """What a recipe starts from, through all the recipes it continues, up to a base, a build, or where it goes round.

    folder: a recipe's, `runs/RECIPE/merged`.
    """
    seen = {folder}
    while (name := _recipe_of(folder)) in params.recipes:
        folder = params.recipes[name].base
        yield folder
        if folder in seen:
            return
        seen.add(folder)


def _base_cycle(start: str, params: Params) -> str:
    """The way from a recipe's folder through what it is made of back to itself, or "" where there is none."""
    waiting: list[tuple[str, ...]] = [(start,)]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        for parent in _made_of(path[-1], params):
            if parent == start:
                return " -> ".join(_recipe_of(folder) or folder for folder in (*path, parent))
            if parent not in seen:  # a cycle further down is reported at the recipes that form it
                seen.add(parent)
                waiting.append((*path, parent))
    return ""


def _made_of(folder: str, params: Params) -> list[str]:
    kind, name, *_ = folder.split("/")
    if kind == "runs" and name in params.recipes:
        return [params.recipes[name].base]
    if kind == "builds" and name in params.builds:
        return [f"runs/{expert}/merged" for expert in params.builds[name].recipes]
    return []


def _recipe_of(folder: str) -> str:
    """The recipe whose merged model this is; "" for another folder."""
    kind, name, *_ = folder.split("/")
    return name if kind == "runs" else ""
