"""Show DVC's experiments one below the other: what each changed, and what came of it. Behind `make experiments`.

Reads   what `dvc exp show --csv` says
Writes  nothing
Run     python -m tools.experiments

DVC's own table has a column for every figure of every recipe that differs anywhere: hundreds of characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import click

from tools.compare.experiments import experiment_rows

ABOUT = ("Experiment", "rev", "typ", "Created", "parent", "State", "Executor")
"""DVC's columns about a row itself."""


@click.command(help=__doc__)
def main() -> None:
    for line in experiment_lines(experiment_rows()):
        click.echo(line)


def experiment_lines(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """rows: of `dvc exp show --csv`: the workspace, a commit, the experiments that started from it, the next commit.

    Below the workspace and each experiment stands what is unlike its commit. Without experiments the last line says
    how to run one.
    """
    kept = list(rows)
    commit: Mapping[str, str] = next((row for row in kept if row["rev"] != "workspace"), {})
    lines: list[str] = []
    for row in kept:
        name = row["Experiment"] or row["rev"]
        about = [name, row["Created"].replace("T", " "), row.get("State") or ""]
        if row["typ"] == "baseline" and name != "workspace":
            commit = row
            lines.append("  ".join(filter(None, (*about, "(commit)"))))
            continue
        lines.append("  ".join(filter(None, (*about, f"(from {commit['rev']})" if commit else ""))))
        figures = {key: value for key, value in row.items() if key not in ABOUT and _is_value(value)}
        figures = {key: value for key, value in figures.items() if value != commit.get(key)}
        width = max(map(len, figures), default=0)
        for key, value in figures.items():
            before = commit.get(key)
            lines.append(f"  {key:{width}}  {value}" + (f"  was {before}" if _is_value(before) else ""))
        if not figures:
            lines.append("  nothing differs")
    if all(row["typ"] == "baseline" for row in kept):
        lines.append("no experiments yet; run one with: dvc exp run --temp -S recipes.r1-llm-only.lora.rank=8")
    return lines


def _is_value(shown: str | None) -> bool:
    """DVC has "!" for what it could not read."""
    return shown not in (None, "", "!")


if __name__ == "__main__":
    main()
