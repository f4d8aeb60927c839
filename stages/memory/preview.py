"""A recipe's plan and its predicted memory, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from transformers import PreTrainedConfig

from stages.core.environment import instruction_set
from stages.core.families import require_precision, unlisted_words
from stages.core.params.schema import Params
from stages.core.records import refusal
from stages.core.tasks import answer_format_problems
from stages.data.conversation import Conversation
from stages.data.guards import GUARDS_DIR, read_guard
from stages.data.near import require_untrained
from stages.memory.fakes import fake_batch, fake_processor
from stages.memory.fit import Fit, fitting_batch_size
from stages.memory.predict import BatchOf, MemoryPredictor, capacity_bytes
from stages.models.prompts import Processor, check_carried, load_processor, require_answer_room
from stages.planning.plan import Plan
from stages.planning.resolve import resolve_plan
from stages.training.batches import ConversationCollator


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A recipe's plan as its profile has it, and the predictor for the plans that may replace it."""

    params: Params
    fit: Fit
    predict: MemoryPredictor
    lengths: Sequence[int]
    """Lengths of the training samples in tokens, the longest first; none without data."""
    notes: tuple[str, ...]
    """Lengths of the samples, and the choices that make the plan faster, a line each."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line on an architecture without an entry, and one on a precision that this CPU emulates."""
        plan = self.fit.plan
        return tuple(filter(None, (unlisted_words(plan.model_type or ""), emulation_words(plan))))

    @property
    def overrides(self) -> tuple[str, ...]:
        """A line for each setting that the profile has otherwise than the recipe."""
        plan, wanted = self.fit.plan, self.params.recipe(self.fit.plan.name)
        found: dict[str, tuple[object, object]] = {
            "quantization": (plan.quantization, wanted.quantization),
            "epochs": (plan.schedule.epochs, wanted.epochs),
        }
        if plan.validation and wanted.validation:
            found["validation.samples"] = plan.validation.samples, wanted.validation.samples
        return tuple(
            f"{name}: {planned}, by profile {plan.profile}; the recipe says {asked}"
            for name, (planned, asked) in found.items()
            if planned != asked
        )

    def evaluation(self, fit: Fit) -> tuple[Fit, int]:
        """The evaluation of what a plan trains, on one device, and its batch size."""
        settings = self.params.active.evaluation
        predict = partial(self.predict.generation, fit.plan, max_new_tokens=settings.max_new_tokens)
        capacity = capacity_bytes(fit.plan.device.one())
        batch_size = fitting_batch_size(settings.batch_size, predict, capacity)
        return Fit(plan=fit.plan, prediction=predict(batch_size), capacity_bytes=capacity), batch_size


def preview(
    params: Params,
    recipe: str,
    config: PreTrainedConfig,
    samples: ModuleType,
    *,
    base_dir: Path,
    has_data: bool = True,
    **options: Any,
) -> Preview:
    """config: the base's. samples: the task's module of that name. base_dir: the folder of the base's config, and with
    data of its tokenizer. options: MemoryPredictor's.

    Raises UserError if base, data and recipe do not go together.
    """
    samples.check(config.model_type)
    if wrong := answer_format_problems(samples, params.recipe(recipe), f"recipes.{recipe}"):
        raise refusal(Path("params.yaml"), wrong)
    require_precision(config.model_type, params.active.memory.precision)
    inputs = with_data(params, recipe, samples, base_dir, config) if has_data else without_data(params, recipe, config)
    plan, processor, batch_of, lengths, notes, guard = inputs
    options |= {"guard": guard, "likelihoods": bool(guard) or hasattr(samples, "candidates")}
    predict = MemoryPredictor(config=config, processor=processor, batch_of=batch_of, **options)
    plan, choices = predict.completed(
        replace(plan, base_dir=str(base_dir), model_type=config.model_type), params.active.memory
    )
    fit = Fit(plan=plan, prediction=predict(plan), capacity_bytes=capacity_bytes(plan.device))
    return Preview(params=params, fit=fit, predict=predict, lengths=lengths, notes=(*notes, *choices))


def emulation_words(plan: Plan) -> str:
    """Advice if a CPU emulates the plan's precision, as it is held to AVX2; otherwise ""."""
    if plan.on_gpu or plan.memory.precision == "fp32" or not (plan.instructions or "").startswith("avx2"):
        return ""
    return (
        f"{plan.memory.precision} is emulated with AVX2, some thirty times slower than fp32; set memory.precision to "
        "fp32, or memory.instructions to native if this CPU has AVX512_BF16 or AMX"
    )


Inputs: TypeAlias = tuple[Plan, Processor, BatchOf, list[int], tuple[str, ...], list[Conversation]]
"""Plan, processor, largest batches, lengths, notes, and the rows of guards that are prepared."""


def with_data(params: Params, recipe: str, samples: ModuleType, base_dir: Path, config: PreTrainedConfig) -> Inputs:
    """Raises UserError for data that the base cannot learn, or that a guard has too."""
    data_dir = Path("data/prepared") / params.recipe(recipe).data
    records = samples.read_split(data_dir, "train")
    facts: Any = {"has_selection": (data_dir / "selection.parquet").is_file()}
    resolved = partial(resolve_plan, params, recipe, instructions=instruction_set(os.environ), **facts)
    plan = resolved(train_samples=len(records))
    processor = load_processor(base_dir, plan.images, plan.recipe.template_options)
    collator = ConversationCollator.for_plan(replace(plan, base_dir=str(base_dir)), processor, records, samples)
    lengths = collator.length_summary()
    if left_out := len(records) - len(collator.records):
        plan, lengths = resolved(train_samples=len(collator.records)), f"{lengths}; {left_out:,} longer ones left out"
    limit, setting = params.active.evaluation.max_new_tokens, f"profiles.{params.profile}.evaluation.max_new_tokens"
    references = [collator.converse(each) for each in samples.read_split(data_dir, "val")]
    check_carried(processor, references)
    collator.require_positions(config, references, params.active.evaluation.max_length)
    room = require_answer_room(processor, references, limit, setting)
    guards = {name: read_guard(name) for name in params.guards if (GUARDS_DIR / name).is_dir()}
    trained = [collator.converse(each) for each in records] if guards else []
    notes = (lengths, room, *(line for each in guards.items() for line in require_untrained(*each, trained)))
    longest_first = sorted(collator.lengths, reverse=True)
    return plan, processor, collator.largest_batch, longest_first, notes, list(chain(*guards.values()))


def without_data(params: Params, recipe: str, config: PreTrainedConfig) -> Inputs:
    """The largest batches are those within the plan's limits. One step stands for the training."""
    facts: Any = {"has_selection": params.data.selection > 0, "instructions": instruction_set(os.environ)}
    plan = resolve_plan(params, recipe, train_samples=params.recipe(recipe).effective_batch, **facts)
    limits: Any = {"max_length": plan.recipe.max_length, "max_pixels": plan.images.max_pixels if plan.images else None}
    return plan, fake_processor(config, plan.images), partial(fake_batch, config, **limits), [], (), []
