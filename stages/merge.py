"""Merge what was trained into its base, and certify the result by reloading it from disk.

An adapter that was trained on weights in 4 bits is merged into the unquantized ones. Both models then answer some
validation samples, and the certificate records what the difference costs.

Reads   data/runs/RECIPE/trained/ and the base, which must be the one that its lineage names; the prepared data;
        data/runs/RECIPE/training/training.json
Writes  data/runs/RECIPE/merged/     a standard Hugging Face folder, lineage.json; without the weights, once certified,
                                     where models.keep_merged is false and nothing starts from them
        data/runs/RECIPE/merge.json  the certificate
        data/report/TASK/memory/RECIPE/merge.json  what the process held
Run     docker/run merge r1-llm-only

Ends with a code of its own where memory runs out; the launcher then starts it anew, each attempt with half the batch.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from math import isfinite
from operator import eq
from pathlib import Path

import click
from peft import PeftModel
from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.core.lineage import combined_digest, require_base, short, write_lineage
from stages.core.logs import configure_logging
from stages.core.params.load import load_params
from stages.core.params.schema import made_by
from stages.core.publish import publish_json, published
from stages.kit.evaluation.answering import Answerer, batch_size_for
from stages.kit.evaluation.generation import completion_of
from stages.kit.evaluation.scored import Scored, score_answers
from stages.kit.memory_use import MemoryLog, recognised_out_of_memory, write_stage_memory
from stages.kit.models.adapters import apply_recipe, load_trained, trained_modules
from stages.kit.models.certificate import TOLERANCE, MergeCertificate, QuantizationCost
from stages.kit.models.folders import remove_weights
from stages.kit.models.load import gpus_in_use, load_model, meta_model, see_only
from stages.kit.models.merge import (
    changed_modules,
    merge_trained,
    probe_logits,
    relative_deviation,
    same_inputs,
    weight_digests,
)
from stages.kit.models.prompts import load_processor, takes
from stages.kit.models.shards import MAX_SHARD_SIZE
from stages.kit.planning.plan import read_plan
from stages.kit.training.record import read_record
from stages.tasks import load_task

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("recipe")
@click.option("--attempt", type=click.IntRange(min=0), default=0, help="Times to halve the batch.  [default: 0]")
@recognised_out_of_memory()
def main(recipe: str, attempt: int) -> None:
    configure_logging(f"merge {recipe}")
    plan, params = read_plan(recipe), load_params()
    settings = params.active.evaluation
    device = plan.device.one()
    see_only(device)
    run_dir, base_dir = Path("data/runs") / recipe, Path(plan.base_dir)
    trained_lineage, base_lineage = require_base(
        run_dir / "trained",
        base_dir,
        fix=f"dvc repro -f -s train@{recipe}",
        fix_base=f"dvc repro -f -s {made_by(plan.base_dir.removeprefix('data/'))}",
    )
    quantization = read_record(run_dir / "training/training.json").quantization
    samples, scoring = load_task(plan.task, "samples"), load_task(plan.task, "scoring")
    processor = load_processor(base_dir, plan.images)
    probes = [probe for probe in samples.probes(plan.answer_format) if takes(processor, probe)]
    load = partial(load_model, device=device, precision=plan.precision)

    memory = MemoryLog(gpus_in_use(device))
    base = load(base_dir)
    memory.loaded()
    before, base_logits = weight_digests(base), probe_logits(base.eval(), processor, probes)
    adapted = load_trained(base, run_dir / "trained").eval()
    adapted_logits = probe_logits(adapted, processor, probes)

    with published(run_dir / "merged") as merged_dir:
        merge_trained(adapted).save_pretrained(merged_dir, safe_serialization=True, max_shard_size=MAX_SHARD_SIZE)
        processor.save_pretrained(merged_dir)
        del base, adapted

        merged = load(merged_dir).eval()
        memory.loaded()
        merged_logits = probe_logits(merged, processor, probes)
        deviation = relative_deviation(merged_logits, adapted_logits, base_logits)
        digests = weight_digests(merged)
        changed = changed_modules(before, digests)
        expected = trained_modules(apply_recipe(meta_model(merged.config), plan.parts, plan.lora, plan.full_targets))
        processor_parity = same_inputs(load_processor(merged_dir, None), processor, probes)
        if not params.leaves_weights(recipe):
            remove_weights(merged_dir)
        lineage = write_lineage(
            merged_dir,
            kind="merged",
            name=recipe,
            parents={"base": (base_dir, base_lineage), "trained": (run_dir / "trained", trained_lineage)},
        )
        certificate = MergeCertificate(
            recipe=recipe,
            merged_digest=lineage.digest,
            weights_digest=combined_digest(digests),
            logit_deviation=deviation,
            tolerance=TOLERANCE[plan.precision],
            probes=len(probes),
            changed_modules=len(changed),
            unexpected_modules=sorted(changed - expected),
            unchanged_modules=sorted(expected - changed),
            processor_parity=processor_parity,
            precision=plan.precision,
            trained_quantization=quantization,
        )
        if problems := certificate.problems():
            raise UserError(f"the merge of {recipe} is not what was trained: {'; '.join(problems)}")
        if quantization != "none":
            records = samples.read_split(Path(plan.data_dir), "val")[: settings.quantization_samples]
            questions = [
                samples.conversation(record, answered=False, answer_format=plan.answer_format) for record in records
            ]
            batch_size = batch_size_for(questions, base_dir, params.active, attempt=attempt)

            def scored(model: PreTrainedModel) -> Scored:
                answerer = Answerer(
                    model=model,
                    processor=processor,
                    complete=completion_of(samples, plan.answer_format),
                    batch_size=batch_size,
                    settings=settings,
                    memory=memory,
                )
                return score_answers(answerer, records, questions, samples, scoring, answer_format=plan.answer_format)

            after_merge = scored(merged)
            del merged
            base = load(base_dir, quantization=quantization).eval()
            base_logits = probe_logits(base, processor, probes)
            trained = load_trained(base, run_dir / "trained").eval()
            assert isinstance(trained, PeftModel), "weights in 4 bits are trained by adapters alone"
            trained_logits = probe_logits(trained, processor, probes)
            quantization_deviation = relative_deviation(merged_logits, trained_logits, base_logits)
            before_merge = scored(trained.get_base_model())
            cost = QuantizationCost(
                logit_deviation=quantization_deviation if isfinite(quantization_deviation) else None,
                samples=len(records),
                batch_size=batch_size,
                same_answers=sum(map(eq, after_merge.answers, before_merge.answers)),
                trained=before_merge.metrics,
                merged=after_merge.metrics,
            )
            certificate = replace(certificate, quantization_cost=cost)
            log.info("trained on %s weights: %s", quantization, scoring.summary(cost.trained))
            log.info("merged into unquantized ones: %s; %s", scoring.summary(cost.merged), cost)
    publish_json(certificate, run_dir / "merge.json")
    write_stage_memory(memory.finish("merge", recipe), task=plan.task)
    log.info(
        "merged %s, content %s: %d modules changed, logits off by %.1e of what training changed (tolerance %g)",
        *(recipe, short(lineage.digest), len(changed), deviation, certificate.tolerance),
    )


if __name__ == "__main__":
    main()
