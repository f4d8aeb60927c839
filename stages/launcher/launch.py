"""Starts one stage in a fresh container or process: the end of `docker/run STAGE [NAME]`.

A call becomes a Request; checks refuse one that cannot succeed; then the stage runs here, or in a step of Slurm, where
the same launcher runs it. DVC names the stage in DVC_STAGE, and dvc.yaml gives no NAME: DVC puts names into its
commands unquoted.

Reads BAKEOFF_PLACE (default: the profile's), BAKEOFF_ENGINE (default: auto), params.yaml and dvc.yaml, and the
environment, parts of which the stage inherits. The exit code is the stage's, or the engine's own if that could not
start it (125 to 127). A stage that runs out of memory is restarted one step down its fallback ladder; any other failure
is final. Imports nothing heavy: every stage waits for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import click

from stages.core.atomic import remove_unfinished
from stages.core.errors import OUT_OF_MEMORY, UserError
from stages.core.signals import ENDING, end_with_own_parent
from stages.launcher.container import StageFolder
from stages.launcher.engines import Engine, choose_engine
from stages.launcher.gpus import leased_gpus, refuse_old_driver
from stages.launcher.messages import say
from stages.launcher.pipeline import TRACKED, Request, cache_dir, declared_stages, item_of
from stages.launcher.process import STAGES, Ended
from stages.launcher.record import recorder
from stages.launcher.settings import checked_params
from stages.launcher.slurm import run_step, runs_in_slurm
from stages.planning.disk import disk_use, require_room
from stages.planning.ladder import batch_size_changes, rung_changes
from stages.planning.plan import read_plan
from stages.training.checkpoints import checkpoints_dir, remove_finished

WORKSPACE_DIR = Path(__file__).resolve().parents[2]


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("stage", type=click.Choice(STAGES))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def main(stage: str, args: tuple[str, ...]) -> None:
    """Run STAGE with ARGS in a fresh container or process."""
    request = Request(
        stage=stage,
        args=args or item_of(os.environ.get("DVC_STAGE", "")),
        params=checked_params(WORKSPACE_DIR),  # DVC may have removed the outputs of the stage by now
        stages=declared_stages(WORKSPACE_DIR),
        workspace_dir=WORKSPACE_DIR,
        caller=os.environ,
    )
    if request.by_dvc:
        # DVC waits for its stages; killed, it leaves them running, and the next `dvc repro` would start a second
        # writer of the same folder. A launcher that a person started may outlive its shell (nohup).
        end_with_own_parent(int(os.environ["BAKEOFF_CALLER"]))
    code = launch(request)
    # The first node's code is the stage's; Slurm would kill that node's task, which may still be saving.
    sys.exit(0 if request.node > 0 and code - 128 in ENDING else code)


def launch(request: Request) -> int:
    """Run a stage to its end and return its exit code. Raises UserError if it cannot be run."""
    refuse_missing_deps(request)
    refuse_linked_folders(request)
    if runs_in_slurm(request.caller, request.params):
        request.require_declared()
        return run_step(request)
    wanted = request.caller.get("BAKEOFF_ENGINE") or "auto"
    engine = choose_engine(wanted, workspace_dir=WORKSPACE_DIR, target=request.image_target)
    if engine.image is not None:  # a container runs only what dvc.yaml declares; docker/run train --help needs none
        request.require_declared()
    if request.source and request.params.active.device.kind == "cuda":
        refuse_old_driver(f"what {request.title} fetches")
    refuse_online_tracking(request, engine)
    return run_here(request, engine)


def run_here(request: Request, engine: Engine) -> int:
    """Run the stage on this machine, alone and on free GPUs; returns its exit code."""
    declared = request.declared
    with (
        StageFolder(request).alone() if declared else nullcontext(),
        leased_gpus(
            request.num_gpus,
            locks_dir=request.repository_dir / ".bakeoff/gpus",
            holder=request.title,
            visible=request.caller.get("CUDA_VISIBLE_DEVICES"),
        ) as gpus,
    ):
        request = replace(request, gpus=gpus)
        if request.stage == "merge" and request.name and request.by_dvc:  # DVC has stored the trained weights
            remove_finished(checkpoints_dir(request.repository_dir, request.name))
        record = recorder(request, engine) if declared and request.node == 0 else None
        if declared and request.node == 0:
            for output in declared.written:  # a killed run's would take the room of this one's
                remove_unfinished(request.workspace_dir / output)
        refuse_full_disk(request)
        ended, attempt = run_down_the_ladder(engine.run, request)
        if ended.code == 0 and record is not None:
            record(ended, attempt)
    return ended.code


def run_down_the_ladder(run: Callable[[Request], Ended], request: Request) -> tuple[Ended, int]:
    """Run the stage, and again one step further down its fallback ladder each time it runs out of memory.

    Returns how the last attempt ended, and its number. Raises UserError if memory runs out on the last step.
    """
    ended = run(request)
    if ended.code != OUT_OF_MEMORY:
        return ended, 0
    title, changes = request.title, ladder(request)
    if request.num_nodes > 1:
        raise UserError(
            f"{title} ran out of memory on a node, and is not restarted over several; these changes would take less, "
            f"in this order: {', '.join(changes) or 'none that keeps its result'}"
        )
    for attempt, change in enumerate(changes, start=1):
        say(f"{title} ran out of memory; restarting it with {change}")
        ended = run(replace(request, attempt=attempt))
        if ended.code != OUT_OF_MEMORY:
            return ended, attempt
    if not changes:
        raise UserError(f"{title} ran out of memory; it needs a machine or a profile with more")
    tried = "\n".join(f"  {change}" for change in ("as planned", *changes))
    raise UserError(
        f"{title} ran out of memory with every setting lowered that keeps its result. It tried, one after the other:\n"
        f"{tried}\nChoose one of: a profile with more memory, fewer images.max_pixels, a smaller base"
    )


def ladder(request: Request) -> list[str]:
    """The change that each further attempt at a stage makes; empty if nothing can be lowered."""
    generates = request.stage in ("evaluate", "predict")
    runs_dir = request.workspace_dir / "data/runs"
    if request.stage == "train":
        return rung_changes(read_plan(request.name, runs_dir=runs_dir))
    if request.stage == "merge":  # out of 4 bits it generates too; a training's last step may have turned to them
        generates = read_plan(request.name, runs_dir=runs_dir).may_be_quantized
    return batch_size_changes(request.params.active.evaluation.batch_size) if generates else []


def refuse_missing_deps(request: Request) -> None:
    """DVC takes no list of dependencies from params.yaml, and would run the stage before those that it depends on.

    Raises UserError with the lines that dvc.yaml lacks.
    """
    declared, params, needed = request.declared, request.params, list[tuple[str, str]]()  # (list of the stage, line)
    if declared is None:
        return
    if request.stage == "build" and request.name in params.builds:
        for recipe in params.builds[request.name].recipes:
            needed += [("deps", f"data/runs/{recipe}/merged"), ("params", f"recipes.{recipe}")]
    elif dataset := params.active.datasets.get(request.name) if request.stage == "prepare" else None:
        if f"stages/tasks/{dataset.task}/sources" not in declared.deps:
            place = f"stages.prepare.foreach.{request.name}"
            raise UserError(
                f"dvc.yaml has another task for {request.name} than params.yaml; {place}: set task: {dataset.task}"
            )
        needed += [("deps", f"data/prepared/{part}") for part in dataset.mix or ()]
    kind = declared.name.partition("@")[0]
    lacking = [f"stages.{kind}.do.{key}:  - {line}" for key, line in needed if line not in getattr(declared, key)]
    if lacking:
        raise UserError(
            f"{declared.name} needs dependencies that dvc.yaml does not name, so DVC would not wait for them; add:\n  "
            + "\n  ".join(lacking)
        )


def refuse_linked_folders(request: Request) -> None:
    """Raises UserError for outputs that a link leads out of the workspace: DVC refuses them when the stage has run."""
    for out in request.declared.outs if request.declared and request.by_dvc else ():
        folder = (request.workspace_dir / out).parent.resolve()
        if not folder.is_relative_to(request.workspace_dir):
            raise UserError(
                f"{out} would lie in {folder}, by a link, and DVC keeps no outputs outside of the repository. Put the "
                "whole checkout on the other disk, or DVC's cache: dvc cache dir --local FOLDER"
            )


def refuse_online_tracking(request: Request, engine: Engine) -> None:
    tracking = request.params.tracking
    online = "wandb" in tracking.to and tracking.wandb_mode == "online"
    if online and request.stage in TRACKED and engine.image is not None:
        raise UserError(
            "tracking.wandb_mode is online, but a container has no network. Track offline and send the "
            "runs later (wandb sync .bakeoff/tracking/wandb/offline-*), or run without one: BAKEOFF_ENGINE=process"
        )


def refuse_full_disk(request: Request) -> None:
    """Raises UserError if a training or a merge would fill a disk before it is done.

    Checked just before the stage starts: a wait for GPUs may be long. Checkpoints count if they are on the disk of the
    results; on a disk of their own, a training goes on without those that do not fit.
    """
    stage, name, params = request.stage, request.name, request.params
    runs_dir = request.workspace_dir / "data/runs"
    if stage not in ("train", "merge") or name not in params.recipes or not (runs_dir / name / "plan.yaml").is_file():
        return  # the stage reports it
    plan = read_plan(name, runs_dir=runs_dir)
    if not plan.trainable:
        return
    use, saved_dir = disk_use(plan, params), checkpoints_dir(request.repository_dir, name)
    if stage == "merge":
        needed = use.merged_bytes
        kept = needed * use.keeps_merged
    else:
        kept = use.trained_bytes
        saved = sum(path.stat().st_size for path in saved_dir.rglob("*") if path.is_file())
        needed = kept + (max(0, use.checkpoints_bytes - saved) if same_disk(saved_dir, runs_dir) else 0)
    require_room(needed, runs_dir, what=request.title)
    if not same_disk(objects := cache_dir(request.workspace_dir), runs_dir):
        require_room(kept, nearest_existing(objects), what=f"{request.title}, in DVC's cache,")


def same_disk(one: Path, other: Path) -> bool:
    """Whether two paths, which need not exist yet, are or will be on one file system."""
    return nearest_existing(one).stat().st_dev == nearest_existing(other).stat().st_dev


def nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


if __name__ == "__main__":
    main(prog_name="docker/run")
