"""Let EleutherAI's lm-evaluation-harness score a model too, and show its figures beside those of `evaluate`.

Reads   the model that `evaluate` scores and its certificate, the prepared data; metrics.json, if `evaluate` has run
Writes  data/runs/RUN/lm_eval/: results.json, and the questions as the harness reads them
Run     make lm-eval RUN=moe-finetune
        make lm-eval RUN=base-dense

It is no stage of the pipeline: nothing depends on it. Needs lm-eval (make setup EXTRAS=lm-eval), and no network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import click
from rich.console import Console
from rich.text import Text

from stages.core.errors import OutOfMemory, UserError
from stages.core.lineage import Lineage, read_lineage
from stages.core.logs import configure_logging
from stages.core.params.load import load_params
from stages.core.params.schema import Params, ProfileParams
from stages.core.publish import published
from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.generation import room_for_questions
from stages.kit.memory_use import recognised_out_of_memory
from stages.kit.models.certificate import certified_model
from stages.kit.models.load import load_config, see_only
from stages.kit.models.processors import load_processor, rendered, shortened, tokenizer_of
from stages.kit.models.trained import load_certified
from stages.kit.planning.plan import read_plan
from stages.kit.reporting.cards import MODEL_LINEAGE_FILE, cards_dir
from stages.kit.reporting.runs import evaluation_stage, read_run
from stages.kit.reporting.tables import Column, Row, Table, terminal_table
from stages.tasks import load_task
from tools.lm_eval.scoring import Figure, Score, harness_scores, require_lm_eval

Ours = Mapping[str, Any]
COLUMNS = (
    Column("figure", "Figure"),
    Column("lm_eval", "lm-eval", ".4f"),
    Column("stderr", "Std. error", ".4f"),
    Column("ours", "metrics.json", ".4f"),
    Column("difference", "Difference", "+z.4f"),
)


@click.command(help=__doc__)
@click.argument("name", metavar="RUN")
@click.option("--batch-size", type=click.IntRange(min=1), help="Answers at once.  [default: the profile's]")
def main(name: str, batch_size: int | Literal["auto"] | None) -> None:
    configure_logging(f"lm-eval {name}")
    installed = require_lm_eval()
    params = load_params()
    subject = params.subject(name)
    task, samples = questions_of(subject.task), load_task(subject.task, "samples")
    model_dir, lineage = certified_model(params, name)
    answer_format = read_plan(name).answer_format if name in params.recipes else subject.answer_format
    samples.check(load_config(model_dir).model_type, answer_format)
    profile = params.active
    records = samples.read_split(Path("data/prepared") / subject.data, params.scored)[: profile.evaluation.max_samples]
    batch_size = batch_size or profile.evaluation.batch_size
    if batch_size == "auto":
        raise UserError(f"evaluation.batch_size is auto; say how many: make lm-eval RUN={name} BATCH_SIZE=8")
    ours, why_not = own_metrics(params, name, lineage, [record.id for record in records])

    folder_path = Path("data/runs") / name / "lm_eval"
    with published(folder_path) as folder:
        documents = write_documents(task, records, profile, model_dir, folder)
        figures = [figure for figure in task.FIGURES if figure.documents in documents]
        device, memory = profile.device.one(), profile.memory
        see_only(device)
        try:
            with recognised_out_of_memory():
                model = load_certified(model_dir, device=device, precision=memory.precision, attn=memory.attn)
                scores = harness_scores(
                    model.eval(),
                    tokenizer_of(load_processor(model_dir, profile.images)),
                    figures,
                    tasks_dir=task.TASKS_DIR,
                    documents_dir=folder,
                    batch_size=batch_size,
                    max_new_tokens=profile.evaluation.max_new_tokens,
                )
        except OutOfMemory as error:  # no launcher is there to start it again
            fewer = f"make lm-eval RUN={name} BATCH_SIZE={max(1, batch_size // 2)}"
            raise UserError(f"{error.message}, with {batch_size} answers at once; try fewer: {fewer}") from error
        results = {
            "lm_eval": installed,
            "model": lineage.digest,
            "profile": params.profile,
            "batch_size": batch_size,
            "questions": documents,
            "figures": [
                {"task": figure.task, "metric": figure.metric, **vars(score), "metrics_json": ours.get(figure.ours)}
                for figure, score in zip(figures, scores, strict=True)
            ],
        }
        (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")

    show(scores_table(figures, scores, ours), Console(highlight=False))
    if why_not:
        click.echo(why_not)
    counts = " and ".join(f"{count:,} of {kind}" for kind, count in documents.items())
    click.echo(f"{counts}; the questions: {folder_path}")


def questions_of(task: str) -> ModuleType:
    """The package beside this file for the task. Raises UserError where there is none."""
    try:
        return import_module(f"tools.lm_eval.{task}")
    except ModuleNotFoundError:
        raise UserError(f"lm-evaluation-harness knows nothing like the task {task}; it scores those of moe") from None


def write_documents(
    task: Any, records: Sequence[Any], profile: ProfileParams, model_dir: Path, folder: Path
) -> dict[str, int]:
    """Writes the questions, word for word as `evaluate` asks them, to KIND.jsonl; returns how many of each kind."""
    settings, processor = profile.evaluation, load_processor(model_dir, profile.images)
    room = room_for_questions(settings.max_length, settings.max_new_tokens)

    def render(conversation: Conversation) -> str:
        return rendered(processor, shortened(processor, conversation, room))

    documents: dict[str, list[dict[str, Any]]] = task.documents(records, render)
    for kind, found in documents.items():
        text = "".join(f"{json.dumps(document)}\n" for document in found)
        (folder / f"{kind}.jsonl").write_text(text, encoding="utf-8")
    return {kind: len(found) for kind, found in documents.items()}


def own_metrics(params: Params, name: str, lineage: Lineage, sample_ids: Sequence[str]) -> tuple[Ours, str]:
    """metrics.json of this model and these samples; or nothing, and why."""
    trained = name in params.recipes
    card_dir = cards_dir(Path("data"), params.subject(name).task) / name
    run = read_run(card_dir, identity=("id",), columns=(), trained=trained)
    fix = f"run: dvc repro {evaluation_stage(name, trained=trained)}"
    if run is None:
        return {}, f"{name} has not been evaluated yet, so there is nothing to compare with; {fix}"
    if read_lineage(card_dir, name=MODEL_LINEAGE_FILE).digest != lineage.digest:
        return {}, f"metrics.json is of what {name} was before, and left out; {fix}"
    if run.sample_ids != tuple(sample_ids):
        return {}, f"metrics.json is of other samples, and left out; {fix}"
    return run.metrics, ""


def scores_table(figures: Sequence[Figure], scores: Sequence[Score], ours: Ours) -> Table:
    rows = []
    for figure, score in zip(figures, scores, strict=True):
        own = ours.get(figure.ours)
        difference = None if own is None or score.value is None else score.value - own
        note = figure.note if score.value is not None else "probabilities are too small for lm-eval to add them up"
        rows.append(Row(cells=(figure.heading, score.value, score.stderr, own, difference), note=note))
    return Table(columns=COLUMNS, rows=tuple(rows))


def show(table: Table, console: Console) -> None:
    console.print(terminal_table(table))
    headings: dict[str, list[str]] = {}
    for heading, note in table.notes:
        headings.setdefault(note, []).append(heading)
    for note, noted in headings.items():
        console.print(Text(f"{' and '.join(noted)}: {note}", style="dim"), soft_wrap=True)


if __name__ == "__main__":
    main()
