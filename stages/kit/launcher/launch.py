"""Starts one stage in a fresh container or process: the end of `docker/run STAGE [NAME]`.

A call becomes a Request; checks refuse one that cannot succeed; then the stage runs here, or as a job of Slurm in
which the same launcher runs it. DVC names the stage in DVC_STAGE, and dvc.yaml gives no NAME: DVC puts names into its
commands unquoted, so that a shell would run one from a stranger's params.yaml.

Reads BAKEOFF_PLACE (default: the profile's), BAKEOFF_ENGINE (default: auto), params.yaml and dvc.yaml, and the
environment, parts of which the stage inherits. The exit code is the stage's, or the engine's own if that could not
start it (125 to 127). A stage that runs out of memory is restarted one step down its fallback ladder; any other failure
is final. Imports nothing heavy: every stage waits for it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import click

from stages.core.errors import OUT_OF_MEMORY, UserError
from stages.core.given_files import cache_dir
from stages.core.lineage import file_digest
from stages.core.params import load_params
from stages.core.params.schema import Params
from stages.core.signals import end_with_own_parent
from stages.kit.launcher.container import ASIDE_DIR, Outputs, refuse_links_out
from stages.kit.launcher.engines import Engine, choose_engine
from stages.kit.launcher.gpus import Gpu, leased_gpus
from stages.kit.launcher.pipeline import (
    JOB_VARIABLE,
    TRACKED,
    DeclaredStage,
    Request,
    declared_stages,
    hub_cache,
    item_of,
    repository_of,
    stage_of_command,
)
from stages.kit.launcher.process import STAGES, Ended, StageRun, triton_dir
from stages.kit.launcher.record import ProvenanceRecorder, code_digest, recorded_inputs, used_params
from stages.kit.launcher.slurm import JobDir, node_of, rendezvous, run_inside_job, runs_in_slurm
from stages.kit.launcher.slurm_wait import StageJob, caller_pid
from stages.kit.planning.disk import disk_use, require_room
from stages.kit.planning.ladder import batch_size_changes, rung_changes
from stages.kit.planning.plan import read_plan
from stages.kit.training.checkpoints import checkpoints_dir, remove_finished

WORKSPACE_DIR = Path(__file__).resolve().parents[3]


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("stage", type=click.Choice(STAGES))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def main(stage: str, args: tuple[str, ...]) -> None:
    """Run STAGE with ARGS in a fresh container or process."""
    if "DVC_STAGE" in os.environ and JOB_VARIABLE not in os.environ:
        # DVC waits for its stages; killed, it leaves them running, and the next `dvc repro` would start a second
        # writer of the same folder. A launcher that a person started may outlive its shell (nohup).
        end_with_own_parent(caller_pid())
    args = args or item_of(os.environ.get("DVC_STAGE", ""))

    def run() -> int:
        try:
            return launch(stage, args)
        except UserError as error:
            error.show()
            return error.exit_code

    if JOB_VARIABLE not in os.environ:
        sys.exit(run())
    declared = stage_of_command(declared_stages(WORKSPACE_DIR), stage, args)
    assert declared is not None
    sys.exit(run_inside_job(stage, args[0] if args else "", declared, run, WORKSPACE_DIR, say))


def launch(stage: str, args: tuple[str, ...]) -> int:
    """Run a stage to its end and return its exit code. Raises UserError if it cannot be run."""
    refuse_links_out(repository_of(os.environ, WORKSPACE_DIR), (".bakeoff/gpus",))
    request = Request(
        stage=stage,
        args=args,
        params=load_params(WORKSPACE_DIR / "params.yaml"),
        stages=declared_stages(WORKSPACE_DIR),
        workspace_dir=WORKSPACE_DIR,
        caller=os.environ,
    )
    # For every stage: DVC removes outputs before it calls the launcher, and all of them wait for `check`.
    refuse_links_out(WORKSPACE_DIR, (f"{ASIDE_DIR}/stage", *(out for each in request.stages for out in each.outs)))
    if not request.sends and runs_in_slurm(stage, request.caller, request.params):  # a node has no network
        return run_as_job(request)
    engine = choose_engine(request.engine_name, workspace_dir=WORKSPACE_DIR, target=request.image_target, say=say)
    if engine.image is not None:  # a container runs only what dvc.yaml declares; docker/run train --help needs none
        request.require_declared()
    refuse_online_tracking(request, engine)
    refuse_missing_deps(request)
    refuse_changed_job(request)
    return run_here(request, engine)


def run_here(request: Request, engine: Engine) -> int:
    """Run the stage on this machine, alone and on free GPUs; returns its exit code."""
    name, declared = request.name, request.declared
    node = node_of(request.caller) if request.in_job else 0
    outputs = Outputs(declared, request.workspace_dir, node=node) if declared else None
    with (
        outputs.alone() if outputs else nullcontext(),
        leased_gpus(
            request.num_gpus,
            locks_dir=request.repository_dir / ".bakeoff/gpus",
            holder=request.title,
            visible=request.caller.get("CUDA_VISIBLE_DEVICES"),
            say=say,
        ) as gpus,
    ):
        if request.stage == "merge" and name and request.by_dvc:  # DVC has stored the trained weights
            remove_finished(checkpoints_dir(request.repository_dir, name))
        stage_run = stage_run_of(request, engine, gpus, node)
        recorder = None
        if declared and node == 0:
            inputs = recorded_inputs(request.workspace_dir, request.stages, declared)
            recorder = ProvenanceRecorder(request, stage_run, declared, engine, inputs)
        refuse_full_disk(request)
        ended, attempt = run_down_the_ladder(engine.run, stage_run, request.params, say=say)
        if ended.code == 0 and recorder is not None:
            recorder.write(ended, attempt=attempt, gpus=gpus)
    return ended.code


def stage_run_of(request: Request, engine: Engine, gpus: Sequence[Gpu], node: int) -> StageRun:
    kind, _, where = request.source.partition(":")
    own_dirs = {"HF_HOME": hub_cache(request.caller)} if request.network else {}
    if gpus:
        own_dirs["TRITON_CACHE_DIR"] = triton_dir(engine.image, request.repository_dir)
    variables = {variable: str(folder) for variable, folder in own_dirs.items()}
    if request.num_nodes > 1 and request.in_job:
        variables |= rendezvous(request.caller)
    return StageRun(
        stage=request.stage,
        args=request.args,
        declared=request.declared,
        workspace_dir=request.workspace_dir,
        source_dir=Path(os.path.normpath(request.workspace_dir / where)) if kind == "folder" else None,
        network=request.network,
        kept_dirs=(*own_dirs.values(), *request.kept_dirs),
        gpus=tuple(gpu.uuid for gpu in gpus),
        caller=request.caller,
        variables=variables,
        num_nodes=request.num_nodes,
        node=node,
        terminal=sys.stderr.isatty(),
    )


def run_down_the_ladder(
    run: Callable[[StageRun], Ended], stage_run: StageRun, params: Params, *, say: Callable[[str], None]
) -> tuple[Ended, int]:
    """Run the stage, and again one step further down its fallback ladder each time it runs out of memory.

    Returns how the last attempt ended, and its number. Raises UserError if memory runs out on the last step.
    """
    ended = run(stage_run)
    if ended.code != OUT_OF_MEMORY:
        return ended, 0
    what = " ".join((stage_run.stage, *stage_run.args))
    changes = ladder(stage_run, params)
    if stage_run.num_nodes > 1:
        raise UserError(
            f"{what} ran out of memory on a node, and is not restarted over several; these changes would take less, in "
            f"this order: {', '.join(changes) or 'none that keeps its result'}"
        )
    for attempt, change in enumerate(changes, start=1):
        say(f"{what} ran out of memory; restarting it with {change}")
        ended = run(replace(stage_run, attempt=attempt))
        if ended.code != OUT_OF_MEMORY:
            return ended, attempt
    if not changes:
        raise UserError(f"{what} ran out of memory; it needs a machine or a profile with more")
    tried = "\n".join(f"  {change}" for change in ("as planned", *changes))
    raise UserError(
        f"{what} ran out of memory with every setting lowered that keeps its result. It tried, one after the other:\n"
        f"{tried}\nChoose one of: a profile with more memory, fewer images.max_pixels, a smaller base"
    )


def ladder(stage_run: StageRun, params: Params) -> list[str]:
    """The change that each further attempt at a stage makes; empty if nothing can be lowered."""
    generates = stage_run.stage in ("evaluate", "predict")
    if stage_run.stage in ("train", "merge"):
        plan = read_plan(stage_run.args[0] if stage_run.args else "", runs_dir=stage_run.workspace_dir / "data/runs")
        if stage_run.stage == "train":
            return rung_changes(plan)
        # A merge out of 4 bits generates too; a training's last step may have turned to them.
        generates = plan.may_be_quantized
    return batch_size_changes(params.active.evaluation.batch_size) if generates else []


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
    elif request.stage == "prepare" and request.name in params.active.datasets:
        needed += [("deps", f"data/prepared/{part}") for part in params.active.datasets[request.name].mix or ()]
    kind = declared.name.partition("@")[0]
    lacking = [f"stages.{kind}.do.{key}:  - {line}" for key, line in needed if line not in getattr(declared, key)]
    if lacking:
        raise UserError(
            f"{declared.name} needs dependencies that dvc.yaml does not name, so DVC would not wait for them; add:\n  "
            + "\n  ".join(lacking)
        )


def refuse_online_tracking(request: Request, engine: Engine) -> None:
    tracking = request.params.tracking
    if request.stage in TRACKED and engine.image is not None and tracking.wandb and tracking.wandb_mode == "online":
        raise UserError(
            "tracking.wandb_mode is online, but a container has no network. Track offline and send the "
            "runs later (wandb sync .bakeoff/tracking/wandb/offline-*), or run without one: BAKEOFF_ENGINE=process"
        )


def refuse_changed_job(request: Request) -> None:
    """Raises UserError if files changed after this job was submitted, so that it would do something else."""
    if request.in_job and request.declared is not None:
        facts = job_facts(request, request.declared)
        if changed := JobDir(Path(request.caller[JOB_VARIABLE])).changed_since(facts):
            raise UserError(
                f"{', '.join(changed)} changed after this job was submitted; run the same command to submit it again. "
                "To change files while jobs wait, use an experiment: dvc exp run --queue"
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


def run_as_job(request: Request) -> int:
    """Run a stage as a job of Slurm, whose launcher runs it by `run_here`; returns its exit code.

    Raises UserError if Slurm would refuse it, or it could not succeed.
    """
    declared = request.require_declared()
    refuse_missing_deps(request)
    job = StageJob(request, job_facts(request, declared), say=say)
    if request.by_dvc:
        # The end of dvc does not end the job.
        end_with_own_parent(caller_pid(), signal.SIGHUP)
    return job.run()


def job_facts(request: Request, declared: DeclaredStage) -> dict[str, object]:
    """Everything that the result of a job depends on, by names for people.

    Raises UserError if an input is not what its stage made.
    """
    folders = (request.workspace_dir / dep for dep in declared.inputs("docker"))
    image_files = (path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        "command": [request.stage, *request.args],
        "inputs": recorded_inputs(request.workspace_dir, request.stages, declared),
        "params": used_params(request.params, declared),
        "code": code_digest(request.workspace_dir, declared),
        "image": {path.name: file_digest(path) for path in image_files},
        "engine": request.engine_name,
    }


def say(line: str) -> None:
    click.echo(f"launcher: {line}", err=True)


if __name__ == "__main__":
    main(prog_name="docker/run")
