"""Is everything still what was recorded of it? And does a stage come out the same when it is run again?

Reads   every byte of what DVC keeps in data/ and in its cache; dvc.lock, lineages, certificates, records of provenance
Writes  nothing; with --restore, to DVC's cache what is damaged there and intact in the workspace
Run     make verify
        make verify RERUN=train@r1-llm-only

Names what is damaged, each with the command that mends it, and ends with 1; with 0 where nothing is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from stages.core.errors import UserError, bytes_text, counted
from tools.verify.rerun import Rerun, rerun
from tools.verify.verify import Verification, restore, verify


@click.command(help=__doc__)
@click.option("--rerun", "stage", help="Run this stage again, aside, and compare what comes out: train@r1-llm-only.")
@click.option("--restore", "restores", is_flag=True, help="Put back into DVC's cache what is intact in the workspace.")
def main(stage: str | None, restores: bool) -> None:
    if stage is not None and restores:
        raise click.UsageError("--rerun and --restore are two things; ask for one")
    workspace_dir = Path.cwd()
    if not any((workspace_dir / name).exists() for name in ("dvc.yaml", "data")):
        raise UserError("there is neither dvc.yaml nor data here; run from the top of the repository")
    if stage is not None:
        sys.exit(report_rerun(rerun(workspace_dir, stage)))
    verification, seconds = timed(workspace_dir)
    if restores and verification.restorable:
        restore(verification.restorable)
        click.echo(f"put back into DVC's cache: {counted(len(verification.restorable), 'object')}")
        verification, seconds = timed(workspace_dir)
    sys.exit(report(verification, seconds))


def timed(workspace_dir: Path) -> tuple[Verification, float]:
    started = time.monotonic()
    with progress() as (begin, advance):
        return verify(workspace_dir, begin=begin, advance=advance), time.monotonic() - started


def report(verification: Verification, seconds: float) -> int:
    """Print what was found; returns the exit code."""
    for damage in verification.damages:
        click.echo(damage.path)
        for found in damage.found:
            click.echo(f"  {found}")
        click.echo(f"  mend it with: {damage.mend}\n")
    if verification.absent:
        click.echo(
            f"{counted(verification.absent, 'output')} of dvc.lock neither here nor in the cache, so not looked at: "
            f"dvc pull, or dvc repro, brings them"
        )
    if not verification.has_cache:
        click.echo("no cache of DVC's here: only the workspace was looked at")
    looked_at = f"{bytes_text(verification.size_bytes)} in {seconds:.1f} s: {verification.tally() or 'nothing yet'}"
    if verification.damages:
        click.echo(f"DAMAGED: {counted(len(verification.damages), 'thing')}, to be mended from the top. {looked_at}")
        return 1
    click.echo(f"all is as recorded. {looked_at}")
    return 0


def report_rerun(again: Rerun) -> int:
    comparison = again.comparison
    num_files = len(comparison.equal) + len(comparison.measured) + len(comparison.different)
    size = f"{counted(num_files, 'file')}, {bytes_text(comparison.size_bytes)}"
    if not comparison.different:
        but = f"; but for times and memory: {', '.join(comparison.measured)}" if comparison.measured else ""
        click.echo(f"{again.stage} came out the same again, byte for byte: {size}{but}")
        return 0
    click.echo(f"{again.stage} came out DIFFERENT: {len(comparison.different)} of {size}; the workspace's comes first")
    for name, where in comparison.different.items():
        click.echo(f"  {name}: {where}")
    if comparison.same_trace:
        click.echo("the training itself took the same course, step by step")
    for what in again.unlike:
        click.echo(f"the two runs were not alike: {what}")
    if not again.unlike:
        click.echo("the two runs were alike in all that is recorded of them")
    click.echo("whether the workspace still holds what its run left, says: make verify")
    return 1


@contextmanager
def progress() -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """(told how many bytes there are, told that so many more were read): a bar on a terminal, else nothing."""
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda total: bar.update(task, total=total), lambda count: bar.advance(task, count)


if __name__ == "__main__":
    main()
