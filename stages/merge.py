"""Merge what was trained into its base, and certify the result by reloading it from disk.

Reads   data/runs/RECIPE/trained/ and the base, which must be the one that its lineage names;
        data/runs/RECIPE/training/training.json
Writes  data/runs/RECIPE/merged/     a standard Hugging Face folder, lineage.json
        data/runs/RECIPE/merge.json  the certificate
        data/report/TASK/memory/RECIPE/merge.json  what the process held
Run     docker/run merge r1-llm-only
"""

from __future__ import annotations

import logging
from pathlib import Path

import click

from stages.kit.errors import UserError
from stages.kit.lineage import require_base, short, write_lineage
from stages.kit.logs import configure_logging
from stages.kit.memory.held import write_stage_memory
from stages.kit.memory.memory_log import MemoryLog
from stages.kit.models.certificate import TOLERANCE, Certificate, write_certificate
from stages.kit.models.load import load_model, meta_model, see_only
from stages.kit.models.parts import apply_recipe, trained_modules
from stages.kit.models.probes import changed_modules, probe_logits, relative_deviation, same_inputs, weight_digests
from stages.kit.models.processors import load_processor
from stages.kit.models.trained import load_trained, merge_trained
from stages.kit.params.schema import made_by
from stages.kit.plan import read_plan
from stages.kit.publish import published
from stages.kit.training.record import read_record
from stages.tasks import load_task

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("recipe")
def main(recipe: str) -> None:
    configure_logging(f"merge {recipe}")
    plan = read_plan(recipe)
    device = plan.device.one()
    see_only(device)
    run_dir, base_dir = Path("data/runs") / recipe, Path(plan.base_dir)
    trained_lineage, base_lineage = require_base(
        run_dir / "trained",
        base_dir,
        mend=f"dvc repro -f -s train@{recipe}",
        mend_base=f"dvc repro -f -s {made_by(plan.base_dir.removeprefix('data/'))}",
    )
    probes = load_task(plan.task, "samples").probes(plan.target)
    processor = load_processor(base_dir, plan.images)

    memory = MemoryLog(device)
    base = load_model(base_dir, device=device, precision=plan.precision)
    memory.loaded()
    before, base_logits = weight_digests(base), probe_logits(base.eval(), processor, probes)
    adapted = load_trained(base, run_dir / "trained").eval()
    adapted_logits = probe_logits(adapted, processor, probes)

    with published(run_dir / "merged") as merged_dir:
        merge_trained(adapted).save_pretrained(merged_dir, safe_serialization=True)
        processor.save_pretrained(merged_dir)
        lineage = write_lineage(
            merged_dir,
            kind="merged",
            name=recipe,
            parents={"base": (base_dir, base_lineage), "trained": (run_dir / "trained", trained_lineage)},
        )
        del base, adapted

        merged = load_model(merged_dir, device=device, precision=plan.precision).eval()
        memory.loaded()
        deviation = relative_deviation(probe_logits(merged, processor, probes), adapted_logits, base_logits)
        changed = changed_modules(before, weight_digests(merged))
        expected = trained_modules(apply_recipe(meta_model(merged.config), plan.parts, plan.lora, plan.full_targets))
        certificate = Certificate(
            recipe=recipe,
            merged_digest=lineage.digest,
            logit_deviation=deviation,
            tolerance=TOLERANCE[plan.precision],
            probes=len(probes),
            changed_modules=len(changed),
            unexpected_modules=sorted(changed - expected),
            unchanged_modules=sorted(expected - changed),
            processor_parity=same_inputs(load_processor(merged_dir, None), processor, probes),
            precision=plan.precision,
            trained_quantization=read_record(run_dir / "training/training.json").quantization,
        )
        if problems := certificate.problems():
            raise UserError(f"the merge of {recipe} is not what was trained: {'; '.join(problems)}")
    write_certificate(certificate, run_dir / "merge.json")
    write_stage_memory(memory.finish("merge", recipe), task=plan.task)
    log.info(
        "merged %s, content %s: %d modules changed, logits off by %.1e of what training changed (tolerance %g)",
        *(recipe, short(lineage.digest), len(changed), deviation, certificate.tolerance),
    )


if __name__ == "__main__":
    main()
