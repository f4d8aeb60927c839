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

from stages.core.errors import configure_logging
from stages.core.params import load_params
from stages.core.params.schema import DataParams, DatasetParams
from stages.core.records import refusal
from stages.core.tasks import load_task, reader_of, reader_problems
from stages.kit.data.prepared import write_prepared
from stages.kit.data.sources import WrongSplit

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("name", metavar="DATASET")
def main(name: str) -> None:
    configure_logging(f"prepare {name}")
    params = load_params()
    dataset, path = params.dataset(name), f"profiles.{params.profile}.datasets.{name}"
    sources = load_task(dataset.task, "sources")
    found = reader_problems(sources, dataset, path)
    if dataset.mix and not hasattr(sources, "mix"):
        found[f"{path}.mix"] = f"datasets of the task {dataset.task} cannot be mixed"
    if found:
        raise refusal(Path("params.yaml"), found)
    try:
        stats = prepare(dataset, params.data, Path("data/prepared") / name)
    except WrongSplit as error:
        raise refusal(Path("params.yaml"), {f"{path}.splits.{error.split}": error.problem}) from None
    log.info("dataset %s from %s", name, stats["source"])
    for split, counts in stats["splits"].items():
        log.info("%s: %d records, %d invalid rows left out", split, counts["records"], counts["invalid_rows"])


def prepare(dataset: DatasetParams, data: DataParams, out_dir: Path) -> dict[str, Any]:
    """Read and check a dataset and write it, whole or not at all, to `out_dir`. Returns the content of stats.json."""
    sources = load_task(dataset.task, "sources")
    if dataset.mix:
        raw = sources.mix(dataset.mix, out_dir.parent, with_selection=data.selection > 0)
    else:
        raw = sources.read(dataset, reader_of(sources, dataset))
    return write_prepared(raw, out_dir, data, dataset.limit)


if __name__ == "__main__":
    main()
