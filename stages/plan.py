"""Resolve every setting of a recipe on the active profile, and predict whether it fits.

Reads   params.yaml; the base's config and processor; the prepared data, of which the largest samples count
Writes  data/runs/RECIPE/plan.yaml     every setting, as train takes it
        data/runs/RECIPE/memory.json   the predicted memory, by what it is spent on, and the verdict
Run     docker/run plan r1-llm-only
"""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import click

from stages.core.environment import instruction_set
from stages.core.errors import bytes_text, configure_logging
from stages.core.params import load_params
from stages.kit.families import require_precision
from stages.kit.memory.budget import budget_lines
from stages.kit.memory.fit import Fit, answers_at_once, decide
from stages.kit.memory.predict import MemoryPredictor
from stages.kit.models.adapters import TrainableCounts
from stages.kit.models.folders import require_weights
from stages.kit.models.load import load_config
from stages.kit.models.prompts import load_processor, require_takes
from stages.kit.planning.plan import resolve_plan
from stages.kit.training.batches import ConversationCollator
from stages.tasks import load_task

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("recipe")
def main(recipe: str) -> None:
    configure_logging(f"plan {recipe}")
    params = load_params()
    wanted, memory = params.recipe(recipe), params.active.memory
    samples = load_task(wanted.task, "samples")
    records = samples.read_split(Path("data/prepared") / wanted.data, "train")
    plan = resolve_plan(params, recipe, train_samples=len(records), instructions=instruction_set(os.environ))
    require_weights(Path(plan.base_dir))
    config = load_config(Path(plan.base_dir))
    samples.check(config.model_type, wanted.answer_format)
    require_precision(config.model_type, plan.precision)
    processor = load_processor(Path(plan.base_dir), plan.images)
    collator = ConversationCollator.for_plan(plan, processor, records, samples)
    log.info("%s", collator.length_summary())
    require_takes(processor, Path(plan.data_dir))
    predict = MemoryPredictor(config=config, processor=processor, batch_of=collator.largest_batch)

    plan, chosen = predict.planned(plan, memory)
    for line in chosen:
        log.info("%s", line)
    fit = Fit(plan=plan, prediction=predict(plan), capacity_bytes=predict.capacity_bytes(plan.device))
    fit = decide(fit, predict, memory.fit)
    settings = params.active.evaluation
    predict_answers = partial(predict.answers, fit.plan, max_new_tokens=settings.max_new_tokens)
    capacity = predict.capacity_bytes(plan.device.one())
    at_once = answers_at_once(settings.batch_size, predict_answers, capacity)
    answers = predict_answers(at_once)
    evaluation = Fit(plan=fit.plan, prediction=answers, capacity_bytes=capacity)
    run_dir = Path("data/runs") / recipe
    fit.plan.write(run_dir / "plan.yaml")
    fit.record(evaluation).write(run_dir / "memory.json")
    report(fit)
    fits = evaluation.verdict in (None, "fits")
    halved = "" if fits else f": {evaluation.verdict}; it halves its batch until it does"
    log.info("evaluation takes %.2f GiB, %d at once%s", answers.total_bytes / 2**30, at_once, halved)
    if wanted.quantization != fit.plan.quantization:
        log.info("quantization %s, as profile %s says", fit.plan.quantization, plan.profile)


def report(fit: Fit) -> None:
    schedule = fit.plan.schedule
    log.info("%s", TrainableCounts(**fit.plan.trainable))
    log.info(
        "%d samples, %d steps of %d (micro-batch %d x %d)",
        *(schedule.train_samples, schedule.num_steps, schedule.effective_batch),
        *(schedule.micro_batch, schedule.grad_accumulation),
    )
    if fit.plan.features_bytes:
        size = bytes_text(fit.plan.features_bytes)
        log.info("vision tower and projector are frozen: features of pictures are kept, at most %s of disk", size)
    for change in fit.changes:
        log.info("to fit the GPU: %s", change)
    short = fit.verdict is None or (fit.verdict == "fits" and fit.plan.device.kind == "cpu")
    for line in (fit.prediction.summary(),) if short else budget_lines(fit.prediction, fit.capacity_bytes):
        log.info("%s", line)


if __name__ == "__main__":
    main()
