"""Resolve every setting of a recipe on the active profile, and count what it will train.

Reads   params.yaml; the base's config.json; how many samples the prepared data holds
Writes  data/runs/RECIPE/plan.yaml
Run     docker/run plan r1-llm-only
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

import click

from stages.kit.errors import UserError
from stages.kit.logs import configure_logging
from stages.kit.models.load import load_config, meta_model
from stages.kit.models.parts import apply_recipe, count_trainable
from stages.kit.params import load_params
from stages.kit.plan import resolve_plan, write_plan
from stages.tasks import load_task

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("recipe")
def main(recipe: str) -> None:
    configure_logging(f"plan {recipe}")
    params = load_params()
    data = params.recipe(recipe).data
    plan = resolve_plan(params, recipe, train_samples=train_samples(Path("data/prepared") / data, data))
    config = load_config(Path(plan.base_dir))
    load_task(plan.task, "samples").check_family(config.model_type)
    model = meta_model(config)
    counts = count_trainable(apply_recipe(model, plan.parts, plan.lora))
    write_plan(replace(plan, trainable=asdict(counts)), Path("data/runs") / recipe / "plan.yaml")

    schedule = plan.schedule
    log.info("%s", counts)
    log.info(
        "%d samples, %d steps of %d (micro-batch %d x %d)",
        *(schedule.train_samples, schedule.num_steps, schedule.effective_batch),
        *(schedule.micro_batch, schedule.grad_accumulation),
    )
    if params.recipe(recipe).quantization != plan.quantization:
        log.info("quantization %s, as profile %s says", plan.quantization, plan.profile)


def train_samples(prepared_dir: Path, data: str) -> int:
    """How many training samples `prepare` wrote."""
    try:
        return int(json.loads((prepared_dir / "stats.json").read_text(encoding="utf-8"))["splits"]["train"]["records"])
    except FileNotFoundError:
        raise UserError(f"{prepared_dir} is not prepared; run: dvc repro prepare@{data}") from None


if __name__ == "__main__":
    main()
