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
from typing import Any

import click

from stages.core.errors import UserError, configure_logging
from stages.core.params import load_params
from stages.core.params.schema import DataParams, DatasetParams
from stages.core.tasks import load_task, reader_of
from stages.kit.data.prepared import write_prepared
from stages.kit.data.sources import WrongSplit

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("name", metavar="DATASET")
def main(name: str) -> None:
    configure_logging(f"prepare {name}")
    params = load_params()
    stats = prepare(params.dataset(name), params.data, Path("data/prepared") / name, path=params.dataset_path(name))
    log.info("dataset %s from %s", name, stats["source"])
    for split, counts in stats["splits"].items():
        log.info("%s: %d records, %d invalid rows left out", split, counts["records"], counts["invalid_rows"])


def prepare(dataset: DatasetParams, data: DataParams, out_dir: Path, *, path: str) -> dict[str, Any]:
    """Read and check a dataset and write it, whole or not at all, to `out_dir`. Returns the content of stats.json.

    path: the dataset's own in params.yaml, for messages.
    """
    sources = load_task(dataset.task, "sources")
    reader = reader_of(sources, dataset, path)
    try:
        if dataset.mix:
            raw = sources.mix(dataset.mix, out_dir.parent, with_selection=data.selection > 0)
        else:
            raw = sources.read(dataset, reader)
    except WrongSplit as error:
        raise UserError(f"params.yaml: {path}.{error.message}") from None
    return write_prepared(raw, out_dir, data, dataset.limit)


if __name__ == "__main__":
    main()
