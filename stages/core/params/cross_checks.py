"""Settings of params.yaml that are each right alone and wrong together."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from stages.core.documents import nearest, shown
from stages.core.params.schema import (
    OPTIMIZERS,
    PARTS,
    BaselineParams,
    BuildParams,
    DatasetParams,
    Params,
    PartsParams,
    PredictionsParams,
    ProfileParams,
    RecipeParams,
    recipe_of,
)

OWN_JOB_OPTIONS = (
    *("array", "batch", "bcast", "chdir", "error", "export", "get-user-env", "input", "job-name", "no-requeue"),
    *("open-mode", "output", "parsable", "requeue", "signal", "test-only", "wait", "wrap"),
)
"""sbatch's options by which the launcher finds a job, and says what it runs and writes."""

Problems = Iterator[tuple[str, str]]
"""Dotted paths and what is wrong there."""


def cross_checks(params: Params) -> Problems:
    yield from _top_problems(params)
    for name, baseline in params.baselines.items():
        here = f"baselines.{name}"
        if not name.startswith("base-") or name in params.recipes:
            yield here, "a baseline's name starts with 'base-' and is no recipe's"
        yield from _unknown_names(here, baseline, params)
    for name, recipe in params.recipes.items():
        here = f"recipes.{name}"
        yield from _unknown_names(here, recipe, params)
        yield from _recipe_problems(here, recipe)
        yield from _label_problems(here, name, recipe, params)
    yield from _cycle_problems(params)
    for name, build in params.builds.items():
        here = f"builds.{name}"
        yield from _unknown_base(here, build, params)
        yield from _build_problems(here, build)
        for expert in dict.fromkeys(build.recipes):
            yield from _expert_problems(here, build, expert, params)
    for name, predictions in params.predictions.items():
        yield from _predictions_problems(f"predictions.{name}", predictions, params)
    for name, profile in params.profiles.items():
        yield from _profile_problems(f"profiles.{name}", profile)
        if profile.evaluation.engine == "vllm" and not params.models.keep_merged:
            yield f"profiles.{name}.evaluation.engine", "vllm reads merged models; models.keep_merged leaves none"


def _top_problems(params: Params) -> Problems:
    if params.profile not in params.profiles:
        yield "profile", f"no profile is called {params.profile!r}{nearest(params.profile, params.profiles)}"
    if params.scored == "selection" and not params.data.selection:
        yield "scored", "is selection, but data.selection sets no samples aside; e.g. 0.15"
    for kind in ("cpu", "gpu"):
        for option in getattr(params.slurm, kind).options:
            name = option.removeprefix("--").partition("=")[0]
            # sbatch takes the beginning of an option's name for it.
            if any(own.startswith(name) or name.startswith(own) for own in OWN_JOB_OPTIONS):
                yield f"slurm.{kind}.options", f"{option} is for the launcher to set, or not to be set"


def _unknown_names(here: str, subject: RecipeParams | BaselineParams, params: Params) -> Problems:
    yield from _unknown_base(here, subject, params)
    known = {name for profile in params.profiles.values() for name in profile.datasets}
    if subject.data not in known:
        yield f"{here}.data", f"no profile has a dataset {subject.data!r}{nearest(subject.data, known)}"


def _unknown_base(here: str, subject: RecipeParams | BaselineParams | BuildParams, params: Params) -> Problems:
    kind, name, *_ = subject.base.split("/")
    if kind == "bases":
        lacking, known = "profile has a base", {base for profile in params.profiles.values() for base in profile.bases}
    elif kind == "builds":
        lacking, known = "build is called", set(params.builds)
    else:
        lacking, known = "recipe is called", set(params.recipes)
    if name not in known:
        yield f"{here}.base", f"no {lacking} {name!r}{nearest(name, known)}"


def _recipe_problems(here: str, recipe: RecipeParams) -> Problems:
    if not recipe.parts.trained():
        yield f"{here}.parts", "every part is frozen, so nothing would be trained"
    if recipe.parts.trained("lora") and recipe.lora is None:
        yield f"{here}.lora", "missing, though parts ask for it"
    if recipe.quantization == "nf4" and recipe.parts.trained("full"):
        yield f"{here}.quantization", "nf4 weights cannot be trained in full; use lora, or quantization: none"
    for part in PARTS:
        how = getattr(recipe.parts, part)
        if how == "lora" and recipe.lora is not None and part not in recipe.lora.targets:
            yield f"{here}.lora.targets.{part}", f"missing, though parts.{part} is lora"
        if how != "lora" and recipe.lora is not None and part in recipe.lora.targets:
            yield f"{here}.lora.targets.{part}", f"set, though parts.{part} is {how}"
        if how != "full" and part in recipe.full_targets:
            yield f"{here}.full_targets.{part}", f"set, though parts.{part} is {how}"
        if how == "frozen" and part in recipe.part_learning_rates:
            yield f"{here}.part_learning_rates.{part}", f"set, though parts.{part} is frozen"


