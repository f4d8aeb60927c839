"""A recipe's plan and its predicted memory, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import PreTrainedConfig

from stages.core.environment import instruction_set
from stages.core.families import require_precision, unlisted_words
from stages.core.params.schema import Params
from stages.core.tasks import require_answer_format
from stages.memory.fit import Fit, fitting_batch_size
from stages.memory.predict import MemoryPredictor, capacity_bytes
from stages.memory.stand_in import stand_in_batch, stand_in_processor
from stages.models.prompts import check_carried, load_processor, require_answer_room, require_image_model
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
    data of its tokenizer. has_data: without, the largest batch within the plan's limits stands in. options:
    MemoryPredictor's.

    Raises UserError if base, data and recipe do not go together.
    """
    wanted, memory = params.recipe(recipe), params.active.memory
    notes, lengths = [note for note in (unlisted_words(config.model_type),) if note], []
    samples.check(config.model_type)
    require_answer_format(samples, wanted.answer_format, f"recipes.{recipe}.answer_format")
    require_precision(config.model_type, memory.precision)
    data_dir = Path("data/prepared") / wanted.data
    records = samples.read_split(data_dir, "train") if has_data else None
    train_samples = wanted.effective_batch if records is None else len(records)
    has_selection = (data_dir / "selection.parquet").is_file() if has_data else params.data.selection > 0
    facts: Any = {"has_selection": has_selection, "instructions": instruction_set(os.environ)}
    plan = resolve_plan(params, recipe, train_samples=train_samples, **facts)
    plan = replace(plan, base_dir=str(base_dir))
    if records is None:
        processor = stand_in_processor(config, plan.images)
        limits: Any = {"max_length": plan.max_length, "max_pixels": plan.images.max_pixels if plan.images else None}
        batch_of: Any = partial(stand_in_batch, config, **limits)
    else:
        processor = load_processor(base_dir, plan.images, plan.template_options)
        collator = ConversationCollator.for_plan(plan, processor, records, samples)
        require_image_model(processor, data_dir)
        collator.require_positions(config)
        notes.append(collator.length_summary())
        limit, setting = params.active.evaluation.max_new_tokens, f"profiles.{params.profile}.evaluation.max_new_tokens"
        references = [collator.converse(each) for each in samples.read_split(data_dir, "val")]
        check_carried(processor, references)
        notes.append(require_answer_room(processor, references, limit, setting))
        lengths = sorted(collator.lengths, reverse=True)
        batch_of = collator.largest_batch
    predict = MemoryPredictor(config=config, processor=processor, batch_of=batch_of, **options)
    plan, choices = predict.completed(plan, memory)
    fit = Fit(plan=plan, prediction=predict(plan), capacity_bytes=capacity_bytes(plan.device))
    return Preview(params=params, fit=fit, predict=predict, lengths=lengths, notes=(*notes, *choices))
