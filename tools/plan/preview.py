"""Predictions of recipes before their stages have run: behind `make plan` and `tools.api.predict_memory`.

Without weights, GPU or network; nothing is written. Imports torch and transformers, so whoever has to answer a typing
error at once imports this late.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, partial

import transformers
from rich.console import Console

from stages.core.params.schema import Params
from stages.kit.memory.fit import Fit, answers_at_once, cheapest_fit, fullest_fit
from stages.kit.memory.predict import MemoryPredictor
from stages.kit.memory.stand_in import stand_in_batch, stand_in_processor
from stages.kit.mixture.build import mixture_config
from stages.kit.models.load import load_config
from stages.kit.models.prompts import load_processor, require_takes
from stages.kit.planning.disk import DiskUse, disk_use
from stages.kit.planning.ladder import lowered_batch_size, settings
from stages.kit.planning.plan import Plan, resolve_plan
from stages.kit.planning.prediction import Prediction, in_gib
from stages.kit.training.batches import ConversationCollator
from stages.tasks import load_task
from tools.plan.available_inputs import AvailableBase, available_base, available_data
from tools.plan.recipe_memory import CheaperPlan, RecipeMemory


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A recipe's plan, and what predicts its memory."""

    plan: Plan
    base: AvailableBase
    predictor: MemoryPredictor
    disk: DiskUse
    batch: str
    """Source of the batch that the prediction is for, in words."""

    def predict(self, plan: Plan) -> Prediction:
        changed = ", ".join(f"{name} {value}" for name, value in settings(plan).items())
        with _console().status(f"{plan.recipe}: {changed}", spinner="line"):
            return self.predictor(plan)


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
    def verdict(self) -> str:
        return self.cheapest.verdict or "unknown"


