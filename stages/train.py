"""Train one recipe as its plan says, and write what was trained.

Reads   data/runs/RECIPE/plan.yaml, the base it names, the prepared data: train, and the split validated on
Writes  data/runs/RECIPE/trained/   an adapter, the weights of parts trained in full, or both; lineage.json
        data/runs/RECIPE/training/  training.json (totals), trace.csv (every step), and curves (plots/): of
                                    every few steps, and of validation
        data/report/TASK/memory/RECIPE/train.json  memory that the process used
Keeps   .bakeoff/checkpoints/RECIPE/, until its merge starts; the same command resumes from there
        .bakeoff/features/, of images by frozen vision towers, for later trainings
Run     docker/run train r1-llm-only

Exits with code 79 on out-of-memory; the launcher restarts it one step down the fallback ladder.
On a signal to end, it saves after the current step and exits with 128 + the signal.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stages.core.atomic import atomic_folder
from stages.core.errors import configure_logging
from stages.core.lineage import Lineage, read_lineage, short, verified_lineage, write_lineage
from stages.core.params import load_params
from stages.core.params.schema import made_by
from stages.core.records import rebuild
from stages.core.tasks import load_task
from stages.evaluation.validation import Validator
from stages.mixture.trainer import make_trainer
from stages.models.adapters import initial_tensors, load_trainable, save_trained, trainable_line, trained_tensors
from stages.models.kernels import fused_kernels
from stages.models.load import gpus_in_use
from stages.models.prompts import load_processor
from stages.planning.ladder import planned, settings
from stages.planning.memory_use import MemoryLog, recognised_out_of_memory
from stages.planning.plan import Plan
from stages.training.batches import ConversationCollator
from stages.training.checkpoints import checkpoints_dir, kept_checkpoints
from stages.training.features import frozen_features
from stages.training.identity import identity_of
from stages.training.processes import is_first_process, is_worker, run_workers, set_up
from stages.training.records import tracking_arguments, write_records
from stages.training.resume import train_to_the_end
from stages.training.trainer import RecipeTrainer

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("recipe")
@click.option("--attempt", type=click.IntRange(min=0), default=0, help="Rungs of the ladder to take.  [default: 0]")
@recognised_out_of_memory()
def main(recipe: str, attempt: int) -> None:
    plan = planned(recipe, attempt)
    if plan.is_data_parallel and not is_worker():
        run_workers(plan.device, ["stages.train", recipe, "--attempt", str(attempt)])
        return
    configure_logging(f"train {recipe} ({plan.profile})", facts=is_first_process())
    if attempt:
        log.info("attempt %d: %s", attempt, ", ".join(f"{name} {value}" for name, value in settings(plan).items()))
    set_up(plan)
    train(plan, attempt)


def train(plan: Plan, attempt: int) -> None:
    """In each process of the training; the first one writes the results."""
    params, first = load_params(), is_first_process()
    # Below the repository also if DVC runs an experiment in a clone that it throws away.
    repository, run_dir = Path(os.environ.get("DVC_ROOT", ".")), Path("data/runs") / plan.name
    # Check what a person may have to fix before the weights, which can take minutes to load.
    base, tracking = read_base(plan.base_dir), tracking_arguments(params.tracking, plan.name)
    inputs, data = read_inputs(plan)
    identity = identity_of(plan, attempt=attempt, base=base, data=data)

    memory = MemoryLog(gpus_in_use(plan.device, plan.memory.placement))
    model = load_trainable(plan)
    initial = initial_tensors(model, plan.recipe)
    memory.loaded()
    log.info(trainable_line(plan.trainable))
    saved_dir, limit_gb = checkpoints_dir(repository, plan.name), params.active.memory.features_gb
    with (
        kept_checkpoints(saved_dir, identity, keep=params.checkpoints.keep, owner=first) as checkpoints,
        fused_kernels(model, used=plan.fused_kernels),
        atomic_folder(run_dir / "training", keep=first) as training_dir,
        atomic_folder(run_dir / "trained", keep=first) as trained_dir,
    ):
        trainer = make_trainer(plan, model=model, **inputs, **tracking)
        with frozen_features(trainer, repository / ".bakeoff/features", identity, limit_gb=limit_gb), trainer.gpu_use:
            train_to_the_end(trainer, checkpoints, params.checkpoints)
        save(trainer, base, attempt, training_dir, trained_dir, initial)
    if first:
        memory.write("train", plan.name, task=plan.recipe.task)


def read_inputs(plan: Plan) -> tuple[dict[str, Any], dict[str, Path]]:
    """Processor, collator and validator, as arguments of a trainer; and the files of their samples."""
    samples, data_dir = load_task(plan.recipe.task, "samples"), Path(plan.data_dir)
    processor = load_processor(Path(plan.base_dir), plan.images, plan.recipe.template_options)
    records = samples.read_split(data_dir, "train")
    collator = ConversationCollator.for_plan(plan, processor, records, samples)
    log.info("%s", collator.length_summary())
    data, validator = {"data": data_dir / "train.parquet"}, None
    if plan.validation is not None:
        data["validation"] = data_dir / f"{plan.validation.split}.parquet"
        validator = Validator.for_plan(plan, processor)
    return {"processor": processor, "collator": collator, "validator": validator}, data


def save(
    trainer: RecipeTrainer,
    base: Lineage,
    attempt: int,
    training_dir: Path,
    trained_dir: Path,
    initial: dict[str, torch.Tensor],
) -> None:
    """Write what was trained, and its records, in the first process; every process calls it, as each has a share.

    initial: from `initial_tensors`.
    """
    plan, trained = trainer.plan, trainer.accelerator.unwrap_model(trainer.model)
    tensors = trained_tensors(trained)
    if not is_first_process():
        return
    found: Any = {"base_name": base.source.get("hub", plan.base_dir), "revision": base.source.get("revision")}
    save_trained(trained, trained_dir, **found, tensors=tensors, initial=initial)
    parents = {"base": (Path(plan.base_dir), base)}
    lineage = write_lineage(trained_dir, kind="trained", name=plan.name, parents=parents)
    record = write_records(trainer, training_dir, attempt=attempt)
    log.info("trained %s, content %s: %s", plan.name, short(lineage.digest), record.summary())


def read_base(base_dir: str) -> Lineage:
    """The base's lineage. The first process compares it with the files; if they differ, it ends, and the others with
    it. Raises UserError."""
    read = verified_lineage if is_first_process() else read_lineage
    lineage = read(Path(base_dir), fix=rebuild(made_by(base_dir.removeprefix("data/"))))
    log.info("base %s, content %s", base_dir, short(lineage.digest))
    return lineage


if __name__ == "__main__":
    main()
