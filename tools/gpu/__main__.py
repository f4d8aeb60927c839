"""Measure everything that only a GPU can tell, and write it up.

Reads   nothing but this checkout: tiny models that it has, and random weights in the known geometries
Writes  .bakeoff/gpu/DEVICE.jsonl   a line a result; what has one is not measured again
        docs/gpu/DEVICE.md          the same for people
Run     make gpu, make gpu BUDGET_S=540, make gpu ARGS=--dry-run

In order of worth: what works at all; recipes at tiny size, all the way, the same bytes again, and after a kill;
trainings at real size: memory, predicted and measured, speed, and what a step spends its time on; answers. Each piece
has a process of its own. That memory runs out is a result; what fails is tried again, last. It needs no network.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import time
from pathlib import Path

import click

from stages.core.errors import configure_logging, pluralize
from stages.core.records import publish_text
from tools.gpu.device import device_to_measure
from tools.gpu.page import page
from tools.gpu.pieces import FACTS, catalogue, chosen
from tools.gpu.results import Results
from tools.gpu.runner import Runner

log = logging.getLogger("stages")

RESULTS_DIR = Path(".bakeoff/gpu")


@click.command(help=__doc__)
@click.option("--budget-s", type=float, default=math.inf, help="After so many seconds nothing more starts.")
@click.option("--only", multiple=True, help="Pieces whose names contain one of these, e.g. 'trainings:' or 'r1 nf4'.")
@click.option("--paged", is_flag=True, help="Also optimizers that use managed memory.")
@click.option("--dry-run", is_flag=True, help="Walk all of it on this CPU with tiny models, and print the page.")
@click.option("--results-dir", type=click.Path(path_type=Path), default=RESULTS_DIR, show_default=True)
def main(budget_s: float, only: tuple[str, ...], paged: bool, dry_run: bool, results_dir: Path) -> None:
    deadline = time.monotonic() + budget_s
    configure_logging("gpu")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    interrupted = False
    with device_to_measure("cpu" if dry_run else "cuda", holder="make gpu") as device:
        results = Results(results_dir / f"{device.slug}.jsonl")
        runner = Runner(device, results, deadline=deadline)
        try:
            runner.run(results.todo([FACTS]))
            runner.run(results.todo(chosen(catalogue(device.kind, results.data(FACTS.key), paged=paged), only)))
        except KeyboardInterrupt:
            interrupted = True
    pieces = catalogue(device.kind, results.data(FACTS.key), paged=paged)
    asked = chosen(pieces, only)
    text = page(device, results, pieces)
    if dry_run:
        click.echo(text)
    else:
        path = Path("docs/gpu") / f"{device.slug}.md"
        publish_text(text, path)
        log.info("wrote %s", path)
    left = results.todo(asked)
    if left:
        why = "interrupted: what was measured is kept; " if interrupted else ""
        log.info("%s%s left; the same command goes on: %s", why, pluralize(len(left), "piece"), left[0].key)
    tried = [results.by_piece[piece.key] for piece in asked if piece.key in results.by_piece]
    if bad := [result for result in tried if not result.is_well]:
        log.info("%s not as hoped, among them %s", pluralize(len(bad), "result"), bad[0].piece)
    sys.exit(130 if interrupted else 1 if bad else 0)


if __name__ == "__main__":
    main()
