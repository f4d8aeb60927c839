"""params.yaml: the only way a stage learns what a person asked for. The schema checks each value; here, the values
together are checked.

The file is read by YAML 1.2's rules: `dvc exp run -S recipes.x.learning_rate=1e-5` writes `1e-05`, which YAML 1.1
readers take for text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from stages.core.params.schema import (
    OPTIMIZERS,
    PARTS,
    SCHEDULE_OPTIONS,
    BaselineParams,
    BuildParams,
    DatasetParams,
    DeviceParams,
    ExportParams,
    MemoryParams,
    Optimizer,
    Params,
    PartsParams,
    PredictionsParams,
    ProfileParams,
    RecipeParams,
    ScheduleOptions,
    has_bf16,
    recipe_of,
)
from stages.core.records import nearest, read_settings, refusal, unknown

Problems = Iterator[tuple[str, str]]
"""Dotted paths and the problem of each."""

A_GPU = """-S gpu=24, or -S 'gpu="RTX 4090"' (make plan: GPU=24)"""


def load_params(path: Path = Path("params.yaml"), *, changes: Iterable[str] = ()) -> Params:
    """Read and check the whole file: each value alone, and if those are right, the values together.

    changes: `KEY.KEY=VALUE` to set before that; the file stays as it is.

    Raises UserError with every problem under its dotted path.
    """
    params = read_settings(Params, path, changes=changes)
    if mistakes := list(cross_checks(params)):
        raise refusal(path, mistakes)
    return params


def cross_checks(params: Params) -> Problems:  # noqa: C901 - one loop for each section
    """Settings that are each right alone and wrong together."""
    yield from _top_level(params)
    for name, baseline in params.baselines.items():
        if not (name.startswith("base-") or baseline.answers) or name in params.recipes:
            yield f"baselines.{name}", "a base's name here starts with 'base-', and is no recipe's"
        yield from _names(f"baselines.{name}", baseline, params)
    for name, recipe in params.recipes.items():
        yield from _names(f"recipes.{name}", recipe, params)
        yield from _recipe(f"recipes.{name}", recipe)
        if params.quantization(name) == "nf4":
            yield from ((f"recipes.{name}.{field}", problem) for field, problem in nf4_problems(recipe))
        yield from _schedule(f"recipes.{name}", recipe)
        yield from _chosen_by_validation(f"recipes.{name}", recipe, params)
        if recipe.optimizer is not None and params.profile in params.profiles:
            active = params.active
            yield from _optimizer(f"recipes.{name}.optimizer", recipe.optimizer, active.memory, active.device)
        if recipe.loss == "router-labels":
            yield from _router_labels(f"recipes.{name}", recipe, params.root(name), params)
    yield from _cycles(params)
    for ours, theirs in params.compare.against.items():
        if lacking := {ours, theirs} - params.recipes.keys():
            yield f"compare.against.{ours}", unknown("recipe is called", min(lacking), params.recipes)
        elif ours == theirs or params.recipes[ours].task != params.recipes[theirs].task:
            yield f"compare.against.{ours}", f"{theirs}, which is not another recipe of the same task"
    for name, build in params.builds.items():
        yield from _names(f"builds.{name}", build, params)
        yield from _build(f"builds.{name}", build, params)
    for name, predictions in params.predictions.items():
        yield from _of_recipe(f"predictions.{name}", predictions, ("task",), params)
    for name, export in params.exports.items():
        if name in params.recipes.keys() | params.baselines.keys():
            yield f"exports.{name}", "is the name of a recipe or a baseline too"
        if (export.quantization in ("nf4", "int8")) != (export.format == "bitsandbytes"):
            yield (
                f"exports.{name}.quantization",
                f"{export.quantization}, which the format {export.format} does not have",
            )
        yield from _of_recipe(f"exports.{name}", export, ("task", "data"), params)
    for name, profile in params.profiles.items():
        for guard in params.guards.keys() & profile.datasets.keys():
            yield f"guards.{guard}", f"is the name of a dataset of {name} too"
        if profile.device.kind == "cpu" and (card := profile.device.card):
            yield f"profiles.{name}.device.card", f"{card}, though kind is cpu"
        yield from _profile(f"profiles.{name}", params.active if name == params.profile else profile)
        if profile.evaluation.engine == "vllm" and not params.models.keep_merged:
            yield f"profiles.{name}.evaluation.engine", "vllm reads merged models; models.keep_merged leaves none"


def _top_level(params: Params) -> Problems:
    if params.profile not in params.profiles:
        yield "profile", unknown("profile is called", params.profile, params.profiles)
    else:
        yield from _device(params)
        if params.scored == "test" and not any(dataset.splits.test for dataset in params.active.datasets.values()):
            yield "scored", f"is test, but no dataset of profiles.{params.profile} has files below splits.test"
    if params.scored == "selection" and not params.data.selection:
        yield "scored", "is selection, but data.selection sets no samples aside; e.g. 0.15"


def _device(params: Params) -> Problems:
    """The active profile and the device that it gets from `gpu` and `gpus`."""
    memory, device, here = params.active.memory, params.active.device, f"profiles.{params.profile}.memory"
    if device.kind == "cpu":
        on_gpu = ", ".join(name for name, profile in params.profiles.items() if profile.device.kind == "cuda")
        for field in ("gpu", "gpus"):
            if (value := getattr(params, field)) is not None:
                now = f"{value:g}" if isinstance(value, float) else value
                yield field, f"{now}, though profile {params.profile} runs on a CPU; on a GPU run: {on_gpu or 'none'}"
    elif device.card is None and device.memory_gb is None:
        yield "gpu", f"missing, though profile {params.profile} runs on a GPU; give its size in GB or its name: {A_GPU}"
    elif memory.precision == "bf16" and not has_bf16(device.card):
        yield f"{here}.precision", f"bf16, which {device.card} does not compute in; set it to auto or fp16"
    if (device.total == 1) != (memory.placement == "single") or (device.nodes > 1 and memory.placement == "balanced"):
        nodes = f" on each of {device.nodes} nodes" if device.nodes > 1 else ""
        yield f"{here}.placement", f"{memory.placement} with {device.count} device(s){nodes}; auto goes with any number"


def _names(here: str, subject: RecipeParams | BaselineParams | BuildParams, params: Params) -> Problems:
    """The base and the dataset exist."""
    kind, name, *_ = subject.base.split("/")
    lacking, known = {
        "bases": ("profile has a base", {base for profile in params.profiles.values() for base in profile.bases}),
        "builds": ("build is called", set(params.builds)),
        "runs": ("recipe is called", set(params.recipes)),
        "answers": ("", {name}),  # DVC names a file that is missing
    }[kind]
    if name not in known:
        yield f"{here}.base", unknown(lacking, name, known)
    datasets = {dataset for profile in params.profiles.values() for dataset in profile.datasets}
    if not isinstance(subject, BuildParams) and subject.data not in datasets:
        yield f"{here}.data", unknown("profile has a dataset", subject.data, datasets)


def _of_recipe(here: str, reader: PredictionsParams | ExportParams, same: Sequence[str], params: Params) -> Problems:
    """The recipe exists, and has these settings too: dvc.yaml cannot look them up."""
    if reader.recipe not in params.recipes:
        yield f"{here}.recipe", unknown("recipe is called", reader.recipe, params.recipes)
        return
    for field in same:
        if (wanted := getattr(params.recipes[reader.recipe], field)) != getattr(reader, field):
            yield f"{here}.{field}", f"{getattr(reader, field)}, though recipe {reader.recipe} has the {field} {wanted}"


def _recipe(here: str, recipe: RecipeParams) -> Problems:
    if not recipe.parts.trained():
        yield f"{here}.parts", "every part is frozen, so nothing would be trained"
    if recipe.parts.trained("lora") and recipe.lora is None:
        yield f"{here}.lora", "missing, though parts ask for it"
    if recipe.lora is not None and not recipe.parts.trained("lora"):
        yield f"{here}.lora", "set, though no part is trained by lora"
    for part in PARTS:
        how = getattr(recipe.parts, part)
        if recipe.lora is not None and (how == "lora") != (part in recipe.lora.targets):
            state = "missing" if how == "lora" else "set"
            yield f"{here}.lora.targets.{part}", f"{state}, though parts.{part} is {how}"
        if how != "full" and part in recipe.full_targets:
            yield f"{here}.full_targets.{part}", f"set, though parts.{part} is {how}"
        if how == "frozen" and part in recipe.part_learning_rates:
            yield f"{here}.part_learning_rates.{part}", f"set, though parts.{part} is frozen"


def nf4_problems(recipe: RecipeParams) -> Problems:
    """Settings of the recipe, by their paths below it, that do not go with weights in nf4."""
    if recipe.lora is not None and recipe.lora.takes_from_base:
        why = "what it leaves in the base would be quantized again, and the adapter would fit no other base"
        yield "lora.init", f"{recipe.lora.init} with nf4: {why}; use default, or quantization: none"
    if recipe.parts.trained("full"):
        yield "quantization", "nf4 weights cannot be trained in full; use lora, or quantization: none"


def _schedule(here: str, recipe: RecipeParams) -> Problems:
    if recipe.warmup_steps is not None and recipe.warmup_ratio is not None:
        yield f"{here}.warmup_steps", "set, though warmup_ratio is set too; set one of them"
    for option in fields(ScheduleOptions):
        is_set = getattr(recipe.lr_schedule_options, option.name, None) is not None
        if is_set != (option.name in SCHEDULE_OPTIONS.get(recipe.lr_schedule, ())):
            state = "set" if is_set else "missing"
            yield f"{here}.lr_schedule_options.{option.name}", f"{state}, though lr_schedule is {recipe.lr_schedule}"


def _chosen_by_validation(here: str, recipe: RecipeParams, params: Params) -> Problems:
    chooser = {"keep": recipe.keep == "best", "early_stopping": recipe.early_stopping is not None}
    split = "selection" if params.data.selection else "val"
    limit = params.active.validation_limit if params.profile in params.profiles else None
    same = (
        f"and the report is of it too (scored: {split}): the best of several looks better there than it is; set "
        "training samples aside to choose by, e.g. data.selection: 0.15"
        + (", and let scored be val" if split == "selection" else "")
    )
    for field in (name for name, chooses in chooser.items() if chooses):
        if recipe.validation is None:
            yield f"{here}.{field}", "chooses by validations, and validation is null"
        elif recipe.validation.by == "score" and not recipe.validation.score_samples:
            yield f"{here}.validation.score_samples", f"0, though {field} chooses by the score"
        elif recipe.validation.by == "score" and limit and not limit.score_samples:
            limited = f"profiles.{params.profile}.validation_limit.score_samples"
            yield limited, f"0, though {here}.{field} chooses by the score"
        if split == params.scored:
            yield f"{here}.{field}", f"chooses weights by the split {split}, {same}"


def _router_labels(here: str, recipe: RecipeParams, root: str, params: Params) -> Problems:
    """root: the base or build that the recipe goes back to."""
    if recipe.parts != PartsParams(llm="full") or recipe.full_targets != {"llm": ("mlp.gate",)}:
        gate_only = "parts: {llm: full} and full_targets: {llm: [mlp.gate]}"
        yield f"{here}.full_targets", f"loss router-labels trains routers and nothing else; expected {gate_only}"
    if recipe.neftune_alpha is not None:
        yield f"{here}.neftune_alpha", "set, though loss router-labels trains routers on the model's own hidden states"
    kind, _, name = root.partition("/")
    if kind == "bases":
        yield f"{here}.base", f"goes back to {root}, a dense model; loss router-labels trains the routers of a build"
    elif kind == "builds" and name in params.builds and not params.builds[name].domains:
        yield f"{here}.base", f"goes back to {root}: its experts have no `domain`, which router-labels needs"


def _profile(here: str, profile: ProfileParams) -> Problems:
    memory, device, evaluation = profile.memory, profile.device, profile.evaluation
    yield from _memory(f"{here}.memory", memory, device)
    if profile.images and profile.images.min_pixels > profile.images.max_pixels:
        yield f"{here}.images.min_pixels", "larger than max_pixels"
    if evaluation.max_length is not None and evaluation.max_length <= evaluation.max_new_tokens:
        yield f"{here}.evaluation.max_length", "not more than max_new_tokens, which leaves no room for the question"
    for name, dataset in profile.datasets.items():
        yield from _dataset(f"{here}.datasets.{name}", dataset, profile.datasets)
        if dataset.limit and dataset.limit.test and not dataset.splits.test:
            yield f"{here}.datasets.{name}.limit.test", f"{dataset.limit.test}, though splits.test names no files"


def _memory(here: str, memory: MemoryParams, device: DeviceParams) -> Problems:
    if device.kind == "cpu" and memory.attn == "flash_attention_2":
        yield f"{here}.attn", "flash_attention_2 needs device.kind: cuda"
    yield from _optimizer(f"{here}.optimizer", memory.optimizer, memory, device)
    if device.kind == "cpu" and memory.placement == "balanced":
        yield f"{here}.placement", "balanced needs several CUDA devices"
    if memory.placement == "sharded" and memory.quantization != "none":
        yield f"{here}.quantization", "nf4 weights cannot be sharded; set it to none, or take placement ddp"


def _optimizer(here: str, name: Optimizer, memory: MemoryParams, device: DeviceParams) -> Problems:
    if device.kind == "cpu" and OPTIMIZERS[name].needs_gpu:
        yield here, f"{name} needs device.kind: cuda"
    if memory.placement == "sharded" and not OPTIMIZERS[name].shardable:
        yield here, f"{name} cannot be sharded; take adamw_torch_fused"


def _dataset(here: str, dataset: DatasetParams, datasets: dict[str, DatasetParams]) -> Problems:
    mix = dataset.mix or {}
    if dataset.mix and dataset.splits.patterns():
        yield f"{here}.splits", "not for a mix, which has the splits of its parts"
    if (dataset.source == "mix") != bool(mix):
        yield f"{here}.mix", f"{'set' if mix else 'missing'}, though the source is {dataset.source}"
    if dataset.source == "mix" and dataset.limit is not None:
        yield f"{here}.limit", "set, though mix says how much of each dataset to take"
    for part in mix:
        if part not in datasets:
            yield f"{here}.mix.{part}", f"the profile has no such dataset{nearest(part, datasets)}"
        elif datasets[part].source == "mix":
            yield f"{here}.mix.{part}", "is a mix itself"
        elif datasets[part].repeat:
            yield f"{here}.mix.{part}", f"repeats samples itself; let the mix repeat them: {{{part}/*: 3}}"
        elif datasets[part].task != dataset.task:
            yield f"{here}.mix.{part}", f"has the task {datasets[part].task}, this one {dataset.task}"


def _build(here: str, build: BuildParams, params: Params) -> Problems:
    if build.top_k > len(build.experts):
        yield f"{here}.top_k", f"{build.top_k}, though there are {len(build.experts)} experts"
    for name in dict.fromkeys((*build.recipes, *build.domains)):
        if max(build.recipes.count(name), build.domains.count(name)) > 1:
            yield f"{here}.experts", f"{name} is named more than once"
    if build.domains and len(build.domains) < len(build.experts):
        yield f"{here}.experts", "some have a `domain` and others have none"
    for expert in dict.fromkeys(build.recipes):
        if expert not in params.recipes:
            yield f"{here}.experts", unknown("recipe is called", expert, params.recipes)
            continue
        if (task := params.recipes[expert].task) != build.task:
            yield f"{here}.experts", f"{expert} has the task {task}, not {build.task}"
        if (root := params.root(expert)) != build.base:
            yield f"{here}.experts", f"{expert} comes from {root}, not from {build.base}"


def _cycles(params: Params) -> Problems:
    """The way from each recipe of a cycle through what it is made of back to itself; only of the first cycle found."""
    made_of = {f"runs/{name}/merged": [recipe.base] for name, recipe in params.recipes.items()}
    for name, build in params.builds.items():
        made_of[f"builds/{name}"] = [f"runs/{expert}/merged" for expert in build.recipes]
    try:
        TopologicalSorter(made_of).prepare()
    except CycleError as error:
        *cycle, _ = reversed(error.args[1])
        for index, folder in enumerate(cycle):
            if recipe := recipe_of(folder):
                way = (recipe_of(each) or each for each in (*cycle[index:], *cycle[:index], folder))
                yield f"recipes.{recipe}.base", f"forms a cycle: {' -> '.join(way)}"
