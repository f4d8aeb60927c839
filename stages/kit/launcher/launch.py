"""Starts one stage in a fresh container or process: what `docker/run STAGE [NAME]` ends in.

DVC names the stage that it runs in DVC_STAGE, and dvc.yaml gives no NAME: DVC puts names into its commands unquoted, so
one from a stranger's params.yaml would be run by its shell.
Reads BAKEOFF_PLACE (default: the profile's), BAKEOFF_ENGINE (default: auto), params.yaml and dvc.yaml, and the
environment that the stage is to inherit parts of. Its exit code is the stage's, or the engine's own where that could
not start it (125 to 127). A stage that ran out of memory is started anew, one rung of its ladder further down; any
other failure is final. Imports nothing heavy: every stage waits for it.
"""

import os
import signal
import stat
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import click

from stages.core.dvc_cache import cache_dir
from stages.core.errors import UserError
from stages.core.params.load import load_params
from stages.core.params.schema import Params
from stages.core.parent_death import end_with_own_parent
from stages.kit.launcher.attempts import run_down_the_ladder
from stages.kit.launcher.cache import share_with_cache
from stages.kit.launcher.download_check import refuse_download_without_gpus
from stages.kit.launcher.dvc_command import caller_pid, dvc_command_line, params_left
from stages.kit.launcher.engines import DEFAULT_ENGINE, Engine, choose_engine
from stages.kit.launcher.leases import leased_gpus
from stages.kit.launcher.machine import triton_dir
from stages.kit.launcher.needs import (
    TRACKED,
    gpus_wanted,
    hub_cache,
    image_target,
    kept_dirs,
    repository_dir,
    source_dir,
    source_of,
)
from stages.kit.launcher.outputs import ASIDE_DIR, Outputs, refuse_links_out
from stages.kit.launcher.pipeline import DeclaredStage, declared_stages, item_of, sends_what_it_wrote, stage_of_command
from stages.kit.launcher.places import job_facts, runs_in_slurm, stage_job
from stages.kit.launcher.provenance_recorder import ProvenanceRecorder, recorded_inputs
from stages.kit.launcher.slurm.inside_job import JOB_VARIABLE, run_inside_job
from stages.kit.launcher.slurm.job_dir import JobDir
from stages.kit.launcher.slurm.nodes import node_of, nodes_of, rendezvous
from stages.kit.launcher.stage_run import STAGES, StageRun
from stages.kit.planning.disk import disk_use, require_room
from stages.kit.planning.plan import read_plan
from stages.kit.training.checkpoints import checkpoints_dir, remove_finished

WORKSPACE_DIR = Path(__file__).resolve().parents[3]


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("stage", type=click.Choice(STAGES))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def main(stage: str, args: tuple[str, ...]) -> None:
    """Run STAGE with ARGS in a fresh container or process."""
    by_dvc, in_job = "DVC_STAGE" in os.environ, JOB_VARIABLE in os.environ
    if by_dvc and not in_job:
        # DVC waits for its stages; killed, it leaves them running, and the next `dvc repro` starts a second
        # writer on the same folder. A launcher typed by hand may outlive its shell (nohup).
        end_with_own_parent(caller_pid())
    command_line = dvc_command_line(os.environ) if by_dvc else []
    args = args or item_of(os.environ.get("DVC_STAGE", ""))

    def run() -> int:
        try:
            return launch(stage, args, command_line=command_line)
        except UserError as error:
            error.show()
            return error.exit_code

    if in_job:
        sys.exit(run_inside_job(stage, args, run, workspace_dir=WORKSPACE_DIR, say=say))
    code = run()
    if by_dvc and code != 0 and (back := params_left(command_line, os.environ, WORKSPACE_DIR)):
        say(back)
    sys.exit(code)


