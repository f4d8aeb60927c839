"""Prepare a dataset: every sample checked, and nothing in both splits.

Reads   profiles.PROFILE.datasets.DATASET, and the source it names: `folder:PATH`,
        `hub:OWNER/NAME@REVISION` or `mix`; data.skip_invalid, data.selection
Writes  data/prepared/DATASET/{train.parquet, val.parquet, stats.json}, and selection.parquet where some is set aside
Run     docker/run prepare nutrition-tables
"""

from __future__ import annotations

import logging
from inspect import signature
from pathlib import Path

import click

from stages.core.documents import refusal
from stages.core.logs import configure_logging
from stages.core.params.load import load_params
from stages.tasks import load_task, reader_of, reader_problems

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("dataset")
def main(dataset: str) -> None:
    configure_logging(f"prepare {dataset}")
    params = load_params()
    chosen = params.dataset(dataset)
    path = f"profiles.{params.profile}.datasets.{dataset}"
    sources = load_task(chosen.task, "sources")
    found = reader_problems(sources, chosen, path)
    if chosen.mix and "mix" not in signature(sources.prepare).parameters:
        found[f"{path}.mix"] = f"datasets of the task {chosen.task} cannot be mixed"
    if found:
        raise refusal(Path("params.yaml"), found)
    stats = sources.prepare(
        chosen.source,
        limit=chosen.limit,
        selection=params.data.selection,
        skip_invalid=params.data.skip_invalid,
        out_dir=Path("data/prepared") / dataset,
        **({"mix": chosen.mix} if chosen.mix else {}),
        **({"reader": reader_of(sources, chosen)} if chosen.reader else {}),
    )
    log.info("dataset %s from %s", dataset, stats["source"])
    for split, counts in stats["splits"].items():
        log.info("%s: %d records, %d invalid rows left out", split, counts["records"], counts["invalid_rows"])


if __name__ == "__main__":
    main()