class Previews:
    """The recipes of one profile, each predicted once."""

    def __init__(self, params: Params, *, in_file: str, exact: bool = False) -> None:
        """params: with the profile that is asked for active. in_file: the profile that params.yaml itself has active.
        exact: record every layer of the model, not a few."""
        self.params, self.in_file, self.exact = params, in_file, exact
        self.preview, self.judged = cache(self._preview), cache(self._judge)
        self._predictions: dict[str, Prediction] = {}
        self._answers: dict[tuple[object, ...], Prediction] = {}
        transformers.logging.set_verbosity_error()  # it warns of the stand-in's tokens

    def _preview(self, name: str) -> Preview:
        params, recipe = self.params, self.params.recipe(name)
        base, data_dir = available_base(params, name), available_data(params, recipe.data)
        config = load_config(base.config_dir)
        if base.build is not None:
            config = mixture_config(config, experts=len(base.build.experts), top_k=base.build.top_k)
        samples = load_task(recipe.task, "samples")
        samples.check(config.model_type, recipe.answer_format)
        if base.processor_dir is not None and data_dir is not None:
            records = samples.read_split(data_dir, "train")
            plan = resolve_plan(params, name, train_samples=len(records))
            processor = load_processor(base.processor_dir, plan.images)
            require_takes(processor, data_dir)
            batch_of = ConversationCollator.for_plan(plan, processor, records, samples).largest_batch
            batch = f"the largest samples of {data_dir}"
        else:
            plan = resolve_plan(params, name, train_samples=recipe.effective_batch)
            max_pixels = plan.images.max_pixels if plan.images else None
            processor = stand_in_processor(config, plan.images)
            batch_of = partial(stand_in_batch, config, max_length=plan.max_length, max_pixels=max_pixels)
            missing = "data" if data_dir is None else "tokenizer"
            limits = f"max_length {plan.max_length}" + (f" and max_pixels {max_pixels}" if max_pixels else "")
            batch = f"no {missing} yet: the worst within {limits}"
        predictor = MemoryPredictor(
            config=config, processor=processor, batch_of=batch_of, exact=self.exact, made=self._predictions
        )
        # The base of a recipe that continues another is not made yet.
        plan, _ = predictor.planned(replace(plan, base_dir=str(base.config_dir)), params.active.memory)
        return Preview(plan=plan, base=base, predictor=predictor, disk=disk_use(plan, params), batch=batch)

    def _judge(self, name: str, memory_gb: float | None) -> Judged:
        preview = self.preview(name)
        device, capacity_of = replace(preview.plan.device, memory_gb=memory_gb), preview.predictor.capacity_bytes
        prediction = preview.predict(preview.plan)
        fit = Fit(plan=preview.plan, prediction=prediction, capacity_bytes=capacity_of(device))
        if self.params.active.memory.fit == "fill":
            fit = fullest_fit(fit, preview.predict)
        on_one = replace(fit, capacity_bytes=capacity_of(device.one()))
        whole = answers_at_once(
            self.params.active.evaluation.batch_size,
            lambda size: self._evaluation(preview, on_one, size).prediction,
            on_one.capacity_bytes,
        )
        evaluation = self._evaluation(preview, on_one, whole)
        halved = [size for attempt in range(whole.bit_length()) if (size := lowered_batch_size(whole, attempt))]
        if evaluation.verdict == "does not fit" and self._evaluation(preview, on_one, 1).verdict == "does not fit":
            halved = []  # each size between takes seconds to predict
        fitting = (size for size in halved if self._evaluation(preview, on_one, size).verdict != "does not fit")
        return Judged(
            fit=fit,
            cheapest=cheapest_fit(fit, preview.predict),
            evaluation=evaluation,
            evaluation_batch_size=next(fitting, None),
        )

    def _evaluation(self, preview: Preview, fit: Fit, batch_size: int) -> Fit:
        plan = fit.plan
        key = (preview.base, preview.batch, plan.data_dir, plan.answer_format, plan.max_length, batch_size)
        if key not in self._answers:
            max_new_tokens = self.params.active.evaluation.max_new_tokens
            with _console().status(f"{plan.recipe}: evaluation, {batch_size} at once", spinner="line"):
                self._answers[key] = preview.predictor.answers(plan, batch_size, max_new_tokens=max_new_tokens)
        return replace(fit, prediction=self._answers[key])

    def recipe_memory(self, name: str, memory_gb: float | None) -> RecipeMemory:
        preview, judged = self.preview(name), self.judged(name, memory_gb)
        fit, cheapest = judged.fit, judged.cheapest
        return RecipeMemory(
            recipe=name,
            profile=self.params.profile,
            memory_gb=memory_gb,
            base=preview.base.source,
            batch=preview.batch,
            settings=settings(fit.plan),
            memory=fit.record(judged.evaluation),
            usable_gib=None if fit.capacity_bytes is None else in_gib(fit.capacity_bytes),
            cheapest=None
            if fit.verdict in (None, "fits")
            else CheaperPlan(
                changes=cheapest.changes,
                settings=settings(cheapest.plan),
                verdict=judged.verdict,
                total_gib=in_gib(cheapest.prediction.total_bytes),
            ),
            evaluation_batch_size=judged.evaluation_batch_size,
            after={parent: self.judged(parent, memory_gb).verdict for parent in self._needs(name)},
            disk=preview.disk,
            command=self.recipe_command(name, memory_gb),
        )

    def recipe_command(self, name: str, memory_gb: float | None) -> str | None:
        """Runs the evaluation of a recipe, or its training where the evaluation does not fit."""
        stage = "train" if self.judged(name, memory_gb).evaluation_batch_size is None else "evaluate"
        return self._command(f"{stage}@{name}", (*self._needs(name), name), memory_gb)

    def comparison_command(self, task: str, memory_gb: float | None) -> str | None:
        """Runs the comparison of a task; None where a training or an evaluation does not fit."""
        names = [name for name, recipe in self.params.recipes.items() if recipe.task == task]
        if any(self.judged(name, memory_gb).evaluation_batch_size is None for name in names):
            return None
        return self._command(f"compare@{task}", names, memory_gb)

    def _command(self, target: str, names: Iterable[str], memory_gb: float | None) -> str | None:
        """Runs a stage that all these recipes are trained for; None where one of them does not fit.

        In a temporary folder, so that params.yaml and the workspace stay as they are. `++` sets a value whether or not
        params.yaml has it.
        """
        judged = [self.judged(name, memory_gb) for name in names]
        if any(each.verdict == "does not fit" for each in judged):
            return None
        profile, active = self.params.profile, self.params.active
        changes = [f"profile={profile}"] if profile != self.in_file else []
        if memory_gb != active.device.memory_gb:
            added = "++" if active.device.memory_gb is None else ""
            changes.append(f"{added}profiles.{profile}.device.memory_gb={memory_gb:g}")
        if active.memory.fit not in ("auto", "fill") and any(each.cheapest.changes for each in judged):
            changes.append(f"++profiles.{profile}.memory.fit=auto")
        return " ".join(["dvc exp run --temp", *(f"-S {change}" for change in changes), target])

    def _needs(self, name: str) -> tuple[str, ...]:
        """The recipes that have to be trained before this one, the first one first."""
        recipe = self.params.recipe(name)
        parent, build = recipe.base_recipe(), recipe.base_build()
        parents = (parent,) if parent else self.params.build(build).recipes if build else ()
        return tuple(dict.fromkeys(each for parent in parents for each in (*self._needs(parent), parent)))


def _console() -> Console:
    return Console(stderr=True, force_jupyter=False)  # in a notebook it would ask for ipywidgets
