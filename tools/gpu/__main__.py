"""Measure everything that only a GPU can tell, and write it up.

Reads   nothing but this checkout: tiny models that it has, and random weights in the known geometries
Writes  .bakeoff/gpu/DEVICE.jsonl   a line a result; what has one is not measured again
        docs/gpu/DEVICE.md          the same for people
Run     make gpu, make gpu BUDGET_S=540, make gpu ARGS=--dry-run

In order of worth: what works at all; recipes at tiny size, all the way; the same bytes again, and after a kill; the
calibration of memory predictions; speed at real size, and what a step spends its time on; answers. Each piece has a
process of its own. That memory runs out is a result; what fails is tried again, last. It needs no network.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from stages.core.errors import UserError, counted
from stages.core.logs import configure_logging
from stages.core.publish import publish_text
from stages.kit.launcher.gpus import read_gpus
from stages.kit.launcher.leases import leased_gpus
from stages.kit.launcher.machine import cuda_of_torch, usable_cores
from tools.calibrate.children import Children
from tools.gpu.page import page
from tools.gpu.pieces import Device, catalogue
from tools.gpu.results import Results
from tools.gpu.runner import Runner

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.option("--budget-s", type=float, default=math.inf, help="After so many seconds nothing more starts.")
@click.option("--only", multiple=True, help="Pieces whose names contain one of these, e.g. 'speed:' or 'r1 nf4'.")
@click.option("--paged", is_flag=True, help="Also calibrate optimizers that use managed memory.")
@click.option("--dry-run", is_flag=True, help="Walk all of it on this CPU with tiny models, and print the page.")
@click.option("--results-dir", type=click.Path(path_type=Path), default=Path(".bakeoff/gpu"), show_default=True)
def main(budget_s: float, only: tuple[str, ...], paged: bool, dry_run: bool, results_dir: Path) -> None:
    deadline = time.monotonic() + budget_s
    configure_logging("gpu")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with device_to_measure(dry_run=dry_run) as device, own_scratch():
        results = Results(results_dir / f"{device.slug}.jsonl")
        pieces = catalogue(device, paged=paged)
        asked = [piece for piece in pieces if not only or any(part in piece.key for part in only)]
        children = Children(results_dir / "logs", device.uuid)
        # Most of a tiny training is the start of its processes.
        runner = Runner(device, children, results, deadline=deadline, workers=min(4, max(1, usable_cores() // 2)))
        interrupted = False
        try:
            runner.run(results.todo(asked))
        except KeyboardInterrupt:
            interrupted = True
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
        log.info("%s%s left; the same command goes on: %s", why, counted(len(left), "piece"), left[0].key)
    tried = [results.by_piece[piece.key] for piece in asked if piece.key in results.by_piece]
    if bad := [result for result in tried if not result.is_well]:
        log.info("%s not as hoped, among them %s", counted(len(bad), "result"), bad[0].piece)
    sys.exit(130 if interrupted else 1 if bad else 0)


@contextmanager
def device_to_measure(*, dry_run: bool) -> Iterator[Device]:
    """The one GPU, empty and leased, or this CPU. Raises UserError where there is none, or torch cannot use it."""
    if dry_run:
        yield Device(kind="cpu", name="CPU")
        return
    if not read_gpus():
        raise UserError("there is no NVIDIA GPU here; all of it on this CPU, with tiny models: make gpu ARGS=--dry-run")
    if cuda_of_torch() is None:
        raise UserError("torch is built for CPUs here; install the other build by: make setup TARGET=cuda")
    with leased_gpus(
        1,
        locks_dir=Path(".bakeoff/gpus"),
        holder="make gpu",
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        say=lambda text: log.info("%s", text),
    ) as (gpu,):
        yield Device(kind="cuda", name=gpu.name, uuid=gpu.uuid, has_bf16=capability(gpu.uuid) >= (8, 0))


def capability(uuid: str) -> tuple[int, int]:
    """A GPU's compute capability, e.g. (9, 0)."""
    import pynvml

    pynvml.nvmlInit()
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    finally:
        pynvml.nvmlShutdown()
    return major, minor


@contextmanager
def own_scratch() -> Iterator[None]:
    """A folder for what children leave when they are killed."""
    with tempfile.TemporaryDirectory(prefix="bakeoff-gpu-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield
        tempfile.tempdir = None


if __name__ == "__main__":
    main()
