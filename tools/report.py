"""Open the last comparison of a task in a browser, or print its table: what `make report` and `make demo` call.

Reads   data/report/TASK/index.html, table.txt; with --printed-since data/provenance/compare@TASK.json
Writes  nothing
Run     python -m tools.report detection
"""

from __future__ import annotations

import webbrowser
from datetime import datetime
from pathlib import Path

import click

from stages.core.documents import nearest
from stages.core.errors import UserError
from stages.core.params.load import load_params
from stages.core.provenance import PROVENANCE_DIR, read_provenance


@click.command(help=__doc__)
@click.argument("task")
@click.option("--table", is_flag=True, help="Print the table, and open nothing.")
@click.option("--printed-since", type=float, help="Unless compare@TASK ran, and so printed it, after this Unix time.")
def main(task: str, table: bool, printed_since: float | None) -> None:
    tasks = dict.fromkeys(recipe.task for recipe in load_params().recipes.values())
    if task not in tasks:
        raise UserError(f"no task is called {task!r}{nearest(task, tasks)}; there are: {', '.join(tasks)}")
    folder = Path("data/report") / task
    path = folder / ("table.txt" if table else "index.html")
    if not path.is_file():
        raise UserError(f"there is no report of task {task} yet; make it with: dvc repro compare@{task}")
    if not table:
        opened = webbrowser.open(path.absolute().as_uri())
        click.echo(f"{'opened' if opened else 'no browser here; open this file in one:'} {path.absolute()}")
    elif printed_since is None or not _ran_since(task, printed_since):
        click.echo(path.read_text(encoding="utf-8"), nl=False)


def _ran_since(task: str, time: float) -> bool:
    """Not so where DVC brought the report back from its cache."""
    record_path = Path(PROVENANCE_DIR) / f"compare@{task}.json"
    return record_path.exists() and datetime.fromisoformat(read_provenance(record_path).ended).timestamp() >= int(time)


if __name__ == "__main__":
    main()
