"""Build a mixture of experts from dense models of one base, and certify it by reloading it from disk.

Reads   builds.NAME; its base; data/runs/RECIPE/merged/ of each of its experts
Writes  data/builds/NAME/       a standard Qwen2Moe folder, a base like any other; lineage.json
        data/builds/NAME.json   the certificate: each expert within the mixture, and the routing of tokens
        data/report/TASK/memory/NAME/build.json  the process memory
Run     docker/run build NAME
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stages.core.errors import UserError, configure_logging
from stages.core.lineage import short
from stages.core.params import load_params
from stages.core.params.schema import ExpertParams, RecipeParams
from stages.core.tasks import load_task
from stages.data.conversation import Conversation
from stages.mixture.build import build_mixture
from stages.models.certificate import made_model
from stages.models.folders import require_weights
from stages.models.load import gpus_in_use, limit_visible_gpus, load_model
from stages.planning.memory_use import MemoryLog

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("name")
def main(name: str) -> None:
    configure_logging(f"build {name}")
    params = load_params()
    build, precision = params.build(name), params.active.memory.precision
    limit_visible_gpus(device := params.active.device.one())
    base = made_model(build.base)
    experts = {recipe: made_model(f"runs/{recipe}/merged") for recipe in build.recipes}
    for folder, _ in experts.values():
        require_weights(folder)
    probes = {expert.recipe: probes_of(expert, params.recipe(expert.recipe)) for expert in build.experts}
    memory = MemoryLog(gpus_in_use(device))

    def load(folder: Path) -> PreTrainedModel:
        model = load_model(folder, device=device, precision=precision)
        memory.loaded()
        return model

    certificate = build_mixture(
        Path("data/builds") / name, base, experts, probes, top_k=build.top_k, precision=precision, load=load
    )
    memory.write("build", name, task=build.task)
    for expert, domain in certificate.domains.items():
        weights = zip(build.recipes, domain.routing.load, strict=True)
        shares = ", ".join(f"{other} {share:.0%}" for other, share in weights)
        log.info("on %s: routed to %s; the expert alone off by %.1e", expert, shares, domain.forced_deviation)
    log.info(
        "built %s of %d experts, top %d, content %s", name, len(experts), build.top_k, short(certificate.built_digest)
    )


def probes_of(expert: ExpertParams, recipe: RecipeParams) -> list[Conversation]:
    """Conversations of the expert's domain, or of the whole task if it has none, without images."""
    samples = load_task(recipe.task, "samples")
    if expert.domain is None:
        return [probe for probe in samples.probes(recipe.answer_format) if not probe.images]
    if not hasattr(samples, "domain"):
        raise UserError(f"expert {expert.recipe} has the domain {expert.domain}, but task {recipe.task} has none")
    return list(samples.probes(recipe.answer_format, expert.domain))


if __name__ == "__main__":
    main()
