"""Starts one stage in a fresh process: what `docker/run STAGE [ARGS]` ends in.

Reads BAKEOFF_ENGINE (default: process) and the environment that the stage is to inherit parts of. Its exit
code is the stage's. Imports nothing heavy: it is on the way of every stage.
"""

import os
import sys
from pathlib import Path

import click

from stages.kit.containers.engines import DEFAULT_ENGINE, choose_engine
from stages.kit.containers.environment import stage_environment
from stages.kit.containers.parent_death import end_with_own_parent
from stages.kit.containers.stage_run import FETCHING_STAGES, STAGES, StageRun

WORKSPACE_DIR = Path(__file__).resolve().parents[3]


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("stage", type=click.Choice(STAGES))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def main(stage: str, args: tuple[str, ...]) -> None:
    """Run STAGE with ARGS in a fresh process."""
    # DVC waits for its stages; killed, it leaves them running, and the next `dvc repro` starts a second
    # writer on the same folder. A launcher typed by hand may outlive its shell (nohup).
    if "DVC_STAGE" in os.environ:
        end_with_own_parent()
    engine = choose_engine(os.environ.get("BAKEOFF_ENGINE") or DEFAULT_ENGINE)
    stage_run = StageRun(
        stage=stage,
        args=args,
        workspace_dir=WORKSPACE_DIR,
        network=stage in FETCHING_STAGES,
        environment=stage_environment(stage, os.environ, terminal=sys.stderr.isatty()),
    )
    sys.exit(engine.run(stage_run))


if __name__ == "__main__":
    main(prog_name="docker/run")
