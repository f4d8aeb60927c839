"""Settings of params.yaml that are each right alone and wrong together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from stages.core.documents import dotted, nearest, shown
from stages.core.params.salvage import LookedAt, sound
from stages.core.params.schema import (
    PARTS,
    BaselineParams,
    BuildParams,
    DatasetParams,
    Params,
    Part,
    PartsParams,
    PredictionsParams,
    ProfileParams,
    RecipeParams,
    recipe_of,
)


def contradictions(params: Params) -> list[str]:
    """Settings that are each right alone and wrong together.

    params: as it is, or salvaged; then nothing is said that depends on what is wrong in it.
    """
    found: list[str] = []
    for rule in _rules(params):
        with suppress(LookedAt):
            found.extend(rule)  # what it says before it looks at a wrong value counts
    return found


def _rules(params: Params) -> Iterator[Iterator[str]]:
    yield _unknown_profile(params)
    for name, baseline in sound(params, "baselines").items():
        here = dotted(("baselines", name))
        yield _baseline_contradictions(here, name, params)
        yield _unknown_base(here, baseline, params)
        yield _unknown_data(here, baseline, params)
    for name, recipe in sound(params, "recipes").items():
        here = dotted(("recipes", name))
        yield _unknown_base(here, recipe, params)
        yield _unknown_data(here, recipe, params)
        yield _recipe_contradictions(here, recipe)
        yield from (_part_contradictions(here, recipe, part) for part in PARTS)
        yield _label_contradictions(here, name, recipe, params)
        yield _cycle_contradictions(here, name, params)
    for name, build in sound(params, "builds").items():
        here = dotted(("builds", name))
        yield _unknown_base(here, build, params)
        yield _build_contradictions(here, build)
        yield from (
            _expert_contradictions(here, build, expert, params)
            for expert in dict.fromkeys(build.recipes if sound(build, "experts") else ())
        )
    for name, predictions in sound(params, "predictions").items():
        yield _predictions_contradictions(dotted(("predictions", name)), predictions, params)
    for name, profile in sound(params, "profiles").items():
        yield from _profile_rules(dotted(("profiles", name)), profile)


def _profile_rules(here: str, profile: ProfileParams) -> Iterator[Iterator[str]]:
    yield _image_contradictions(here, profile)
    yield _device_contradictions(here, profile)
    yield _placement_contradictions(here, profile)
    yield _evaluation_contradictions(here, profile)
    for name, dataset in sound(profile, "datasets").items():
        yield _dataset_contradictions(f"{here}.datasets.{dotted((name,))}", dataset)
        yield _mix_contradictions(f"{here}.datasets.{dotted((name,))}", dataset, profile)


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
    root = params.root(name)
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
        if memory.attn == "flash_attention_2" or "8bit" in memory.optimizer:
            yield f"{here}.memory: flash attention and 8-bit optimizers need device.kind: cuda"
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
    top, *below = predictions.inputs.split("/")
    if top != "data" or not below or {"", ".", ".."}.intersection(below):  # DVC would fetch a URL
        yield f"{here}.inputs: expected a file of this checkout, data/..., found {shown(predictions.inputs)}"
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
    root = params.root(expert)
    if root != build.base:
        yield f"{here}.experts: {expert} comes from {root}, not from {build.base}"


def _base_cycle(start: str, params: Params) -> str:
    """The way from a recipe's folder through what it is made of back to itself, or "" where there is none."""
    waiting: list[tuple[str, ...]] = [(start,)]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        for parent in _made_of(path[-1], params):
            if parent == start:
                return " -> ".join(recipe_of(folder) or folder for folder in (*path, parent))
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
