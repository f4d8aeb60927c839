"""Run stages of dvc.yaml side by side if they do not depend on each other: `dvc repro` for several GPUs or cores.

Reads   dvc.yaml, params.yaml and dvc.lock, as DVC does
Writes  what `dvc repro TARGETS` writes; the output of each stage to .bakeoff/logs/STAGE.log
Run     make run TASK=detection JOBS=4
        python -m tools.run evaluate@r1-llm-only evaluate@r4-joint --jobs 2

Each stage is a `dvc repro --single-item`, started when the stages that it depends on are done. When one fails, those
that do not depend on it are finished; it ends with the exit code of the first that failed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from stages.core.environment import usable_cores
from stages.core.errors import UserError, pluralize
from stages.core.params import load_params
from stages.core.params.schema import DeviceParams, Params
from stages.kit.launcher.container import locked
from stages.kit.launcher.gpus import leasable, read_gpus
from stages.kit.launcher.pipeline import gpus_wanted
from stages.kit.launcher.slurm import runs_in_slurm
from tools.run.side_by_side import SideBySide, Step, say

LOGS_DIR = Path(".bakeoff/logs")
LOCK_PATH = Path(".bakeoff/run.lock")


@click.command(help=__doc__)
@click.argument("targets", nargs=-1)
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), help="Stages at once; default: 4, on a CPU at most its cores."
)
@click.option("-f", "--force", is_flag=True, help="Run stages that are up to date too.")
def main(targets: tuple[str, ...], jobs: int | None, force: bool) -> None:
    params = load_params(Path("params.yaml"))
    shares_cores = params.active.device.kind == "cpu" and not runs_in_slurm("train", os.environ, params)
    jobs = jobs or (min(4, usable_cores()) if shares_cores else 4)
    # On a GPU and in Slurm the number of threads is left open: a checkpoint and a job are known by it too, and
    # `dvc repro` could not resume them.
    threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // jobs))} if shares_cores and jobs > 1 else {}
    with locked(LOCK_PATH, "`make run` is at work in this workspace already; wait for it, or end it"):
        steps, num_up_to_date = steps_of(targets, params.active.device, force=force)
        up_to_date = f"{num_up_to_date} up to date, " if num_up_to_date else ""
        say(f"{up_to_date}{pluralize(len(steps), 'stage')} to run, at most {jobs} at once; their output: {LOGS_DIR}/")
        options = ("--force",) if force else ()
        run = SideBySide(
            steps=steps,
            dvc=(sys.executable, "-m", "dvc", "--wait-for-lock", "repro", *options, "--single-item"),
            environment={**threads, **os.environ},
            logs_dir=LOGS_DIR,
            jobs=jobs,
            gpus=num_gpus(params, jobs=jobs),
        )
        sys.exit(run.run())


def steps_of(targets: Sequence[str], device: DeviceParams, *, force: bool) -> tuple[dict[str, Step], int]:
    """(the stages that the targets need and that may have something to do, by name; how many are up to date).

    They come in the order in which `dvc repro` would run them. A stage whose inputs may yet change is among them, and
    DVC looks again when its turn comes. Raises UserError if DVC refuses.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo, lock_repo
    from dvc.repo.reproduce import collect_stages, get_active_graph, plan_repro

    try:
        with Repo(_wait_for_lock=True) as repo, lock_repo(repo):
            graph = get_active_graph(repo.index.graph)
            stages = plan_repro(graph, collect_stages(repo, targets or ["dvc.yaml"]))
            waits_for = {stage.addressing: {other.addressing for other in graph.successors(stage)} for stage in stages}
            commands = {stage.addressing: stage.cmd for stage in stages}
            changed = set(waits_for) if force else set(repo.status(targets=list(waits_for)))
    except DvcException as error:
        raise UserError(f"DVC refuses: {error}") from None
    steps: dict[str, Step] = {}
    for name, others in waits_for.items():  # a stage comes after those that it waits for
        if name in changed or others & steps.keys():
            kind = re.match(r"exec docker/run (\w+)", str(commands[name]))
            gpus = gpus_wanted(kind[1], device) if kind else 0
            steps[name] = Step(waits_for=frozenset(others & steps.keys()), gpus=gpus)
    return steps, len(waits_for) - len(steps)


def num_gpus(params: Params, *, jobs: int) -> int:
    """Number of GPUs that stages may use at once; Slurm has enough for all.

    One if this machine has none: the first stage that wants it reports that.
    """
    if runs_in_slurm("train", os.environ, params):
        return jobs * params.active.device.count
    if params.active.device.kind == "cpu":
        return 0
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return len(leasable(read_gpus(), visible=visible, count=1, holder="make run"))
    except UserError:
        return 1


if __name__ == "__main__":
    main(prog_name="python -m tools.run")
