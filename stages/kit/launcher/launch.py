"""Starts one stage in a fresh container or process: what `docker/run STAGE [NAME]` ends in.

DVC names the stage that it runs in DVC_STAGE, and dvc.yaml gives no NAME: DVC puts names into its commands unquoted, so
one from a stranger's params.yaml would be run by its shell.
Reads BAKEOFF_ENGINE (default: auto), params.yaml and dvc.yaml, and the environment that the stage is to inherit parts
of. Its exit code is the stage's, or the engine's own where that could not start it (125 to 127). A stage that ran out
of memory is started anew, one rung of its ladder further down; any other failure is final. Imports nothing heavy: it is
on the way of every stage.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import click

from stages.core.dvc_cache import cache_dir
from stages.core.errors import OUT_OF_MEMORY, UserError
from stages.core.params.load import load_params
from stages.core.params.schema import DeviceParams, Params
from stages.core.parent_death import end_with_own_parent
from stages.kit.launcher.cache import share_with_cache
from stages.kit.launcher.download_check import refuse_download_without_gpus
from stages.kit.launcher.dvc_command import DvcCommand, caller_pid, params_left, said_path
from stages.kit.launcher.engines import DEFAULT_ENGINE, Engine, choose_engine
from stages.kit.launcher.gpus import leased_gpus
from stages.kit.launcher.outputs import ASIDE_DIR, link_aside, refuse_links_out, run_alone
from stages.kit.launcher.permissions import writable_by_everybody
from stages.kit.launcher.pipeline import DeclaredStage, Pipeline, item_of
from stages.kit.launcher.provenance_recorder import ProvenanceRecorder
from stages.kit.launcher.stage_run import STAGES, Ended, StageRun, called
from stages.kit.launcher.triton_cache import triton_dir
from stages.kit.planning.disk import disk_use, require_room
from stages.kit.planning.ladder import batch_size_changes, rung_changes
from stages.kit.planning.memory_record import read_memory_record
from stages.kit.planning.plan import read_plan
from stages.kit.training.checkpoints import checkpoints_dir, remove_finished

WORKSPACE_DIR = Path(__file__).resolve().parents[3]


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("stage", type=click.Choice(STAGES))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def main(stage: str, args: tuple[str, ...]) -> None:
    """Run STAGE with ARGS in a fresh container or process."""
    if "DVC_STAGE" not in os.environ:
        sys.exit(launch(stage, args, command_line=(), say_once=say))
    # DVC waits for its stages; killed, it leaves them running, and the next `dvc repro` starts a second
    # writer on the same folder. A launcher typed by hand may outlive its shell (nohup).
    end_with_own_parent(caller_pid())
    command = DvcCommand.of_process(caller_pid())

    def say_once(line: str) -> None:
        if command is None or command.first_time(line, said_path(repository_dir(os.environ))):
            say(line)

    try:
        code = launch(
            stage,
            args or item_of(os.environ["DVC_STAGE"]),
            command_line=command.arguments if command else (),
            say_once=say_once,
        )
    except UserError as error:
        error.show()
        code = error.exit_code
    if code != 0 and command is not None and (back := params_left(command, os.environ, WORKSPACE_DIR)):
        say(back)
    sys.exit(code)


def launch(stage: str, args: tuple[str, ...], *, command_line: Sequence[str], say_once: Callable[[str], None]) -> int:
    """Run a stage to its end and return its exit code. Raises UserError where it cannot be run.

    command_line: of the DVC that runs the stage; empty without one.
    say_once: says what is the same for all stages of one command.
    """
    refuse_links_out(repository_dir(os.environ), (".bakeoff/gpus",))
    own_dirs = (WORKSPACE_DIR, WORKSPACE_DIR / "docker", repository_dir(os.environ) / ".bakeoff", Path(sys.prefix))
    open_paths = [f"o-w '{folder}'" for folder in writable_by_everybody(own_dirs)]
    code_dir = WORKSPACE_DIR / "stages"
    if writable_by_everybody((code_dir, *code_dir.rglob("*"))):  # 3 ms
        open_paths.append(f"-R o-w '{code_dir}'")
    for path in open_paths:
        say_once(f"every account of this machine can change what runs here; end that with: chmod {path}")
    params = load_params(WORKSPACE_DIR / "params.yaml")
    device = params.active.device
    engine = choose_engine(
        os.environ.get("BAKEOFF_ENGINE") or DEFAULT_ENGINE,
        workspace_dir=WORKSPACE_DIR,
        target=device.kind,
        say=say_once,
    )
    tracking = params.tracking
    if stage == "train" and engine.sealed and tracking.wandb and tracking.wandb_mode == "online":
        raise UserError(
            "tracking.wandb_mode is online, but a container has no network to train with. Track offline and send the "
            "runs later (wandb sync .bakeoff/tracking/wandb/offline-*), or train without one: BAKEOFF_ENGINE=process"
        )
    pipeline = Pipeline.of(WORKSPACE_DIR)
    # Of every stage: DVC removes outputs before it calls the launcher, and all of them wait for `check`.
    outs = (out for each in pipeline.stages for out in each.outs)
    refuse_links_out(WORKSPACE_DIR, (f"{ASIDE_DIR}/stage", *outs))
    declared = pipeline.that_runs(called(stage, args))
    if declared is not None:
        refuse_undeclared(declared, stage, args[0] if args else "", params)
    source = source_of(stage, args, params)
    if source and "DVC_STAGE" in os.environ:
        refuse_download_without_gpus(
            source,
            params,
            pipeline,
            command_line=command_line,
            in_container=engine.image is not None,
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )
    with (
        run_alone(declared, WORKSPACE_DIR) if declared is not None else nullcontext(),
        leased_gpus(
            gpus_wanted(stage, device),
            locks_dir=repository_dir(os.environ) / ".bakeoff/gpus",
            holder=" ".join((stage, *args)),
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            say=say,
        ) as gpus,
    ):
        if stage == "merge" and args and "DVC_STAGE" in os.environ:  # DVC has kept what was trained: it is safe
            remove_finished(checkpoints_dir(repository_dir(os.environ), args[0]))
        stage_run = StageRun(
            stage=stage,
            args=args,
            workspace_dir=WORKSPACE_DIR,
            source_dir=source_dir(source),
            hub_dir=hub_cache(os.environ) if source.startswith("hub:") else None,
            kept_dirs=kept_dirs(stage, args, params, os.environ),
            gpus=tuple(gpu.uuid for gpu in gpus),
            caller=os.environ,
            terminal=sys.stderr.isatty(),
            pipeline=pipeline,
            triton_dir=triton_dir(engine.image, repository_dir(os.environ)) if gpus else None,
        )
        recorder = ProvenanceRecorder.called(stage_run, params, engine)
        if declared is not None and "DVC_STAGE" in os.environ:
            share_with_cache(WORKSPACE_DIR, kept_inputs(declared, pipeline), aside=link_aside(declared, WORKSPACE_DIR))
        refuse_full_disk(stage, args[0] if args else "", params)
        ended, attempt = run_down_the_ladder(engine, stage_run, params)
        if ended.code == 0 and recorder is not None:
            recorder.write(ended, attempt=attempt, gpus=gpus)
    return ended.code


def kept_inputs(declared: DeclaredStage, pipeline: Pipeline) -> list[str]:
    """Outputs of other stages that a stage reads, without what git keeps."""
    outs = {out for stage in pipeline.stages for out in stage.outs}
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
    use, saved_dir = disk_use(plan, params), checkpoints_dir(repository_dir(os.environ), name)
    if stage == "merge":
        needed = kept = use.merged_bytes
        kept *= use.keeps_merged
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


def run_down_the_ladder(engine: Engine, stage_run: StageRun, params: Params) -> tuple[Ended, int]:
    """Run the stage, and again with the next rung's settings each time it runs out of memory.

    Returns how the last attempt ended, and its number. Raises UserError where memory ran out with nothing left to give
    up.
    """
    ended = engine.run(stage_run)
    if ended.code != OUT_OF_MEMORY:
        return ended, 0
    what = " ".join((stage_run.stage, *stage_run.args))
    changes = ladder(stage_run, params)
    for attempt, change in enumerate(changes, start=1):
        say(f"{what} ran out of memory; it starts anew with {change}")
        ended = engine.run(replace(stage_run, attempt=attempt))
        if ended.code != OUT_OF_MEMORY:
            return ended, attempt
    raise out_of_rungs(what, changes, budget(stage_run))


def ladder(stage_run: StageRun, params: Params) -> list[str]:
    """What each further attempt at a stage changes; nothing where it has nothing to give up."""
    name = stage_run.args[0] if stage_run.args else ""
    if stage_run.stage == "train":
        return rung_changes(read_plan(name, runs_dir=WORKSPACE_DIR / "data/runs"))
    answers = stage_run.stage in ("evaluate", "predict")
    if stage_run.stage == "merge":  # out of 4 bits it answers too; a training's last rung may have turned to them
        plan = read_plan(name, runs_dir=WORKSPACE_DIR / "data/runs")
        answers = plan.quantization != "none" or plan.may_quantize
    return batch_size_changes(params.active.evaluation.batch_size) if answers else []


def budget(stage_run: StageRun) -> str:
    """What a training was predicted to take as planned; "" for another stage."""
    path = WORKSPACE_DIR / "data/runs" / stage_run.args[0] / "memory.json"
    if stage_run.stage != "train" or not path.exists():
        return ""
    record = read_memory_record(path)
    return f"As planned it was predicted to take {record.summary()} (calibration: {record.calibration}).\n"


def out_of_rungs(what: str, changes: Sequence[str], budget: str) -> UserError:
    """The last word."""
    if not changes:
        return UserError(f"{what} ran out of memory; it needs a machine or a profile with more")
    tried = "\n".join(f"  {change}" for change in ("as planned", *changes))
    return UserError(
        f"{what} ran out of memory with everything given up that its result allows. It tried, one after the other:\n"
        f"{tried}\n{budget}What is left is yours to choose: a profile with more memory, fewer images.max_pixels, or a "
        f"smaller base"
    )


def say(line: str) -> None:
    click.echo(f"launcher: {line}", err=True)


def gpus_wanted(stage: str, device: DeviceParams) -> int:
    """Training takes the devices of the profile, what holds one model for inference takes one of them."""
    if device.kind == "cpu":
        return 0
    return {"train": device.count, "merge": 1, "build": 1, "evaluate": 1, "predict": 1}.get(stage, 0)


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


def source_of(stage: str, args: tuple[str, ...], params: Params) -> str:
    """Where base and prepare take their data from; "" for the other stages, and for a name the stage will refuse."""
    name, profile = args[0] if args else "", params.active
    if stage == "prepare" and name in profile.datasets:
        return profile.datasets[name].source
    return profile.bases.get(name, "") if stage == "base" else ""


def source_dir(source: str) -> Path | None:
    kind, _, where = source.partition(":")
    return Path(os.path.normpath(WORKSPACE_DIR / where)) if kind == "folder" else None


def hub_cache(caller: Mapping[str, str]) -> Path:
    """As huggingface_hub chooses it (huggingface_hub/constants.py)."""
    cache_home = Path(caller.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(caller.get("HF_HOME") or cache_home / "huggingface").expanduser().absolute()


def kept_dirs(stage: str, args: tuple[str, ...], params: Params, caller: Mapping[str, str]) -> tuple[Path, ...]:
    """What a training writes to beside its outputs; nothing for the other stages, and for a name it will refuse."""
    if stage != "train" or not args or args[0] not in params.recipes:
        return ()
    tracked = (tracking_dir(caller),) if params.tracking.wandb else ()
    return (checkpoints_dir(repository_dir(caller), args[0]), *tracked)


def tracking_dir(caller: Mapping[str, str]) -> Path:
    """Where Weights & Biases keeps runs; stages/kit/training/progress.py tells it so."""
    return repository_dir(caller) / ".bakeoff/tracking"


def repository_dir(caller: Mapping[str, str]) -> Path:
    """Of the person, also where DVC runs an experiment in a clone that it throws away."""
    return Path(caller.get("DVC_ROOT") or WORKSPACE_DIR)


if __name__ == "__main__":
    main(prog_name="docker/run")
