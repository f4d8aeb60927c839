"""Prepare a dataset: every sample checked, and nothing in both splits; or a guard, which has no training split.

Reads   profiles.PROFILE.datasets.DATASET, and the source it names: `folder:PATH`,
        `hub:OWNER/NAME@REVISION` or `mix`; data.skip_invalid, data.selection; or guards.GUARD
Writes  data/prepared/DATASET/{train.parquet, val.parquet, stats.json}; test.parquet with splits.test, and
        selection.parquet with data.selection; of a guard data/guards/GUARD/{val.parquet, stats.json}
Run     docker/run prepare nutrition-tables
"""

from __future__ import annotations

import logging
from pathlib import Path

import click

from stages.core.errors import configure_logging
from stages.core.params import load_params
from stages.core.params.schema import DatasetParams, SplitParams
from stages.core.tasks import load_task
from stages.data.guards import GUARDS_DIR
from stages.data.prepared import prepare

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("name", metavar="DATASET")
def main(name: str) -> None:
    configure_logging(f"prepare {name}")
    params = load_params()
    if guard := params.guards.get(name):
        dataset = DatasetParams(task="chat", source=guard.source, splits=SplitParams(train="*"))
        out_dir, path = GUARDS_DIR / name, f"guards.{name}"
    else:
        dataset, out_dir, path = params.dataset(name), Path("data/prepared") / name, params.dataset_path(name)
    sources = load_task(dataset.task, "sources")
    stats = prepare(sources, dataset, params.data, out_dir, path=path, trained=guard is None)
    log.info("dataset %s from %s", name, stats["source"])
    for split, counts in stats["splits"].items():
        log.info("%s: %d records, %d invalid rows left out", split, counts["records"], counts["invalid_rows"])


if __name__ == "__main__":
    main()
