"""Build a mixture of experts from dense models of one base, and certify it by reloading it from disk.

Reads   builds.NAME; its base; data/runs/RECIPE/merged/ of each of its experts
Writes  data/builds/NAME/       a standard Qwen2Moe folder, a base like any other; lineage.json
        data/builds/NAME.json   the certificate: what each expert is within it, and where tokens go
        data/report/TASK/memory/NAME/build.json  what the process held
Run     docker/run build NAME
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import click
from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.core.lineage import short, verified_lineage, write_lineage
from stages.core.logs import configure_logging
from stages.core.params.load import load_params
from stages.core.params.schema import ExpertParams, RecipeParams, made_by
from stages.core.publish import publish_json, published
from stages.kit.data.conversation import Conversation
from stages.kit.memory_use import MemoryLog, write_stage_memory
from stages.kit.mixture.certificate import TOLERANCE, BuildCertificate, Change
from stages.kit.mixture.experts import check_lineages, check_models
from stages.kit.mixture.merge import merge_experts
from stages.kit.mixture.routing import measure_domains
from stages.kit.models.folders import require_weights
from stages.kit.models.load import gpus_in_use, load_model, see_only
from stages.kit.models.prompts import load_processor
from stages.tasks import load_task

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("name")
def main(name: str) -> None:
    configure_logging(f"build {name}")
    params = load_params()
    build, precision = params.build(name), params.active.memory.precision
    device = params.active.device.one()
    see_only(device)
    base_dir = Path("data") / build.base
    expert_dirs = {expert: Path("data/runs") / expert / "merged" for expert in build.recipes}
    base = verified_lineage(base_dir, fix=f"dvc repro -f -s {made_by(build.base)}")
    experts = {
        expert: verified_lineage(folder, fix=f"dvc repro -f -s merge@{expert}")
        for expert, folder in expert_dirs.items()
    }
    for folder in expert_dirs.values():
        require_weights(folder)
    check_lineages(base, experts)
    check_models(base_dir, expert_dirs)
    probes = {expert.recipe: probes_of(expert, params.recipe(expert.recipe)) for expert in build.experts}

    memory = MemoryLog(gpus_in_use(device))

    def load(folder: Path) -> PreTrainedModel:
        model = load_model(folder, device=device, precision=precision)
        memory.loaded()
        return model

    processor = load_processor(base_dir, None)

    built_dir = Path("data/builds") / name
    with published(built_dir) as folder:
        changes = merge_experts(base_dir, expert_dirs, folder, top_k=build.top_k)
        report_changes(changes)
        lineage = write_lineage(
            folder,
            kind="built",
            name=name,
            parents={"base": (base_dir, base)}
            | {f"expert/{expert}": (expert_dirs[expert], experts[expert]) for expert in experts},
        )
        certificate = BuildCertificate(
            build=name,
            built_digest=lineage.digest,
            precision=precision,
            top_k=build.top_k,
            changes=changes,
            tolerance=TOLERANCE[precision],
            domains=measure_domains(folder, base_dir, expert_dirs, probes, load=load, processor=processor),
        )
        if problems := certificate.problems():
            raise UserError(f"the build {name} is not made of its experts: {'; '.join(problems)}")
    publish_json(certificate, built_dir.with_name(f"{name}.json"))
    write_stage_memory(memory.finish("build", name), task=build.task)
    for expert, domain in certificate.domains.items():
        shares = ", ".join(
            f"{other} {share:.0%}" for other, share in zip(build.recipes, domain.routing.weight, strict=True)
        )
        log.info("on %s: routed to %s; the expert alone off by %.1e", expert, shares, domain.forced_deviation)
    log.info("built %s of %d experts, top %d, content %s", name, len(experts), build.top_k, short(lineage.digest))


def probes_of(expert: ExpertParams, recipe: RecipeParams) -> list[Conversation]:
    """Conversations of the expert's domain, or of the whole task where it has none; experts take no pictures."""
    samples = load_task(recipe.task, "samples")
    if expert.domain is None:
        return [probe for probe in samples.probes(recipe.answer_format) if not probe.images]
    if not hasattr(samples, "domain"):
        raise UserError(f"expert {expert.recipe} has the domain {expert.domain}, but task {recipe.task} knows none")
    return list(samples.probes(recipe.answer_format, expert.domain))


def report_changes(changes: Mapping[str, Change]) -> None:
    for expert, change in changes.items():
        log.info("expert %s changed the MLPs by %.2g of their norm", expert, change.mlp)
        if change.outside:
            log.warning("expert %s changed all else by %.2g of its norm, which is lost", expert, change.outside)


if __name__ == "__main__":
    main()
