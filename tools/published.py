"""Say whether a task's table is the published one, to the digit: `python -m tools.published detection`.

The published tables are docs/tables/TASK.txt, which the documents show. The tiny profile made them on an AMD CPU held
to AVX2 (stages/core/cpu.py). With --strict, another table on such a CPU is an error: so CI keeps them true. With
--recipe, only the figures of that recipe are compared, and the others need not have run.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from stages.core.provenance import PROVENANCE_DIR, Provenance, read_provenance
from tools.api import compare_runs, table_text

TABLES_DIR = Path("docs/tables")
ARITHMETIC = "AuthenticAMD avx2"
"""What the published tables were computed by (stages/core/cpu.py)."""


@click.command(help=__doc__)
@click.argument("task")
@click.option("--strict", is_flag=True)
@click.option("--recipe", help="Compare its figures alone, as far as they were computed.")
def main(task: str, strict: bool, recipe: str | None) -> None:
    path = TABLES_DIR / f"{task}.txt"
    if not path.exists():
        return  # a task that the documents do not show
    published, what = path.read_text(encoding="utf-8"), f"the published table ({path})"
    if recipe:
        published, table = figures_of(recipe, published), figures_of(recipe, table_text(compare_runs(task)))
        what = f"what the published table ({path}) has of {recipe}"
    else:
        table = Path("data/report", task, "table.txt").read_text(encoding="utf-8")
    differing = differing_lines(published, table)
    if not differing:
        click.echo(f"This is {what}, to the digit.")
        return
    records = [read_provenance(record) for record in sorted(Path(PROVENANCE_DIR, task).glob(f"*@{recipe or '*'}.json"))]
    reasons = why_it_may_differ(records)
    click.echo(f"This is not {what}: {differing} of its lines differ.")
    click.echo(
        "\n".join(f"  {reason}" for reason in reasons or ["The code is of another commit, or something is wrong."])
    )
    if strict and not reasons:
        sys.exit(1)


def figures_of(recipe: str, table: str) -> str:
    """The cells of a recipe's rows that are figures, a line each."""
    rows = [line.split()[1:] for line in table.splitlines() if line.startswith(f"{recipe}  ")]
    return "\n".join(cell for row in rows for cell in row if any(map(str.isdigit, cell)))


def differing_lines(published: str, table: str) -> int:
    """How many lines of the published table another one lacks or has otherwise; 1 where it only has more."""
    lines = list(difflib.ndiff(published.splitlines(), table.splitlines()))
    return sum(line.startswith("- ") for line in lines) or int(published != table)


def why_it_may_differ(records: Sequence[Provenance]) -> list[str]:
    """What the records of a comparison's stages say of it; nothing where it should be equal."""
    reasons = []
    if profiles := sorted({record.plan["profile"] for record in records if record.plan} - {"tiny"}):
        reasons.append(f"It is of another profile: {', '.join(profiles)}.")
    if changed := sorted({path for record in records for path in record.changed}):
        reasons.append(f"Files were changed: {', '.join(changed)}.")
    if any(record.gpus for record in records):
        reasons.append("GPUs computed it.")
    if others := sorted({record.machine.arithmetic for record in records if record.machine} - {ARITHMETIC}):
        reasons.append(f"The published one was computed by {ARITHMETIC}, this one by {', '.join(others)}.")
    return reasons


if __name__ == "__main__":
    main()
