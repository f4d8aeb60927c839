"""Predictions of recipes before their stages have run: behind `make plan` and `tools.api.predict_memory`.

Without weights, GPU or network; nothing is written. Imports torch and transformers, so whoever has to answer a typing
error at once imports this late.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import transformers
from rich.console import Console

from stages.core.params.schema import Params
from stages.kit.memory.fit import Fit, cheapest_fit, fit_of
from stages.kit.memory.predictor import MemoryPredictor
from stages.kit.memory.stand_in import stand_in_batch, stand_in_processor
from stages.kit.mixture.merge import mixture_config
from stages.kit.models.load import load_config
from stages.kit.models.processors import load_processor
from stages.kit.planning.disk import DiskUse, disk_use
from stages.kit.planning.ladder import lowered_batch_size, settings
from stages.kit.planning.memory_record import in_gib
from stages.kit.planning.plan import Plan, resolve_plan
from stages.kit.planning.prediction import Prediction
from stages.kit.training.collators import ConversationCollator
from stages.kit.training.rehearsal import largest_batch
from stages.tasks import load_task
from tools.plan.available_inputs import AvailableBase, available_base, available_data
from tools.plan.recipe_memory import CheaperPlan, RecipeMemory, run_command


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A recipe's plan, and what predicts its memory."""

    plan: Plan
    base: AvailableBase
    predictor: MemoryPredictor
    disk: DiskUse
    batch: str
    """Where the batch came from that the prediction is for, in words."""

    def predict(self, plan: Plan) -> Prediction:
        with _console().status(f"{plan.recipe}: {said(plan)}", spinner="line"):
            return self.predictor(plan)

    def fit(self, memory_gb: float | None) -> Fit:
        device = replace(self.plan.device, memory_gb=memory_gb)
        return fit_of(self.plan, self.predict, self.predictor.capacity_bytes(device))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A recipe on a device of one size."""

    fit: Fit
    """As planned."""
    cheapest: Fit
    """With the cheapest settings that fit: see `cheapest_fit`."""
    evaluation: Fit
    """Its evaluation, at the profile's batch size."""
    evaluation_batch_size: int | None
    """The profile's, halved until it fits; None where not even 1 does."""

    @property
    def verdict(self) -> str | None:
        return self.cheapest.verdict