def launch(stage: str, args: tuple[str, ...], *, command_line: Sequence[str]) -> int:
    """Run a stage to its end and return its exit code. Raises UserError where it cannot be run.

    command_line: of the DVC that runs the stage; empty without one.
    """
    name, by_dvc, repository = (
        args[0] if args else "",
        "DVC_STAGE" in os.environ,
        repository_dir(os.environ, WORKSPACE_DIR),
    )
    refuse_links_out(repository, (".bakeoff/gpus",))
    name_open_paths(repository)
    params = load_params(WORKSPACE_DIR / "params.yaml")
    sends = sends_what_it_wrote(stage, args)
    stages = declared_stages(WORKSPACE_DIR)
    # Of every stage: DVC removes outputs before it calls the launcher, and all of them wait for `check`.
    refuse_links_out(WORKSPACE_DIR, (f"{ASIDE_DIR}/stage", *(out for each in stages for out in each.outs)))
    if not sends and runs_in_slurm(stage, os.environ, params):  # a node has no network
        return run_as_job(stage, args, params, stages)
    in_job, device, visible = JOB_VARIABLE in os.environ, params.active.device, os.environ.get("CUDA_VISIBLE_DEVICES")
    engine_name = os.environ.get("BAKEOFF_ENGINE") or DEFAULT_ENGINE
    target = image_target(stage, params)
    engine = choose_engine(engine_name, workspace_dir=WORKSPACE_DIR, target=target, say=say)
    refuse_online_tracking(stage, engine, params)
    # A process can do without, as for docker/run train --help.
    declared = stage_of_command(stages, stage, args, required=engine.image is not None)
    if declared is not None:
        refuse_undeclared(declared, stage, name, params)
        refuse_changed_job(stage, args, declared, params, stages)
    source = source_of(stage, name, params)
    if source and by_dvc and not in_job:  # the job that downloads has no GPU, and others will
        in_container = engine.image is not None
        refuse_download_without_gpus(
            source, params, stages, command_line=command_line, in_container=in_container, visible=visible
        )
    num_nodes, node = nodes_of(stage, device), node_of(os.environ) if in_job else 0
    outputs = Outputs(declared, WORKSPACE_DIR, node=node) if declared else None
    with (
        outputs.alone() if outputs else nullcontext(),
        leased_gpus(
            gpus_wanted(stage, device),
            # Slurm gives each of its GPUs to one job; a lock would not be seen on every network file system.
            locks_dir=None if in_job else repository / ".bakeoff/gpus",
            holder=" ".join((stage, *args)),
            visible=visible,
            say=say,
        ) as gpus,
    ):
        if stage == "merge" and name and by_dvc:  # DVC has kept what was trained: it is safe
            remove_finished(checkpoints_dir(repository, name))
        network = sends or source.startswith("hub:")
        own_dirs = {"HF_HOME": hub_cache(os.environ)} if network else {}
        if gpus:
            own_dirs["TRITON_CACHE_DIR"] = triton_dir(engine.image, repository)
        variables = {variable: str(folder) for variable, folder in own_dirs.items()}
        if num_nodes > 1 and in_job:
            variables |= rendezvous(os.environ)
        stage_run = StageRun(
            stage=stage,
            args=args,
            declared=declared,
            workspace_dir=WORKSPACE_DIR,
            source_dir=source_dir(source, WORKSPACE_DIR),
            network=network,
            kept_dirs=(*own_dirs.values(), *(() if sends else kept_dirs(stage, name, params, repository))),
            gpus=tuple(gpu.uuid for gpu in gpus),
            caller=os.environ,
            variables=variables,
            num_nodes=num_nodes,
            node=node,
            terminal=sys.stderr.isatty(),
        )
        recorder = None
        if declared and outputs and node == 0:
            inputs = recorded_inputs(WORKSPACE_DIR, stages, declared)
            recorder = ProvenanceRecorder(stage_run, declared, params, engine, inputs, target=target)
            if by_dvc:
                share_with_cache(WORKSPACE_DIR, kept_inputs(declared, stages), aside=outputs.link_path)
        refuse_full_disk(stage, name, params)
        ended, attempt = run_down_the_ladder(engine, stage_run, params, say=say)
        if ended.code == 0 and recorder is not None:
            recorder.write(ended, attempt=attempt, gpus=gpus)
    return ended.code


def run_as_job(stage: str, args: tuple[str, ...], params: Params, stages: Sequence[DeclaredStage]) -> int:
    """Run a stage as a job of Slurm, whose launcher does what follows, and return its exit code.

    Raises UserError where it cannot run, or is not to be waited for in vain.
    """
    declared = stage_of_command(stages, stage, args)
    assert declared is not None
    refuse_undeclared(declared, stage, args[0] if args else "", params)
    job = stage_job(stage, args, declared, params, stages, WORKSPACE_DIR, os.environ, say=say)
    if "DVC_STAGE" in os.environ:
        # The end of dvc is no request to end the job.
        end_with_own_parent(caller_pid(), signal.SIGHUP)
    return job.run()


def refuse_changed_job(
    stage: str, args: tuple[str, ...], declared: DeclaredStage, params: Params, stages: Sequence[DeclaredStage]
) -> None:
    """Raises UserError where a job would do something else than it was submitted for, as files changed meanwhile."""
    if JOB_VARIABLE not in os.environ:
        return
    facts = job_facts(stage, args, declared, params, stages, WORKSPACE_DIR, os.environ)
    if changed := JobDir(Path(os.environ[JOB_VARIABLE])).changed_since(facts):
        raise UserError(
            f"{', '.join(changed)} changed after this job was submitted; the same command submits it anew. "
            "To change files while jobs wait, use an experiment: dvc exp run --queue"
        )


