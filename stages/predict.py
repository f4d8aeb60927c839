"""Generate a trained model's completions of unlabeled inputs, and write them in the form of the task.

Reads   predictions.NAME; the merged model of its recipe and its certificate; its plan; the file of inputs
Writes  data/predictions/NAME.txt
Run     docker/run predict example-sentences

Exits with code 79 on out-of-memory; the launcher restarts it with half the batch.
"""

from __future__ import annotations

import logging
from pathlib import Path

import click

from stages.core.atomic import atomic_write
from stages.core.errors import configure_logging, pluralize
from stages.core.given_files import require_own
from stages.core.params import load_params
from stages.core.tasks import load_task
from stages.evaluation.generate import batch_size_for, load_generator
from stages.models.certificate import certified_model
from stages.models.folders import require_weights
from stages.planning.memory_use import recognised_out_of_memory
from stages.planning.plan import read_plan
from stages.planning.prediction import read_memory

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("name")
@click.option("--attempt", type=click.IntRange(min=0), default=0, help="Times to halve the batch.  [default: 0]")
@recognised_out_of_memory()
def main(name: str, attempt: int) -> None:
    configure_logging(f"predict {name}")
    params = load_params()
    wanted = params.prediction(name)
    task = load_task(wanted.task, "predictions")
    require_own(Path(wanted.inputs), Path("data"))
    inputs = task.read_inputs(Path(wanted.inputs))
    model_dir, _ = certified_model(params, wanted.recipe)
    require_weights(model_dir)
    answer_format = read_plan(wanted.recipe).recipe.answer_format

    samples = load_task(wanted.task, "samples")
    questions = [task.conversation(each, answer_format=answer_format) for each in inputs]
    largest = read_memory(wanted.recipe).evaluation_batch_size
    batch_size = batch_size_for(params.active.evaluation, len(questions), largest=largest, attempt=attempt)
    generator, memory = load_generator(
        model_dir, params.active, samples, answer_format=answer_format, batch_size=batch_size
    )
    completions = generator.completions(questions)
    submission = task.submission(inputs, completions, answer_format=answer_format)
    path = Path("data/predictions") / f"{name}.txt"
    atomic_write(submission.text, path)
    memory.finish("predict", name)
    log.info("%s: %s of %s; %s", path, pluralize(len(inputs), "completion"), wanted.recipe, submission.summary())


if __name__ == "__main__":
    main()
