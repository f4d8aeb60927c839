"""Prepare a dataset: every sample checked, and nothing in both splits.

Reads   profiles.PROFILE.datasets.DATASET, and the source it names: `folder:PATH`,
        `hub:OWNER/NAME@REVISION` or `mix`; data.skip_invalid, data.selection
Writes  data/prepared/DATASET/{train.parquet, val.parquet, stats.json}; test.parquet with splits.test, and
        selection.parquet with data.selection
Run     docker/run prepare nutrition-tables
"""

from __future__ import annotations

import logging
from pathlib import Path

import click

from stages.core.errors import configure_logging
from stages.core.params import load_params
from stages.core.tasks import load_task
from stages.data.prepared import prepare

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("name", metavar="DATASET")
def main(name: str) -> None:
    configure_logging(f"prepare {name}")
    params = load_params()
    dataset, out_dir = params.dataset(name), Path("data/prepared") / name
    sources = load_task(dataset.task, "sources")
    stats = prepare(sources, dataset, params.data, out_dir, path=params.dataset_path(name))
    log.info("dataset %s from %s", name, stats["source"])
    for split, counts in stats["splits"].items():
        log.info("%s: %d records, %d invalid rows left out", split, counts["records"], counts["invalid_rows"])


if __name__ == "__main__":
    main()