def name_open_paths(repository: Path) -> None:
    """Name code and folders that other accounts may write to.

    Whoever may write into the checkout, its .venv or its .bakeoff decides what runs there: Python imports from the
    first two, and .bakeoff/triton holds compiled kernels. A checkpoint in .bakeoff holds no code
    (stages/kit/training/resume.py), but a changed one gives other weights. docker/run makes nothing that everybody may
    write to, whatever the umask.
    """

    def is_open(path: Path) -> bool:
        return path.exists() and bool(path.stat().st_mode & stat.S_IWOTH)

    own_dirs = (WORKSPACE_DIR, WORKSPACE_DIR / "docker", repository / ".bakeoff", Path(sys.prefix))
    open_paths = [f"o-w '{folder}'" for folder in own_dirs if is_open(folder)]
    code_dir = WORKSPACE_DIR / "stages"
    if any(map(is_open, (code_dir, *code_dir.rglob("*")))):  # 3 ms
        open_paths.append(f"-R o-w '{code_dir}'")
    for path in open_paths:
        say(f"every account of this machine can change what runs here; end that with: chmod {path}")


def refuse_online_tracking(stage: str, engine: Engine, params: Params) -> None:
    tracking = params.tracking
    if stage in TRACKED and engine.image is not None and tracking.wandb and tracking.wandb_mode == "online":
        raise UserError(
            "tracking.wandb_mode is online, but a container has no network. Track offline and send the "
            "runs later (wandb sync .bakeoff/tracking/wandb/offline-*), or work without one: BAKEOFF_ENGINE=process"
        )


def refuse_undeclared(declared: DeclaredStage, stage: str, name: str, params: Params) -> None:
    """DVC takes no list of dependencies from params.yaml, and would make the stage before what it is made of.

    Raises UserError with the lines that dvc.yaml lacks.
    """
    needed: list[tuple[str, str]] = []  # (list of the stage, line of it)
    if stage == "build" and name in params.builds:
        for recipe in params.builds[name].recipes:
            needed += [("deps", f"data/runs/{recipe}/merged"), ("params", f"recipes.{recipe}")]
    elif stage == "prepare" and name in params.active.datasets:
        needed += [("deps", f"data/prepared/{part}") for part in params.active.datasets[name].mix or ()]
    kind = declared.name.partition("@")[0]
    lacking = [f"stages.{kind}.do.{key}:  - {line}" for key, line in needed if line not in getattr(declared, key)]
    if lacking:
        raise UserError(
            f"{declared.name} needs what dvc.yaml does not name, so DVC would not wait for it; add:\n  "
            + "\n  ".join(lacking)
        )


def kept_inputs(declared: DeclaredStage, stages: Sequence[DeclaredStage]) -> list[str]:
    """Outputs of other stages that a stage reads, without files that git keeps."""
    outs = {out for stage in stages for out in stage.outs}
    return [path for path in declared.inputs("data") if outs.intersection((path, *map(str, Path(path).parents)))]


def refuse_full_disk(stage: str, name: str, params: Params) -> None:
    """Raises UserError where a training or a merge would fill a disk before it is done.

    Nothing without a recipe that has a plan. Checkpoints count where they lie on the disk of the results;
    on one of their own, a training goes on without those that have no room.
    """
    runs_dir = WORKSPACE_DIR / "data/runs"
    if stage not in ("train", "merge") or name not in params.recipes or not (runs_dir / name / "plan.yaml").is_file():
        return  # the stage says what is wrong
    plan = read_plan(name, runs_dir=runs_dir)
    if not plan.trainable:
        return
    use, saved_dir = disk_use(plan, params), checkpoints_dir(repository_dir(os.environ, WORKSPACE_DIR), name)
    if stage == "merge":
        needed = use.merged_bytes
        kept = needed * use.keeps_merged
    else:
        kept = use.trained_bytes
        saved = sum(path.stat().st_size for path in saved_dir.rglob("*") if path.is_file())
        needed = kept + (max(0, use.checkpoints_bytes - saved) if same_disk(saved_dir, runs_dir) else 0)
    require_room(needed, runs_dir, what=f"{stage} {name}")
    if not same_disk(objects := cache_dir(WORKSPACE_DIR), runs_dir):
        require_room(kept, nearest_existing(objects), what=f"{stage} {name}, in DVC's cache,")


def same_disk(one: Path, other: Path) -> bool:
    """Whether two paths, which need not exist yet, lie or will lie on one file system."""
    return nearest_existing(one).stat().st_dev == nearest_existing(other).stat().st_dev


def nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def say(line: str) -> None:
    click.echo(f"launcher: {line}", err=True)


if __name__ == "__main__":
    main(prog_name="docker/run")
