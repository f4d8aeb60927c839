"""Write a finished run as a folder to hand on: the model, its card, and the proof of both.

Reads   data/runs/RUN/: merged/, trained/, merge.json, plan.yaml, metrics.json, examples/; of an export
        data/exports/RUN/ and its certificate, and merged/, merge.json and plan.yaml of its recipe
        data/report/TASK/, data/provenance/TASK/: what the comparison reads; data/prepared/DATA/
Writes  data/published/RUN/: the merged model and its configuration, or the export
            trained/                  the adapter, if there is one
            README.md, examples/      the model card
            evidence/                 lineage, certificate, plan, metrics
            provenance.intoto.json    a statement of how the model was made: in-toto, SLSA provenance
            model.sig, signing-key.pub.pem
Run     docker/run publish r4-joint
        docker/run publish chat-lora-q8

The key is .bakeoff/signing/key.pem, made if there is none.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from stages.core.errors import UserError, configure_logging
from stages.core.lineage import LINEAGE_FILE, short, verified_lineage
from stages.core.params import load_params
from stages.core.params.schema import Params
from stages.core.provenance import records_dir
from stages.core.records import obtain, rebuild
from stages.core.tasks import load_task
from stages.exporting.certificate import exported_model
from stages.models.certificate import certified_model
from stages.models.folders import read_config, require_weights
from stages.publishing.check import CERTIFICATE, EXPORT_CERTIFICATE, LINEAGE, METRICS, PLAN
from stages.publishing.folder import records_of, write_folder
from stages.publishing.model_card import Publication, evaluated_on, ingredients_of
from stages.reporting.compare import compare, read_contenders, task_report

DATA_DIR = Path("data")


@click.command(help=__doc__)
@click.argument("run")
def main(run: str) -> None:
    configure_logging(f"publish {run}")
    publish_run(load_params(), run, DATA_DIR / "published" / run)


def publish_run(params: Params, run: str, published_dir: Path) -> None:
    """Raises UserError if the run is not complete, or its files are not those that were made."""
    key_dir = Path(os.environ.get("DVC_ROOT") or Path.cwd()) / ".bakeoff/signing"
    write_folder(gather(params, run), published_dir, key_dir=key_dir)


def gather(params: Params, run: str) -> Publication:
    """Everything to publish of a run. Raises UserError if it is not complete, or lacks a record."""
    recipe_name = params.recipe_name(run)
    recipe, run_dir, recipe_dir = params.recipe(recipe_name), DATA_DIR / "runs" / run, DATA_DIR / "runs" / recipe_name
    merged_dir, model = certified_model(params, recipe_name)
    model_dir, evidence = merged_dir, {CERTIFICATE: recipe_dir / "merge.json", PLAN: recipe_dir / "plan.yaml"}
    if run in params.exports:
        model_dir, model, _ = exported_model(params, run)
        evidence[EXPORT_CERTIFICATE] = model_dir.with_name(f"{run}.json")
    else:
        require_weights(merged_dir)
        verified_lineage(run_dir / "trained", fix=rebuild(f"train@{run}"))
    report = task_report(params, recipe.task)
    comparison = compare(report, read_contenders(params, report, [DATA_DIR]))
    by_name = {each.name: each for each in comparison.contenders}
    contender, trained = by_name[run], by_name[recipe_name]
    for each in (trained, contender):
        if not each.runs:
            raise UserError(f"{each.name} has not been evaluated; {obtain(each.stage)}")
    if (evaluated := contender.runs[0].model) != model.digest:
        raise UserError(
            f"{run} was evaluated with content {short(evaluated)}, but {model_dir} now holds "
            f"{short(model.digest)}; evaluate it again with: dvc repro {contender.stage}"
        )
    samples, prepared_dir = load_task(recipe.task, "samples"), DATA_DIR / "prepared" / recipe.data
    questions = [
        samples.conversation(sample, answered=False, answer_format=recipe.answer_format)
        for sample in samples.read_split(prepared_dir, "val")
    ]
    records = records_of(model, contender.stage, records_dir(DATA_DIR, recipe.task))
    plans = [record.plan for record in records if record.stage.startswith("train@") and record.plan]
    trained_on = [Path(plan["data_dir"]).name for plan in plans]
    return Publication(
        comparison=comparison,
        contender=contender,
        trained=trained.runs[0],
        export=params.exports.get(run),
        model=model,
        model_dir=model_dir,
        evidence={**evidence, METRICS: run_dir / "metrics.json", LINEAGE: model_dir / LINEAGE_FILE},
        ingredients=ingredients_of(model, trained_on, prepared_dir, params),
        evaluated_on=evaluated_on(prepared_dir, params),
        config=read_config(merged_dir),
        question=next((question for question in questions if question.images), questions[0]),
        trained_dir=run_dir / "trained" if (run_dir / "trained" / "adapter").is_dir() else None,
        records=records,
    )


if __name__ == "__main__":
    main()