@dataclass(frozen=True, kw_only=True)
class Previews:
    """The recipes of one profile, each looked at once."""

    params: Params
    """With the profile that is asked for active."""
    in_file: str
    """The profile that params.yaml itself has active."""
    exact: bool = False
    """Record every layer of the model, not a few."""
    _previews: dict[str, Preview] = field(default_factory=dict)
    _made: dict[str, Prediction] = field(default_factory=dict)
    _judged: dict[tuple[str, float | None], Judged] = field(default_factory=dict)
    _answers: dict[tuple[object, ...], Prediction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        transformers.logging.set_verbosity_error()  # it warns of the stand-in's tokens

    def of(self, name: str) -> Preview:
        if name not in self._previews:
            self._previews[name] = _preview(self.params, name, exact=self.exact, made=self._made)
        return self._previews[name]

    def judged(self, name: str, memory_gb: float | None) -> Judged:
        key = (name, memory_gb)
        if key not in self._judged:
            preview = self.of(name)
            fit = preview.fit(memory_gb)
            one_device = replace(preview.plan.device.one(), memory_gb=memory_gb)
            alone = replace(fit, capacity_bytes=preview.predictor.capacity_bytes(one_device))
            batch_size = self.params.active.evaluation.batch_size
            self._judged[key] = Judged(
                fit=fit,
                cheapest=cheapest_fit(fit, preview.predict),
                evaluation=self._evaluation(preview, alone, batch_size),
                evaluation_batch_size=self._fitting_batch_size(preview, alone, batch_size),
            )
        return self._judged[key]

    def _fitting_batch_size(self, preview: Preview, fit: Fit, batch_size: int) -> int | None:
        def fits(batch_size: int) -> bool:
            return self._evaluation(preview, fit, batch_size).verdict != "does not fit"

        if not fits(batch_size) and not fits(1):
            return None  # each size between takes seconds to look at
        sizes = (lowered_batch_size(batch_size, attempt) for attempt in range(batch_size.bit_length()))
        return next(size for size in sizes if size is not None and fits(size))

    def _evaluation(self, preview: Preview, fit: Fit, batch_size: int) -> Fit:
        plan = fit.plan
        key = (preview.base, preview.batch, plan.data_dir, plan.target, plan.max_length, batch_size)
        if key not in self._answers:
            evaluation = replace(self.params.active.evaluation, batch_size=batch_size)
            with _console().status(f"{plan.recipe}: evaluation, {batch_size} at once", spinner="line"):
                self._answers[key] = preview.predictor.answers(plan, evaluation)
        return replace(fit, prediction=self._answers[key])

    def needs(self, name: str) -> tuple[str, ...]:
        """The recipes that have to be trained before this one, the first one first."""
        found: dict[str, None] = {}
        for parent in self._parents(name):
            found |= dict.fromkeys((*self.needs(parent), parent))
        return tuple(found)

    def _parents(self, name: str) -> tuple[str, ...]:
        recipe = self.params.recipe(name)
        parent, build = recipe.base_recipe(), recipe.base_build()
        return (parent,) if parent else self.params.build(build).recipes if build else ()

    def command(self, target: str, names: Iterable[str], memory_gb: float | None) -> str | None:
        """Runs a stage that all these recipes are trained for; None where one of them does not fit."""
        judged = [self.judged(name, memory_gb) for name in names]
        if any(each.verdict == "does not fit" for each in judged):
            return None
        profile, active = self.params.profile, self.params.active
        changes = {"profile": profile} if profile != self.in_file else {}
        if memory_gb != active.device.memory_gb:
            added = "++" if active.device.memory_gb is None else ""
            changes[f"{added}profiles.{profile}.device.memory_gb"] = f"{memory_gb:g}"
        if active.memory.fit != "auto" and any(each.cheapest.changes for each in judged):
            changes[f"++profiles.{profile}.memory.fit"] = "auto"
        return run_command(target, changes)

    def recipe_command(self, name: str, memory_gb: float | None) -> str | None:
        """To its figures; to the trained weights where the evaluation does not fit."""
        evaluated = self.judged(name, memory_gb).evaluation_batch_size is not None
        return self.command(f"{'evaluate' if evaluated else 'train'}@{name}", (*self.needs(name), name), memory_gb)

    def comparison_command(self, task: str, memory_gb: float | None) -> str | None:
        """None also where an evaluation does not fit."""
        names = [name for name, recipe in self.params.recipes.items() if recipe.task == task]
        if any(self.judged(name, memory_gb).evaluation_batch_size is None for name in names):
            return None
        return self.command(f"compare@{task}", names, memory_gb)

    def recipe_memory(self, name: str, memory_gb: float | None) -> RecipeMemory:
        preview, judged = self.of(name), self.judged(name, memory_gb)
        fit = judged.fit
        return RecipeMemory(
            recipe=name,
            profile=self.params.profile,
            memory_gb=memory_gb,
            base=preview.base.source,
            batch=preview.batch,
            settings=settings(fit.plan),
            memory=fit.record(judged.evaluation),
            usable_gib=None if fit.capacity_bytes is None else in_gib(fit.capacity_bytes),
            cheapest=None if fit.verdict in (None, "fits") else CheaperPlan.of(judged.cheapest),
            evaluation_batch_size=judged.evaluation_batch_size,
            after={before: self.judged(before, memory_gb).verdict or "unknown" for before in self.needs(name)},
            disk=preview.disk,
            command=self.recipe_command(name, memory_gb),
        )


def _console() -> Console:
    return Console(stderr=True, force_jupyter=False)  # in a notebook it would ask for ipywidgets


def _preview(params: Params, name: str, *, exact: bool, made: dict[str, Prediction]) -> Preview:
    """made: the predictions of this profile so far."""
    recipe = params.recipe(name)
    base, data_dir = available_base(params, name), available_data(params, recipe.data)
    config = load_config(base.config_dir)
    if base.build is not None:
        config = mixture_config(config, experts=len(base.build.experts), top_k=base.build.top_k)
    samples = load_task(recipe.task, "samples")
    samples.check(config.model_type, recipe.target)
    if base.processor_dir is not None and data_dir is not None:
        records = samples.read_split(data_dir, "train")
        plan = resolve_plan(params, name, train_samples=len(records))
        processor = load_processor(base.processor_dir, plan.images)
        collator = ConversationCollator.of_plan(plan, processor, records, samples)
        predictor = MemoryPredictor(config=config, processor=processor, batch_of=partial(largest_batch, collator))
        batch = f"the largest samples of {data_dir}"
    else:
        plan = resolve_plan(params, name, train_samples=recipe.effective_batch)
        max_pixels = plan.images.max_pixels if plan.images else None
        predictor = MemoryPredictor(
            config=config,
            processor=stand_in_processor(config, plan.images),
            batch_of=partial(stand_in_batch, config, max_length=plan.max_length, max_pixels=max_pixels),
        )
        missing = "data" if data_dir is None else "tokenizer"
        limits = f"max_length {plan.max_length}" + (f" and max_pixels {max_pixels}" if max_pixels else "")
        batch = f"no {missing} yet: the worst within {limits}"
    predictor = replace(predictor, exact=exact, made=made)
    plan = replace(plan, base_dir=str(base.config_dir))  # that of a recipe which continues another is not made yet
    plan = predictor.counted(plan)
    return Preview(plan=plan, base=base, predictor=predictor, disk=disk_use(plan, params), batch=batch)


def said(plan: Plan) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings(plan).items())
