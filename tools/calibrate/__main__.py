"""Measure on a GPU what predictions of memory take for granted, and how far they are off.

Reads   nothing: models of random weights in the known geometries, built on the device
Writes  .bakeoff/calibration/cuda.jsonl      a line a setting; a setting that has one is not measured again
        stages/kit/memory/calibration.yaml   constants and bounds, once every setting has been tried
Run     make calibrate

Each setting is trained for two steps in a process of its own, after the same settings were predicted in one that sees
no GPU. A failure is noted, and the run goes on; the next run tries it again. On a CPU tiny models show that it works.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import click

from stages.core.errors import UserError
from stages.core.logs import configure_logging
from stages.core.publish import publish_text
from stages.kit.launcher.leases import leased_gpus
from stages.kit.memory.calibration import SHIPPED_PATH, load_calibration
from tools.calibrate.children import Children
from tools.calibrate.measured import DeviceFacts
from tools.calibrate.outcomes import (
    Session,
    bounds,
    comparisons,
    measured_constants,
    recalibrated,
    summary_lines,
    table_lines,
)
from tools.calibrate.settings import Setting, settings_for
from tools.calibrate.work import Device, facts_of, measure_settings, predict_again

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--paged", is_flag=True, help="Also the settings of paged optimizers, which use managed memory.")
@click.option("--only", default="", help="Settings whose names contain this.")
@click.option("--budget-s", type=float, default=540.0, show_default=True, help="After so long nothing more starts.")
@click.option("--workers", type=click.IntRange(min=1), help="Predictions at once.  [default: a fourth of the cores]")
@click.option("--again", is_flag=True, help="Only predict anew what was measured, on any machine.")
@click.option("--dry-run", is_flag=True, help="Print the result, and write no calibration.")
@click.option("--results-dir", type=click.Path(path_type=Path), default=Path(".bakeoff/calibration"), show_default=True)
@click.option("--calibration", "calibration_path", type=click.Path(path_type=Path), default=SHIPPED_PATH)
def main(
    device: Device,
    paged: bool,
    only: str,
    budget_s: float,
    workers: int | None,
    again: bool,
    dry_run: bool,
    results_dir: Path,
    calibration_path: Path,
) -> None:
    configure_logging(f"calibrate on {device}")
    deadline = time.monotonic() + budget_s
    workers = workers or max(1, (os.cpu_count() or 1) // 4)
    path = results_dir / f"{device}.jsonl"
    settings = [setting for setting in settings_for(device, paged=paged) if only in setting.name]
    if again:
        session = Session.read(path)
        if session is None:
            raise UserError(f"{path} is missing: nothing was measured; measure by: make calibrate")
        predict_again(session, path, Children(results_dir / "logs", gpu=""), device=device, workers=workers)
    else:
        with visible_gpu(device) as gpu:
            children = Children(results_dir / "logs", gpu)
            session = Session.begin(facts_of(device, children), path)
            measure_settings(settings, session, path, children, device=device, workers=workers, deadline=deadline)
    for line in (*fact_lines(session.facts), *table_lines(session), *summary_lines(session)):
        click.echo(line)
    # Tiny models on a CPU say nothing of a GPU.
    dry_run = dry_run or (device == "cpu" and calibration_path == SHIPPED_PATH)
    finish(session, settings_for(device, paged=paged), calibration_path, dry_run=dry_run)


@contextmanager
def visible_gpu(device: Device) -> Iterator[str]:
    """The one GPU, empty and leased, that children may see, by its UUID; none for a CPU."""
    if device == "cpu":
        yield ""
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with leased_gpus(
        1, locks_dir=Path(".bakeoff/gpus"), holder="calibrate", visible=visible, say=lambda text: log.info("%s", text)
    ) as (gpu,):
        yield gpu.uuid


def fact_lines(facts: DeviceFacts) -> list[str]:
    mib = 2**20
    return [
        f"{facts.name}, compute capability {facts.capability[0]}.{facts.capability[1]}, {facts.versions}",
        f"CUDA sees {facts.total_bytes / 2**30:.2f} GiB of it",
        f"after the first kernels a context takes {facts.context_bytes / mib:.0f} MiB",
        f"cuBLAS takes {facts.workspaces} workspaces of {facts.workspace_bytes / mib:.3f} MiB",
        *(f"attention of {case}: {kernel}" for case, kernel in facts.attention.items()),
    ]


def finish(session: Session, settings: Sequence[Setting], path: Path, *, dry_run: bool) -> None:
    """Say the new constants and bounds, and write them where every setting has been tried."""
    compared = comparisons(session)
    if not compared:
        raise UserError("no setting was measured, so there is nothing to calibrate by")
    values = measured_constants(session) | bounds(compared)
    measured = measured_on(session)
    for name, value in values.items():
        click.echo(f"{name}: {value:g} ({measured})")
    untried = [setting.name for setting in settings if setting.name not in session.outcomes]
    if untried:
        click.echo(f"{len(untried)} of {len(settings)} settings are still to be tried: run this again to go on")
    elif not dry_run:
        write_calibration(values, measured, path)
        click.echo(f"wrote {path}; it is part of every plan, so commit it")


def measured_on(session: Session) -> str:
    """Device, versions that decide about memory, day: `NVIDIA H200, torch 2.13.0+cu130, ..., 2026-12-01`."""
    return f"{session.facts.name}, {session.facts.versions}, {datetime.now().astimezone():%Y-%m-%d}"


def write_calibration(values: dict[str, float], measured: str, path: Path) -> None:
    """Nothing is left of it where what comes out is refused."""
    before = path.read_text(encoding="utf-8")
    publish_text(recalibrated(before, values, measured), path)
    try:
        load_calibration(path)
    except UserError:
        publish_text(before, path)
        raise


if __name__ == "__main__":
    main()
