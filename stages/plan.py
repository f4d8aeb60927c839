"""Resolve every setting of a recipe on the active profile, and predict whether it fits.

Reads   params.yaml; the base's config and processor; the largest samples of the prepared data
Writes  data/runs/RECIPE/plan.yaml     every setting, as train takes it
        data/runs/RECIPE/memory.json   the predicted memory by category, and the verdict
        data/runs/RECIPE/too-long.tsv  id and length of samples longer than max_length, if it refuses them
Run     docker/run plan r1-llm-only
"""

from __future__ import annotations

import logging
from pathlib import Path

import click

from stages.core.atomic import atomic_write
from stages.core.errors import UserError, configure_logging
from stages.core.params import load_params
from stages.core.tasks import load_task
from stages.memory.fit import decide, duration
from stages.memory.preview import preview
from stages.models.adapters import trainable_line
from stages.models.folders import require_weights
from stages.models.load import load_config
from stages.planning.prediction import gib_text
from stages.training.batches import TooLong

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("recipe")
def main(recipe: str) -> None:
    configure_logging(f"plan {recipe}")
    params = load_params()
    wanted, run_dir = params.recipe(recipe), Path("data/runs") / recipe
    base_dir = Path("data") / wanted.base
    require_weights(base_dir)
    samples = load_task(wanted.task, "samples")
    (too_long := run_dir / "too-long.tsv").unlink(missing_ok=True)
    try:
        planned = preview(params, recipe, load_config(base_dir), samples, base_dir=base_dir)
    except TooLong as error:
        atomic_write(error.table, too_long)
        raise UserError(f"{error.message}; all of them: {too_long}") from None
    fit = decide(planned.fit, planned.predict, params.active.memory.fit)
    evaluation, batch_size = planned.evaluation(fit)
    fit.plan.write(run_dir / "plan.yaml")
    fit.record(evaluation, batch_size).write(run_dir / "memory.json")
    about = (*planned.warnings, *planned.overrides, *planned.notes)
    for line in (*about, trainable_line(fit.plan.trainable), *fit.lines()):
        log.info("%s", line)
    if (time := duration(fit, planned.lengths, params.prices)) is not None:
        log.info("time: %s", time)
    fits = evaluation.verdict in (None, "fits")
    halved = "" if fits else f": {evaluation.verdict}; it halves its batch until it does"
    log.info("evaluation takes %s GiB, %d at once%s", gib_text(evaluation.prediction.total_bytes), batch_size, halved)


if __name__ == "__main__":
    main()
