"""Validation while training: the loss and the task's score of samples that a model is not trained on.

Trainer decides when, and logs and reports the figures as its own. What follows from them (training/records.py: the best
step, and when to stop) is read from its log alone, which every checkpoint has, so a resumed training decides as any
other.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from statistics import fmean

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from stages.core.errors import UserError, pluralize
from stages.core.params.schema import EvaluationParams
from stages.core.tasks import load_task
from stages.evaluation.generate import TextGenerator
from stages.evaluation.score import Task
from stages.internals.transformers_internals import attending_by, on_device
from stages.models.kernels import PACKED_ATTENTION
from stages.models.prompts import Processor, count_tokens
from stages.planning.plan import Plan
from stages.training.batches import ConversationCollator
from stages.training.records import LOSS, SCORE
from stages.training.trainer import RecipeTrainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Validator:
    """Measures a trainer's model. Every process of a training does the same; the first one's figures count."""

    collator: ConversationCollator
    """It makes batches of all records of the split."""
    chosen: Sequence[int]
    """Numbers of the samples to compute the loss of, the same at each validation."""
    score: Callable[[PreTrainedModel], float] | None
    """The mean score of a model's completions of the first of them, larger for a better model; None without
    completions."""

    @classmethod
    def for_plan(cls, plan: Plan, processor: Processor) -> Validator:
        """The validator of a plan, which generates and scores completions as `evaluate` does."""
        wanted, samples = plan.validation, load_task(plan.recipe.task, "samples")
        assert wanted is not None
        records = samples.read_split(Path(plan.data_dir), wanted.split)
        collator = ConversationCollator.for_plan(plan, processor, records, samples)
        chosen = choose_samples(collator, plan)
        asked = [collator.records[number] for number in chosen[: wanted.score_samples]]
        log.info("validates on %s of %s, completes %d", pluralize(len(chosen), "sample"), wanted.split, len(asked))
        task = Task(name=plan.recipe.task, answer_format=plan.recipe.answer_format, records=asked)

        def score(model: PreTrainedModel) -> float:
            generator = TextGenerator(
                model=model,
                processor=processor,
                samples=task.samples,
                answer_format=task.answer_format,
                batch_size=plan.memory.micro_batch,
                settings=EvaluationParams(max_new_tokens=wanted.max_new_tokens, max_length=wanted.max_length),
            )
            rows = task.score(generator).rows
            return fmean(row[task.scoring.ordered_by(record)] for record, row in zip(asked, rows, strict=True))

        return cls(collator=collator, chosen=chosen, score=score if asked else None)

    def __call__(self, trainer: RecipeTrainer) -> dict[str, float]:
        """trainer: with its model in evaluation mode."""
        with torch.no_grad():
            figures = {LOSS: self._loss(trainer)}
        if self.score is not None and isfinite(figures[LOSS]):
            with generating(trainer) as model:
                figures[SCORE] = self.score(model)
        elif self.score is not None:
            figures[SCORE] = nan  # no completion could be scored
        return figures

    def _loss(self, trainer: RecipeTrainer) -> float:
        """The mean over the tokens that count, by the loss of a training step of all samples."""
        total = tokens = 0.0
        size = trainer.plan.memory.micro_batch
        for first in range(0, len(self.chosen), size):
            batch = self.collator([{"sample": number} for number in self.chosen[first : first + size]])
            [batch], count = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
            with trainer.compute_loss_context_manager():
                mean = trainer.compute_loss(trainer.model, on_device(trainer, batch), num_items_in_batch=count)
            total += mean.item() * count.item()
            tokens += count.item()
        return total / tokens


def choose_samples(collator: ConversationCollator, plan: Plan) -> tuple[int, ...]:
    """Samples to validate on, drawn from all that are not too long, always the same.

    Raises UserError if all are too long.
    """
    assert plan.validation is not None
    max_length = plan.recipe.max_length
    order = random.Random(0).sample(range(len(collator.records)), len(collator.records))
    chosen: list[int] = []
    for number in order:
        conversation = collator.converse(collator.records[number])
        if count_tokens(collator.processor, conversation, max_length=max_length) <= max_length:
            chosen.append(number)
        if len(chosen) == plan.validation.samples:
            break
    if not chosen:
        raise UserError(
            f"every sample of {plan.data_dir}/{plan.validation.split}.parquet has more than {max_length} tokens; "
            f"raise recipes.{plan.name}.max_length, or train without validation: recipes.{plan.name}.validation: "
        )
    return tuple(chosen)


@contextmanager
def generating(trainer: RecipeTrainer) -> Iterator[PreTrainedModel]:
    """The model below the trainer's wrappers, its adapters in place, as it can generate: attention that takes padding,
    in the precision of the training."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    with attending_by(base, "sdpa", instead_of=PACKED_ATTENTION), trainer.accelerator.autocast():
        yield base
