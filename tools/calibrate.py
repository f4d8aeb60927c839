"""Measure on a GPU what predictions of memory take for granted, and how far they are off.

Reads   .bakeoff/gpu/DEVICE.jsonl            the results of make gpu
Writes  .bakeoff/gpu/DEVICE.jsonl            trainings that have no result there are measured
        stages/kit/memory/calibration.yaml   constants and bounds, once every setting has been tried
Run     make calibrate

Each setting is trained for two steps in a process of its own, after it was predicted in one that sees no GPU. A failure
is noted, and the run goes on; the next run tries it again. On a CPU tiny models show that it works.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median

import click

from stages.core.errors import UserError
from stages.core.logs import configure_logging
from stages.core.publish import publish_text
from stages.kit.memory.calibration import SHIPPED_PATH, load_calibration
from tools.gpu.__main__ import RESULTS_DIR
from tools.gpu.device import Device, Kind, device_to_measure
from tools.gpu.memory import AMOUNTS, comparisons, constants, recalibrated
from tools.gpu.page import page
from tools.gpu.pieces import FACTS, Piece, catalogue, chosen
from tools.gpu.results import Results
from tools.gpu.runner import Runner


@click.command(help=__doc__)
@click.option("--device", "kind", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--paged", is_flag=True, help="Also the settings of paged optimizers, which use managed memory.")
@click.option("--budget-s", type=float, default=540.0, show_default=True, help="After so long nothing more starts.")
@click.option(
    "--again",
    "measured_path",
    type=click.Path(exists=True, path_type=Path),
    help="Only predict anew what this file of results says was measured, on any machine.",
)
@click.option("--dry-run", is_flag=True, help="Print the result, and write no calibration.")
@click.option("--results-dir", type=click.Path(path_type=Path), default=RESULTS_DIR, show_default=True)
def main(
    kind: Kind, paged: bool, budget_s: float, measured_path: Path | None, dry_run: bool, results_dir: Path
) -> None:
    configure_logging(f"calibrate on {measured_path or kind}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if measured_path is not None:
        device, results, pieces = predicted_again(measured_path)
    else:
        with device_to_measure(kind, holder="make calibrate") as device:
            results = Results(results_dir / f"{device.slug}.jsonl")
            runner = Runner(device, results, deadline=time.monotonic() + budget_s)
            runner.run(results.todo([FACTS]))
            pieces = chosen(catalogue(kind, results.data(FACTS.key), paged=paged), ["trainings:"])
            runner.run(results.todo(pieces))
    click.echo(page(device, results, pieces))
    # Tiny models on a CPU say nothing of a GPU.
    finish(results, pieces, SHIPPED_PATH, dry_run=dry_run or device.kind == "cpu")


def predicted_again(path: Path) -> tuple[Device, Results, list[Piece]]:
    """New predictions, of as many layers, beside what was measured; for after a change of the predictor."""
    results = Results(path, measured_here=False)
    facts = results.data(FACTS.key)
    if facts is None:
        raise UserError(f"{path} has no facts of a device; measure by: make calibrate")
    device, compared = Device(kind=facts["kind"], name=facts["name"]), comparisons(results)
    pieces = [
        replace(piece, task={**piece.task, "layers": (results.data(piece.key) or {})["layers"]})
        for piece in catalogue(device.kind, facts, paged=True, flash=True)
        if piece.step == "predictions" and piece.name in compared
    ]
    Runner(device, results, deadline=math.inf).run(pieces)
    return device, results, [FACTS, *pieces, *(replace(piece, step="trainings") for piece in pieces)]


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
        click.echo(f"{len(pieces) - len(tried)} of {len(pieces)} pieces are still to be tried: run this again to go on")
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
