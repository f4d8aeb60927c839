"""Is everything still what was recorded of it? And does a stage come out the same when it is run again?

Reads   every byte of what DVC keeps in data/ and in its cache; dvc.lock, lineages, certificates, records of provenance
Writes  nothing; with --restore, to DVC's cache what is damaged there and intact in the workspace
Run     make verify
        make verify RERUN=train@r1-llm-only
        make verify PUBLISHED=FOLDER KEY=publisher.pem    a published folder, wherever it lies

Names what is damaged, each with the command that fixes it, and ends with 1; with 0 where nothing is.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from stages.core.errors import UserError, bytes_text, counted, printable
from stages.core.lineage import Lineage
from tools.verify.findings import Findings
from tools.verify.rerun import Rerun, rerun
from tools.verify.verify import restore, verify


@click.command(help=__doc__)
@click.option("--rerun", "stage", help="Run this stage again, in a folder of its own, and compare: train@r1-llm-only.")
@click.option("--restore", "restores", is_flag=True, help="Put back into DVC's cache what is intact in the workspace.")
@click.option("--published", "folder", type=click.Path(path_type=Path), help="Check this published folder alone.")
@click.option("--key", type=click.Path(path_type=Path), help="Its publisher's public key; not given: the folder's own.")
def main(stage: str | None, restores: bool, folder: Path | None, key: Path | None) -> None:
    if (stage is not None) + restores + (folder is not None) > 1:
        raise click.UsageError("--rerun, --restore and --published are three things; ask for one")
    if folder is not None:
        sys.exit(report_published(folder, key))
    if key is not None:
        raise click.UsageError("--key is that of a published folder; name it: --published FOLDER")
    workspace_dir = Path.cwd()
    if not any((workspace_dir / name).exists() for name in ("dvc.yaml", "data")):
        raise UserError("there is neither dvc.yaml nor data here; run from the top of the repository")
    if stage is not None:
        sys.exit(report_rerun(rerun(workspace_dir, stage)))
    started = time.monotonic()
    findings = verify(workspace_dir)
    if restores and findings.restorable:
        restore(findings)
        click.echo(f"put back into DVC's cache: {counted(len(findings.restorable), 'object')}")
        started = time.monotonic()
        findings = verify(workspace_dir)
    sys.exit(report(findings, time.monotonic() - started))


def report(findings: Findings, seconds: float) -> int:
    """Print what was found; returns the exit code."""
    found, snapshot = findings.in_order(), findings.snapshot
    for finding in found:
        problems = "".join(f"  {problem}\n" for problem in finding.problems)
        click.echo(f"{finding.path}\n{problems}  fix it with: {finding.fix}\n")
    if findings.absent:
        click.echo(
            f"{counted(findings.absent, 'output')} of dvc.lock neither here nor in the cache, so not checked: "
            f"dvc pull, or dvc repro, brings them"
        )
    if not snapshot.objects:
        click.echo("DVC has no cache here: only the workspace was checked")
    roots = {lineage.root().digest for lineage in snapshot.lineages.values() if isinstance(lineage, Lineage)}
    tally = {
        "file": len(snapshot.digests),
        "output": len(snapshot.outputs) - findings.absent,
        "cached object": len(snapshot.objects),
        "model folder": len(snapshot.lineages),
        "root model": len(roots),
        "certificate": len(snapshot.certificates),
        "record": len(snapshot.records),
    }
    things = ", ".join(counted(count, what) for what, count in tally.items() if count) or "nothing yet"
    checked = f"{bytes_text(snapshot.size_bytes)} in {seconds:.1f} s: {things}"
    if found:
        click.echo(f"DAMAGED: {counted(len(found), 'thing')}, to be fixed from the top. {checked}")
        return 1
    click.echo(f"all is as recorded. {checked}")
    return 0


def report_published(folder: Path, key: Path | None) -> int:
    """Check a published folder, and print by whom and of what it was made."""
    from stages.kit.publishing.check import check_published  # imports huggingface_hub
    from stages.kit.publishing.origins import lineage_lines

    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if key is not None and not key.is_file():
        raise UserError(f"there is no public key {key}")
    checked = check_published(folder, key)
    if checked.problems:
        click.echo(printable("\n".join(checked.problems)))
        click.echo(
            f"DAMAGED: {counted(len(checked.problems), 'file')} of {folder}; fetch it anew, or ask its publisher"
        )
        return 1
    assert checked.model is not None
    for made in checked.statements:
        click.echo(printable(f"{made.stage}, {made.ended}, commit {made.commit or 'not known'}"))
    for line in lineage_lines(checked.model):
        click.echo(printable(line))
    whose = "the publisher's key" if key else "the key in the folder, which is the publisher's if its fingerprint is"
    click.echo(f"all is as it was signed, by {whose}: {checked.key}")
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


if __name__ == "__main__":
    main()
