"""Open the last comparison of a task in a browser, or print its table: what `make report` and `make demo` call.

Reads   data/report/TASK/index.html, table.txt
Writes  nothing
Run     python -m tools.report detection
"""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from stages.core.documents import nearest
from stages.core.errors import UserError
from stages.core.params.load import load_params


@click.command(help=__doc__)
@click.argument("task")
@click.option("--table", is_flag=True, help="Print the table, and open nothing.")
def main(task: str, table: bool) -> None:
    tasks = dict.fromkeys(recipe.task for recipe in load_params().recipes.values())
    if task not in tasks:
        raise UserError(f"no task is called {task!r}{nearest(task, tasks)}; there are: {', '.join(tasks)}")
    folder = Path("data/report") / task
    path = folder / ("table.txt" if table else "index.html")
    if not path.is_file():
        raise UserError(f"there is no report of task {task} yet; make it with: dvc repro compare@{task}")
    if table:
        click.echo(path.read_text(encoding="utf-8"), nl=False)
    else:
        opened = webbrowser.open(path.absolute().as_uri())
        click.echo(f"{'opened' if opened else 'no browser here; open this file in one:'} {path.absolute()}")


if __name__ == "__main__":
    main()
