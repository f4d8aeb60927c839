"""Train one recipe, exactly as its plan says, and keep what was trained.

Reads   data/runs/RECIPE/plan.yaml, the base it names, the prepared data
Writes  data/runs/RECIPE/trained/   an adapter, the weights of parts trained in full, or both; lineage.json
        data/runs/RECIPE/training/  training.json (totals), trace.csv (every step), and curves in DVCLive's form
        data/report/TASK/memory/RECIPE/train.json  what the process held
Keeps   .bakeoff/checkpoints/RECIPE/, until what it trained is merged; the same command goes on from there
        .bakeoff/features/, of pictures by frozen vision towers, for the trainings to come
Run     docker/run train r1-llm-only

Ends with a code of its own where memory runs out; the launcher then starts it anew, each attempt one rung further down.
Asked to end, it saves after the step under way and ends as if killed by the signal.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

import click
from peft import PeftModel
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun
from transformers import PreTrainedModel, TrainerCallback

from stages.core.errors import OUT_OF_MEMORY, OutOfMemory, UserError
from stages.core.lineage import Lineage, read_lineage, short, verified_lineage, write_lineage
from stages.core.logs import configure_logging
from stages.core.params.load import load_params
from stages.core.params.schema import made_by
from stages.core.parent_death import end_with_own_parent
from stages.core.publish import publish_json, published
from stages.core.signals import ENDING, GRACE_S, handled_signals
from stages.kit.internals.torch_internals import expand_segments
from stages.kit.memory_use import MemoryLog, recognised_out_of_memory, write_stage_memory
from stages.kit.mixture.trainer import make_trainer
from stages.kit.models.adapters import TrainableCounts, apply_recipe, save_trained, trained_tensors
from stages.kit.models.kernels import fused_kernels
from stages.kit.models.load import balanced_gpus, gpus_in_use, load_config, load_model, process_mesh, see_only, shard
from stages.kit.models.prompts import load_processor
from stages.kit.planning.ladder import lowered, settings
from stages.kit.planning.plan import DATA_PARALLEL, Plan, read_plan
from stages.kit.training.checkpoints import checkpoints_dir, kept_checkpoints
from stages.kit.training.collators import ConversationCollator
from stages.kit.training.features import features_dir, kept_features, use_features
from stages.kit.training.fingerprint import identity_of
from stages.kit.training.fused_loss import prepare_kernels
from stages.kit.training.peak import PeakMemory
from stages.kit.training.progress import LiveMetrics, MetricFiles, progress_callback
from stages.kit.training.record import TrainingRecord, write_trace
from stages.kit.training.resumable import train_to_the_end
from stages.kit.training.seed import seed_everything
from stages.kit.training.tracking import trainer_settings
from stages.tasks import load_task

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("recipe")
@click.option("--attempt", type=click.IntRange(min=0), default=0, help="Rungs of the ladder to take.  [default: 0]")
@recognised_out_of_memory()
def main(recipe: str, attempt: int) -> None:
    plan = lowered(read_plan(recipe), attempt)
    if plan is None:
        raise UserError(f"the plan of {recipe} has fewer than {attempt} settings to give up")
    if plan.placement in DATA_PARALLEL and "LOCAL_RANK" not in os.environ:
        run_one_process_a_device(plan, attempt)
        return
    if "LOCAL_RANK" in os.environ:
        end_with_own_parent()
    configure_logging(f"train {recipe} ({plan.profile})", facts=is_first_process())
    if attempt:
        log.info("attempt %d: %s", attempt, ", ".join(f"{name} {value}" for name, value in settings(plan).items()))
    see_only(plan.device)
    if plan.expandable_segments and plan.device.kind == "cuda":
        expand_segments()
    seed_everything(plan.seed)
    base_lineage = read_base(plan.base_dir)
    log.info("base %s, content %s", plan.base_dir, short(base_lineage.digest))

    # What a person may have to fix is looked at before the weights, which can take minutes to load.
    params = load_params()
    reporting = trainer_settings(params.tracking, recipe)
    processor = load_processor(Path(plan.base_dir), plan.images)
    samples = load_task(plan.task, "samples")
    records = samples.read_split(Path(plan.data_dir), "train")
    collator = ConversationCollator.of_plan(plan, processor, records, samples)
    log.info("%s", collator.lengths_said())
    identity = identity_of(plan, attempt=attempt, base=base_lineage, data_path=Path(plan.data_dir, "train.parquet"))
    # Below the repository also when DVC runs an experiment in a clone that it throws away.
    repository = Path(os.environ.get("DVC_ROOT", "."))

    prepare_kernels(plan)
    memory = MemoryLog(gpus_in_use(plan.device, plan.placement))
    model = load_for_training(plan)
    memory.loaded()
    log.info("%s", TrainableCounts(**plan.trainable))

    run_dir = Path("data/runs") / recipe
    with (
        kept_checkpoints(
            checkpoints_dir(repository, recipe), identity, keep=params.checkpoints.keep, owner=is_first_process()
        ) as checkpoints,
        kept_features(features_dir(repository), plan, identity) as features,
        fused_kernels(model, used=plan.fused_kernels),
        published(run_dir / "training", keep=is_first_process()) as training_dir,
        published(run_dir / "trained", keep=is_first_process()) as trained_dir,
        tempfile.TemporaryDirectory() as scratch,
    ):
        callbacks: list[TrainerCallback] = [progress_callback()]
        if is_first_process():
            callbacks.append(LiveMetrics(MetricFiles(training_dir)))
        trainer = make_trainer(
            plan,
            model=model,
            processor=processor,
            collator=collator,
            callbacks=callbacks,
            scratch_dir=Path(scratch),
            **reporting,
        )
        if features is not None:
            use_features(trainer, collator, features, limit_gb=params.active.memory.features_gb)
        trace = train_to_the_end(trainer, checkpoints, params.checkpoints)
        peak = PeakMemory.of(plan.device, on_cpu=trainer.rehearsal.cpu_peak_bytes)
        record = TrainingRecord.of(
            plan,
            trainer.state,
            attempt=attempt,
            seconds=trainer.seconds,
            peak=peak,
        )
        trained = trainer.accelerator.unwrap_model(trainer.model)
        tensors = trained_tensors(trained)
        if is_first_process():
            save_trained(trained, trained_dir, base_dir=plan.base_dir, tensors=tensors)
            lineage = write_lineage(
                trained_dir, kind="trained", name=recipe, parents={"base": (Path(plan.base_dir), base_lineage)}
            )
            publish_json(record, training_dir / "training.json")
            write_trace(trace, training_dir / "trace.csv")
            write_stage_memory(memory.finish("train", recipe), task=plan.task)
            log.info("trained %s, content %s: %s", recipe, short(lineage.digest), record.summary())


def load_base(plan: Plan) -> PreTrainedModel:
    return load_model(
        Path(plan.base_dir),
        device=plan.device,
        precision=plan.precision,
        quantization=plan.quantization,
        attn=plan.attn,
        padding_free=plan.padding_free,
        placement=plan.placement,
        gpus=balanced_gpus(plan, load_config(Path(plan.base_dir))),
    )


def load_for_training(plan: Plan) -> PreTrainedModel | PeftModel:
    model = apply_recipe(load_base(plan), plan.parts, plan.lora, plan.full_targets)
    if plan.placement == "sharded":
        shard(model, plan, process_mesh(plan))
    return model


def run_one_process_a_device(plan: Plan, attempt: int) -> None:
    """Placements ddp and sharded: run torchrun, one worker a device; the workers come back to `main` with their rank.

    Over several nodes this runs on each of them, and whoever starts it there says by torchrun's own variables which
    node it is and where the first one is. Raises UserError where nobody did, OutOfMemory where a worker did. Where the
    kernel killed one, this ends as a killed process does; also where they were asked to end, once they have saved.
    """
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(GRACE_S)  # torchrun's own, 30 s, may not suffice to save
    asked = ",".join(number.name for number in handled_signals())
    if plan.device.nodes > 1 and not {"PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"} <= os.environ.keys():
        raise UserError(f"a training over {plan.device.nodes} nodes is started on each of them: BAKEOFF_PLACE=slurm")
    nodes = ["--standalone"] if plan.device.nodes == 1 else [f"--nnodes={plan.device.nodes}"]
    worker = ["stages.train", plan.recipe, "--attempt", str(attempt)]
    try:
        torchrun([*nodes, f"--nproc-per-node={plan.device.count}", "--signals-to-handle", asked, "-m", *worker])
    except SignalException as request:
        sys.exit(128 + request.sigval)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if OUT_OF_MEMORY in codes:
            raise OutOfMemory("a process of the training ran out of memory") from None
        if -signal.SIGKILL in codes:
            sys.exit(128 + signal.SIGKILL)
        if ended_by := codes & {128 + number for number in ENDING}:
            sys.exit(max(ended_by))
        raise


def read_base(base_dir: str) -> Lineage:
    """The base's lineage. The first process compares it with the files, and where they differ ends, and the others with
    it. Raises UserError."""
    read = verified_lineage if is_first_process() else read_lineage
    return read(Path(base_dir), fix=f"dvc repro -f -s {made_by(base_dir.removeprefix('data/'))}")


def is_first_process() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


if __name__ == "__main__":
    main()
