"""Set the constants of memory predictions, and the bounds of their errors, by what a GPU measured.

Reads   .bakeoff/gpu/DEVICE.jsonl            the results of make gpu
Writes  stages/kit/memory/calibration.yaml   constants and bounds, once every setting has been tried
Run     make calibrate
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median

import click

from stages.core.errors import UserError, configure_logging
from stages.core.records import publish_text
from stages.kit.memory.calibration import SHIPPED_PATH, load_calibration
from tools.gpu.device import Device
from tools.gpu.memory import AMOUNTS, comparisons, constants, recalibrated
from tools.gpu.page import page
from tools.gpu.pieces import FACTS, Piece, catalogue, chosen
from tools.gpu.results import Results
from tools.gpu.runner import Runner


@click.command(help=__doc__)
@click.argument("results_path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--paged", is_flag=True, help="Paged optimizers have to be tried too.")
@click.option("--again", is_flag=True, help="Predict anew what was measured, after a change of the predictor.")
@click.option("--dry-run", is_flag=True, help="Print the result, and write no calibration.")
def main(results_path: Path, paged: bool, again: bool, dry_run: bool) -> None:
    configure_logging(f"calibrate by {results_path}")
    results = Results(results_path, measured_here=False)
    facts = results.data(FACTS.key)
    if facts is None:
        raise UserError(f"{results_path} has no facts of a device; measure them by: make gpu")
    device = Device(kind=facts["kind"], name=facts["name"])
    if again:
        pieces = predicted_again(device, results)
    else:
        pieces = chosen(catalogue(device.kind, facts, paged=paged), ["trainings:"])
    click.echo(page(device, results, pieces))
    # Tiny models on a CPU say nothing of a GPU.
    finish(results, pieces, SHIPPED_PATH, dry_run=dry_run or device.kind == "cpu")


def predicted_again(device: Device, results: Results) -> list[Piece]:
    """New predictions, of as many layers, beside what was measured, on this or another machine."""
    compared = comparisons(results)
    pieces = [
        replace(piece, task={**piece.task, "layers": (results.data(piece.key) or {})["layers"]})
        for piece in catalogue(device.kind, results.data(FACTS.key), paged=True, flash=True)
        if piece.step == "predictions" and piece.name in compared
    ]
    Runner(device, results, deadline=math.inf).run(pieces)
    return [FACTS, *pieces, *(replace(piece, step="trainings") for piece in pieces)]


def finish(results: Results, pieces: list[Piece], path: Path, *, dry_run: bool) -> None:
    """Print errors and the new constants and bounds, and write these where every setting has been tried."""
    rows = comparisons(results)
    if not rows:
        raise UserError("no setting was measured, so there is nothing to calibrate by")
    for amount in AMOUNTS:
        errors = [abs(row[amount]) for row in rows.values()]
        click.echo(f"{amount}: median error {median(errors):.1%}, worst {max(errors):.1%} of {len(rows)} settings")
    tried = [results.by_piece[piece.key] for piece in pieces if piece.key in results.by_piece]
    for result in tried:
        if result.status == "out of memory":
            click.echo(f"predicted to fit, and did not: {result.piece}")
    values, measured = constants(results), measured_on(results)
    for name, value in values.items():
        click.echo(f"{name}: {value:g} ({measured})")
    if len(tried) < len(pieces):
        click.echo(f"{len(pieces) - len(tried)} of {len(pieces)} pieces are still to be tried, by: make gpu")
    elif not dry_run:
        write_calibration(values, measured, path)
        click.echo(f"wrote {path}; it is part of every plan, so commit it")


def measured_on(results: Results) -> str:
    """Device, versions that decide about memory, day: `NVIDIA H200, torch 2.13.0+cu130, ..., 2026-12-01`."""
    versions = (f"{name} {results.versions[name]}" for name in ("torch", "transformers", "bitsandbytes"))
    return ", ".join(((results.data(FACTS.key) or {})["name"], *versions, f"{datetime.now().astimezone():%Y-%m-%d}"))


def write_calibration(values: dict[str, float], measured: str, path: Path) -> None:
    """Where the outcome is refused, the file stays as it was."""
    before = path.read_text(encoding="utf-8")
    publish_text(recalibrated(before, values, measured), path)
    try:
        load_calibration(path)
    except UserError:
        publish_text(before, path)
        raise


if __name__ == "__main__":
    main()