def _label_problems(here: str, name: str, recipe: RecipeParams, params: Params) -> Problems:
    """Requirements of the loss router-labels."""
    if recipe.loss != "router-labels":
        return
    if recipe.parts != PartsParams(llm="full") or recipe.full_targets != {"llm": ("mlp.gate",)}:
        gate_only = "parts: {llm: full} and full_targets: {llm: [mlp.gate]}"
        yield f"{here}.full_targets", f"loss router-labels trains routers and nothing else; expected {gate_only}"
    root = params.root(name)
    if root.startswith("bases/"):
        yield f"{here}.base", f"goes back to {root}, a dense model; loss router-labels teaches the routers of a build"
    build = params.builds.get(root.removeprefix("builds/")) if root.startswith("builds/") else None
    if build is not None and not build.domains:
        yield f"{here}.base", f"goes back to {root}, whose experts have no `domain`, by which router-labels would teach"


def _profile_problems(here: str, profile: ProfileParams) -> Problems:
    memory, device, evaluation = profile.memory, profile.device, profile.evaluation
    if profile.images and profile.images.min_pixels > profile.images.max_pixels:
        yield f"{here}.images.min_pixels", "larger than max_pixels"
    optimizer = OPTIMIZERS[memory.optimizer]
    if device.kind == "cpu" and (memory.attn == "flash_attention_2" or optimizer.needs_gpu):
        yield f"{here}.memory", "flash attention and 8-bit optimizers need device.kind: cuda"
    if device.kind == "cpu" and memory.placement == "balanced":
        yield f"{here}.memory.placement", "balanced needs several CUDA devices"
    if memory.placement == "sharded" and not optimizer.shardable:
        yield f"{here}.memory.optimizer", "an 8-bit optimizer cannot be sharded; take adamw_torch_fused"
    if memory.placement == "sharded" and memory.quantization != "none":
        yield f"{here}.memory.quantization", "nf4 weights cannot be sharded; set it to none, or take placement ddp"
    if (device.total > 1) != (memory.placement != "single") or (device.nodes > 1 and memory.placement == "balanced"):
        nodes = f" on each of {device.nodes} nodes" if device.nodes > 1 else ""
        yield f"{here}.memory.placement", f"{memory.placement} with device.count {device.count}{nodes}"
    if evaluation.max_length is not None and evaluation.max_length <= evaluation.max_new_tokens:
        yield f"{here}.evaluation.max_length", "not more than max_new_tokens, which leaves no room to ask"
    if evaluation.batch_size == "auto" and device.kind == "cuda" and device.memory_gb is None:
        yield f"{here}.evaluation.batch_size", "auto needs device.memory_gb"
    for name, dataset in profile.datasets.items():
        yield from _dataset_problems(f"{here}.datasets.{name}", dataset, profile.datasets)


def _dataset_problems(here: str, dataset: DatasetParams, datasets: dict[str, DatasetParams]) -> Problems:
    if (dataset.source == "mix") != bool(dataset.mix):
        found = "set" if dataset.mix else "missing"
        yield f"{here}.mix", f"{found}, though the source is {dataset.source}"
    if dataset.source == "mix" and dataset.limit is not None:
        yield f"{here}.limit", "set, though mix says how much of each dataset to take"
    if dataset.mix and not any(count is None or count > 0 for count in dataset.mix.values()):
        yield f"{here}.mix", "takes no training sample of any dataset"
    for part in dataset.mix or ():
        if part not in datasets:
            yield f"{here}.mix.{part}", f"the profile has no such dataset{nearest(part, datasets)}"
        elif datasets[part].source == "mix":
            yield f"{here}.mix.{part}", "is a mix itself"
        elif datasets[part].task != dataset.task:
            yield f"{here}.mix.{part}", f"has the task {datasets[part].task}, this one {dataset.task}"


def _predictions_problems(here: str, predictions: PredictionsParams, params: Params) -> Problems:
    top, *below = predictions.inputs.split("/")
    if top != "data" or not below or {"", ".", ".."}.intersection(below):  # DVC would fetch a URL
        yield f"{here}.inputs", f"expected a file of this checkout, data/..., found {shown(predictions.inputs)}"
    recipe = params.recipes.get(predictions.recipe)
    if recipe is None:
        near = nearest(predictions.recipe, params.recipes)
        yield f"{here}.recipe", f"no recipe is called {predictions.recipe!r}{near}"
    elif recipe.task != predictions.task:
        yield f"{here}.task", f"{predictions.task}, though recipe {predictions.recipe} has the task {recipe.task}"


def _build_problems(here: str, build: BuildParams) -> Problems:
    if build.top_k > len(build.experts):
        yield f"{here}.top_k", f"{build.top_k}, though there are {len(build.experts)} experts"
    for name in dict.fromkeys((*build.recipes, *build.domains)):
        if max(build.recipes.count(name), build.domains.count(name)) > 1:
            yield f"{here}.experts", f"{name} is named more than once"
    if build.domains and len(build.domains) < len(build.experts):
        yield f"{here}.experts", "some have a `domain` and others have none"


def _expert_problems(here: str, build: BuildParams, expert: str, params: Params) -> Problems:
    recipe = params.recipes.get(expert)
    if recipe is None:
        yield f"{here}.experts", f"no recipe is called {expert!r}{nearest(expert, params.recipes)}"
        return
    if recipe.task != build.task:
        yield f"{here}.experts", f"{expert} has the task {recipe.task}, not {build.task}"
    root = params.root(expert)
    if root != build.base:
        yield f"{here}.experts", f"{expert} comes from {root}, not from {build.base}"


def _cycle_problems(params: Params) -> Problems:
    """The way from each recipe of a cycle through what it is made of back to itself; of the first cycle alone."""
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
