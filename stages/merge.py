"""Merge trained weights into their base, and certify the result by reloading it from disk.

An adapter that was trained on 4-bit weights is merged into the unquantized ones. Both models then answer some
validation samples, and the certificate records what the difference costs.

Reads   data/runs/RECIPE/trained/ and the base, which must be the one that its lineage names; the prepared data;
        data/runs/RECIPE/training/training.json
Writes  data/runs/RECIPE/merged/     a standard Hugging Face folder, lineage.json; without the weights, once certified,
                                     if models.keep_merged is false and nothing starts from them
        data/runs/RECIPE/merge.json  the certificate
        data/report/TASK/memory/RECIPE/merge.json  the process memory
Run     docker/run merge r1-llm-only

Exits with code 79 on out-of-memory; the launcher restarts it with half the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stages.core.atomic import atomic_folder
from stages.core.errors import configure_logging
from stages.core.lineage import require_base, short
from stages.core.params import load_params
from stages.core.params.schema import EvaluationParams, made_by
from stages.core.records import rebuild
from stages.core.tasks import load_task
from stages.evaluation.generate import TextGenerator, batch_size_for
from stages.evaluation.score import Scored, Task, summary
from stages.models.adapters import load_trained
from stages.models.certificate import QuantizationCost
from stages.models.load import gpus_in_use, limit_visible_gpus, load_model
from stages.models.merge import merge_certified, probe_logits, relative_deviation
from stages.models.prompts import Processor, accepts, load_processor
from stages.planning.ladder import MAX_BATCH_SIZE
from stages.planning.memory_use import MemoryLog, recognised_out_of_memory
from stages.planning.plan import Plan, read_plan
from stages.training.records import TrainingSummary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("stages")

SCORED_SAMPLES = 32
"""Validation samples of a model trained in 4 bits that are scored before and after its merge, to measure its cost."""


@click.command(help=__doc__)
@click.argument("recipe")
@click.option("--attempt", type=click.IntRange(min=0), default=0, help="Times to halve the batch.  [default: 0]")
@recognised_out_of_memory()
def main(recipe: str, attempt: int) -> None:
    configure_logging(f"merge {recipe}")
    plan, params = read_plan(recipe), load_params()
    limit_visible_gpus(device := plan.device.one())
    base_dir, run_dir = Path(plan.base_dir), Path("data/runs") / recipe
    fix, fix_base = rebuild(f"train@{recipe}"), rebuild(made_by(plan.base_dir.removeprefix("data/")))
    trained_dir = run_dir / "trained"
    trained, base = require_base(trained_dir, base_dir, fix=fix, fix_base=fix_base)
    quantization = TrainingSummary.read(run_dir / "training/training.json", fix=fix).quantization
    processor = load_processor(base_dir, plan.images, plan.recipe.template_options)
    samples = load_task(plan.recipe.task, "samples")
    probes = [probe for probe in samples.probes(plan.recipe.answer_format) if accepts(processor, probe)]
    memory = MemoryLog(gpus_in_use(device))

    def load(folder: Path, quantization: str = "none") -> PreTrainedModel:
        model = load_model(folder, device=device, precision=plan.memory.precision, quantization=quantization).eval()
        memory.loaded()
        return model

    with atomic_folder(run_dir / "merged") as merged_dir:
        certificate, merged, logits = merge_certified(
            plan,
            {"base": (base_dir, base), "trained": (trained_dir, trained)},
            merged_dir,
            processor,
            probes,
            load=load,
            keep_weights=params.leaves_weights(recipe),
            trained_quantization=quantization,
        )
        if quantization != "none":
            from peft import PeftModel

            task, generator_of = scored_samples(plan, params.active.evaluation, processor, attempt)
            ours = task.score(generator_of(merged))
            del merged  # the next model needs its memory
            quantized = load(base_dir, quantization)
            untrained_logits = probe_logits(quantized, processor, probes)
            adapted = load_trained(quantized, trained_dir).eval()
            assert isinstance(adapted, PeftModel), "weights in 4 bits are trained by adapters alone"
            deviation = relative_deviation(logits, probe_logits(adapted, processor, probes), untrained_logits)
            generator = generator_of(adapted.get_base_model())
            cost = quantization_cost(deviation, ours, task.score(generator), generator.batch_size)
            certificate = replace(certificate, quantization_cost=cost)
            log.info("trained on %s weights: %s", quantization, summary(cost.trained, task.scoring))
            log.info("merged into unquantized ones: %s; %s", summary(cost.merged, task.scoring), cost)
    certificate.write(run_dir / "merge.json")
    memory.write("merge", recipe, task=plan.recipe.task)
    log.info("merged %s, content %s: %s", recipe, short(certificate.merged_digest), certificate)


def quantization_cost(deviation: float, merged: Scored, trained: Scored, batch_size: int) -> QuantizationCost:
    """Compare a merged model with what was trained, an adapter on a quantized base.

    deviation: of their logits. merged, trained: their scores, in batches of `batch_size`.
    """
    return QuantizationCost(
        logit_deviation=deviation if isfinite(deviation) else None,
        samples=len(merged.completions),
        batch_size=batch_size,
        same_completions=sum(map(eq, merged.completions, trained.completions)),
        trained=trained.metrics,
        merged=merged.metrics,
    )


def scored_samples(
    plan: Plan, settings: EvaluationParams, processor: Processor, attempt: int
) -> tuple[Task, Callable[[PreTrainedModel], TextGenerator]]:
    """The task with the first SCORED_SAMPLES validation samples, and the function that makes their generator of a
    model."""
    records = load_task(plan.recipe.task, "samples").read_split(Path(plan.data_dir), "val")[:SCORED_SAMPLES]
    task = Task(name=plan.recipe.task, answer_format=plan.recipe.answer_format, records=records)
    return task, lambda model: TextGenerator(
        model=model,
        processor=processor,
        samples=task.samples,
        answer_format=task.answer_format,
        batch_size=batch_size_for(settings, len(records), largest=MAX_BATCH_SIZE, attempt=attempt),
        settings=settings,
    )


if __name__ == "__main__":
    main()
