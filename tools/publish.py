"""Writes a run that was evaluated here as a folder to publish, by its stage: `dvc repro --single-item publish@RUN`.

Reads   dvc.yaml, params.yaml
Writes  data/published/RUN
Run     make publish RUN=r4-joint
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from stages.core.errors import UserError, listed
from stages.core.records import obtain, unknown
from stages.launcher.pipeline import declared_stages


@click.command(help=__doc__)
@click.argument("run")
def main(run: str) -> None:
    stages = {stage.command: stage for stage in declared_stages(Path.cwd())}
    if (stage := stages.get(f"docker/run publish {run}")) is None:
        runs = [command.split()[2] for command in stages if command.startswith("docker/run publish ")]
        raise UserError(unknown("recipe or export of params.yaml is called", run, runs))
    if missing := [path for path in stage.inputs("data") if not Path(path).exists()]:
        evaluated = stages[f"docker/run evaluate {run}"].name
        raise UserError(
            f"{run} cannot be published: of its inputs these are not here:\n{listed(missing)}\n{obtain(evaluated)}"
        )
    # In place of this process, which would end before DVC does on Ctrl-C.
    os.execv(sys.executable, [sys.executable, "-m", "dvc", "repro", "--single-item", stage.name])


if __name__ == "__main__":
    main()
